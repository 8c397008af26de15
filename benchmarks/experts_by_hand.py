# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts that ranks share, as people write it by hand: sort, exchange, multiply, exchange, add."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear, silu, softmax


class _Exchanged(torch.autograd.Function):
    """Rows for each rank out, rows of each rank in."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.sizes = sent, received
        output = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(output, rows, received, sent)
        return output

    @staticmethod
    def backward(ctx, grad):
        sent, received = ctx.sizes
        return _Exchanged.forward(ctx, grad.contiguous(), received, sent), None, None


class MixtureByHand(nn.Module):
    """Softmax routing, SwiGLU experts, of which this rank has some."""

    def __init__(self, gate, w1, w2, w3, top_k):
        super().__init__()
        self.gate, self.top_k = nn.Parameter(gate), top_k
        self.w1, self.w2, self.w3 = map(nn.Parameter, (w1, w2, w3))

    def forward(self, tokens):
        weights, index = softmax(linear(tokens, self.gate), -1).topk(self.top_k)
        experts, ranks = self.gate.shape[0], dist.get_world_size()
        order = index.view(-1).argsort(stable=True)
        counts = index.view(-1).bincount(minlength=experts)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sent, received, by_source = self._read(counts, arriving, ranks)
        rows = _Exchanged.apply(tokens[order // self.top_k], sent, received)
        numbers = torch.arange(experts // ranks).repeat(ranks)
        sorting = numbers.repeat_interleave(by_source).argsort(stable=True)
        sizes = by_source.view(ranks, -1).sum(0).tolist()
        results = self._compute(rows[sorting], sizes)
        back = torch.empty_like(sorting)
        back[sorting] = torch.arange(len(sorting))
        results = _Exchanged.apply(results[back], received, sent)
        results = results * weights.view(-1)[order].unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, order // self.top_k, results)

    def _read(self, counts, arriving, ranks):
        both = torch.stack([counts, arriving]).view(2, ranks, -1).sum(-1).tolist()
        return *both, arriving

    def _compute(self, rows, sizes):
        outputs = []
        for part, w1, w2, w3 in zip(
            rows.split(sizes), self.w1, self.w2, self.w3, strict=True
        ):
            outputs.append(linear(silu(linear(part, w1)) * linear(part, w3), w2))
        return torch.cat(outputs)
