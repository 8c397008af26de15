# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts on torch, its tokens, and one step of it on several ranks against one device."""

import copy

import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it

from hyper_parallel import CommunicationLedger
from hyper_parallel.core.expert_parallel import ExpertParallel, FeedForward, MoE

DIM, HIDDEN, EXPERTS = 6, 8, 8
SIZES = [5, 0, 3, 1]  # tokens of each rank: different numbers, and none


def build(top_k=2, **options):
    torch.manual_seed(0)
    options = {"shared_expert": FeedForward(DIM, 4), **options}
    return MoE(DIM, HIDDEN, EXPERTS, top_k, **options).double()


def batches(ranks, sizes=None):
    """The tokens of every rank."""
    draw = torch.Generator().manual_seed(1)
    sizes = [5] * ranks if sizes is None else sizes[:ranks]
    return [
        torch.randn(size, DIM, dtype=torch.float64, generator=draw) for size in sizes
    ]


def formula(model, tokens):
    """The mixture on one device, without any code of the library but its router."""
    weights, index, _ = model.router(tokens, model.expert_bias)
    output = 0 if model.shared_expert is None else model.shared_expert(tokens)
    for w1, w2, w3, expert in zip(
        *(getattr(model.experts, f"w{n}") for n in (1, 2, 3)),
        range(EXPERTS),
        strict=True,
    ):
        for choice in range(index.shape[1]):
            weight = weights[:, choice : choice + 1]
            x = tokens * weight if model.score_before_experts else tokens
            y = (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T
            y = y if model.score_before_experts else y * weight
            output = output + y * (index[:, choice : choice + 1] == expert)
    return output


def alone(model, parts):
    """Output and gradients of one device with the tokens of all ranks: (parts of outputs, of inputs, parameters)."""
    leaf = torch.cat(parts).requires_grad_()
    output = formula(model, leaf)
    (output * weights_of(parts)).sum().backward()
    sizes = [len(part) for part in parts]
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return output.detach().split(sizes), leaf.grad.split(sizes), gradients


def weights_of(parts):
    draw = torch.Generator().manual_seed(2)
    return torch.randn(sum(map(len, parts)), DIM, dtype=torch.float64, generator=draw)


def whole(gradient, mesh):
    """The gradient of a parameter: of plain ones the sum of all ranks' parts."""
    if hasattr(gradient, "full_tensor"):
        return gradient.full_tensor()
    gradient = torch.zeros(()) if gradient is None else gradient.clone()
    torch.distributed.all_reduce(gradient, group=mesh.get_group())
    return gradient


def compare(start, parts, mesh, apply):
    """One step on all ranks of the axis, each with its own tokens, and on one device."""
    expected, of_inputs, gradients = alone(copy.deepcopy(start), parts)
    rank = mesh.get_local_rank()
    many = copy.deepcopy(start)
    apply(many)
    leaf = parts[rank].clone().requires_grad_()
    sizes = [len(part) for part in parts]
    with CommunicationLedger(mesh) as ledger:
        output = many(leaf)
        (output * weights_of(parts).split(sizes)[rank]).sum().backward()
    close(output, expected[rank])
    close(leaf.grad, of_inputs[rank])
    for name, parameter in many.named_parameters():
        assert parameter.grad is not None, name
        close(whole(parameter.grad, mesh), gradients[name], name)
    return ledger


def close(found, expected, what=""):
    torch.testing.assert_close(
        found, expected, rtol=1e-12, atol=1e-12, msg=lambda told: f"{what}: {told}"
    )


def shard(many, mesh):
    ExpertParallel().apply(many.experts, mesh)
