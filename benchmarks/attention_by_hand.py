# SPDX-License-Identifier: Apache-2.0
"""Attention on a sequence that ranks share, as people write it by hand: a ring and Ulysses on the kernel of the CPU."""

import math

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


# --- heads for positions


class _Exchanged(torch.autograd.Function):
    """One dim is divided among the ranks, and another one joined."""

    @staticmethod
    def forward(ctx, x, divided, joined):
        ctx.dims = divided, joined
        ranks = dist.get_world_size()
        sent = torch.cat([part.reshape(-1) for part in x.chunk(ranks, divided)])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        shape = list(x.shape)
        shape[divided] //= ranks
        parts = [part.view(shape) for part in received.chunk(ranks)]
        return torch.cat(parts, joined)

    @staticmethod
    def backward(ctx, grad):
        divided, joined = ctx.dims
        return _Exchanged.forward(ctx, grad, joined, divided), None, None


def attend_with_all_to_all(query, key, value, is_causal):
    """Ulysses: every rank has all positions of some heads meanwhile."""
    whole = [_Exchanged.apply(x, 1, 2) for x in (query, key, value)]
    output = scaled_dot_product_attention(*whole, is_causal=is_causal)
    return _Exchanged.apply(output, 2, 1)


# --- a ring


def _pass_on(tensor):
    """Begins to send a tensor to the next rank; returns what comes from the one before, and what to wait for."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
        ]
    )
    return received, works


def _wait(works):
    for work in works:
        work.wait()


class _Ring(torch.autograd.Function):
    """Keys and values go round, and what queries get from each part is merged."""

    @staticmethod
    def forward(ctx, query, key, value, is_causal):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        scale = 1 / math.sqrt(query.shape[-1])
        both, output, total = torch.stack([key, value]), None, None
        for step in range(ranks):
            if step < ranks - 1:
                received, works = _pass_on(both)
            owner = (rank - step) % ranks
            if not is_causal or owner <= rank:
                own, sums = _FORWARD(
                    query, *both, 0.0, is_causal and owner == rank, scale=scale
                )
                if output is None:
                    output, total = own, sums
                else:
                    joint = torch.logaddexp(total, sums)
                    output = output * (total - joint).exp().unsqueeze(-1)
                    output = output + own * (sums - joint).exp().unsqueeze(-1)
                    total = joint
            if step < ranks - 1:
                _wait(works)
                both = received
        ctx.save_for_backward(query, key, value, output, total)
        ctx.is_causal, ctx.scale = is_causal, scale
        return output

    @staticmethod
    def backward(ctx, grad):
        query, key, value, output, total = ctx.saved_tensors
        rank, ranks = dist.get_rank(), dist.get_world_size()
        both, of_query = torch.stack([key, value]), torch.zeros_like(query)
        of_both, moving = torch.zeros_like(both), None
        for step in range(ranks):
            if step < ranks - 1:
                received, works = _pass_on(both)
            owner = (rank - step) % ranks
            own = None
            if not ctx.is_causal or owner <= rank:
                is_causal = ctx.is_causal and owner == rank
                saved = (query, *both, output, total, 0.0, is_causal)
                mine, *own = _BACKWARD(grad, *saved, scale=ctx.scale)
                of_query += mine
            if moving is not None:
                of_both, before = moving
                _wait(before)
            if own is not None:
                of_both = of_both + torch.stack(own)
            moving = _pass_on(of_both)
            if step < ranks - 1:
                _wait(works)
                both = received
        of_both, before = moving
        _wait(before)
        return of_query, *of_both, None


def attend_in_a_ring(query, key, value, is_causal):
    """Every rank has its queries, and meets the keys of one rank after the other."""
    return _Ring.apply(query, key, value, is_causal)
