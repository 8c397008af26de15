# SPDX-License-Identifier: Apache-2.0
"""Parallel training written by hand on the platform, against one process: what the parts do together."""

import functools
import threading

import pytest
import torch
from torch import nn

from hyper_parallel import CheckpointPolicy, get_platform
from hyper_parallel.core.pipeline_parallel import HookCoordinator
from hyper_parallel.testing import on_ranks


class WholeMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) + x


class ShardedMlp(nn.Module):
    """The rows of ``up`` and the columns of ``down`` that this rank holds; sequences are sharded between the layers."""

    def __init__(self, whole):
        super().__init__()
        self.platform = get_platform()
        self.ranks, rank = self.platform.get_world_size(), self.platform.get_rank()
        self.up = nn.Parameter(
            self.platform.chunk(whole.up.weight.detach(), 0, self.ranks, rank).clone()
        )
        self.down = nn.Parameter(
            self.platform.chunk(whole.down.weight.detach(), 1, self.ranks, rank).clone()
        )

    def forward(self, x):
        everything = self.platform.differentiable_all_gather_concat(
            x, None, self.ranks, 0
        )
        partial = torch.relu(everything @ self.up.T) @ self.down.T
        return (
            self.platform.differentiable_reduce_scatter(
                partial, self.ranks, 0, "sum", None
            )
            + x
        )


def policy(ctx, op, *args, **kwargs):
    return (
        CheckpointPolicy.MUST_SWAP
        if op is torch.ops.aten.mm.default
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def wrapped(platform, module, how):
    if how == "recompute":
        return platform.ckpt_wrapper(module)
    if how == "selective":
        return platform.ckpt_wrapper(
            module,
            context_fn=functools.partial(
                platform.create_selective_checkpoint_contexts, policy
            ),
        )
    return platform.swap_wrapper(module) if how == "swap" else module


@pytest.mark.parametrize("how", ["plain", "recompute", "selective", "swap"])
@on_ranks(4)
def test_sequence_parallel_training_matches_one_process(how):
    torch.set_default_dtype(torch.float64)
    try:
        platform = get_platform()
        rank = platform.get_rank()
        torch.manual_seed(1)
        wholes = nn.Sequential(WholeMlp(), WholeMlp())
        batch = torch.randn(8, 6)
        sharded = nn.Sequential(
            *(wrapped(platform, ShardedMlp(whole), how) for whole in wholes)
        )
        assert [name for name, _ in sharded.named_parameters()] == [
            "0.up",
            "0.down",
            "1.up",
            "1.down",
        ]
        optimizers = [
            torch.optim.AdamW(model.parameters(), lr=0.05)
            for model in (wholes, sharded)
        ]
        for _ in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            expected = wholes(batch).square().sum()
            expected.backward()
            loss = sharded(platform.chunk(batch, 0, 4, rank)).square().sum()
            loss.backward()
            total = platform.all_reduce(loss.detach().clone(), None)
            torch.testing.assert_close(total, expected.detach())
            for whole, part in zip(wholes, sharded, strict=True):
                torch.testing.assert_close(
                    part.up.grad, platform.chunk(whole.up.weight.grad, 0, 4, rank)
                )
                torch.testing.assert_close(
                    part.down.grad, platform.chunk(whole.down.weight.grad, 1, 4, rank)
                )
            for optimizer in optimizers:
                optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)


@on_ranks(4)
def test_every_stage_draws_what_one_device_draws():
    platform = get_platform()
    rank = platform.get_rank()
    torch.manual_seed(3)
    reference = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    torch.manual_seed(3)
    with platform.init_on_device(platform.meta_device):
        model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    stage = model[rank]
    platform.init_parameters(stage, rank)
    assert torch.equal(stage.weight, reference[rank].weight)
    assert torch.equal(stage.bias, reference[rank].bias)
    assert model[(rank + 1) % 4].weight.is_meta  # the others' layers take no memory


def pass_through_experts(platform, x, group, coordinator):
    """Dispatch, compute, combine: two exchanges with hooks around each, as in a layer of experts."""
    hook = (
        platform.differentiable_sync_hook
        if coordinator is not None
        else lambda tensor, name, _: tensor
    )
    for layer in range(3):
        x = hook(x, "A", coordinator)
        x = platform.differentiable_all_to_all(x, x.shape, group)
        x = hook(x, "B", coordinator)
        x = torch.tanh(x) * (layer + 1)
        x = hook(x, "C", coordinator)
        x = platform.differentiable_all_to_all(x, x.shape, group)
        if layer < 2:
            x = hook(x, "D", coordinator)
    return x


@on_ranks(4)
def test_a_forward_and_a_backward_take_turns_with_real_exchanges():
    platform = get_platform()
    ranks = [0, 1, 2, 3]
    # Two threads communicate, so each has a group of its own.
    groups = [platform.split_group(None, [ranks], timeout=30) for _ in range(2)]
    inputs = [
        torch.randn(
            8, 3, generator=torch.Generator().manual_seed(s), dtype=torch.float64
        )
        for s in (0, 1)
    ]

    def run(coordinator):
        first, second = (x.clone().requires_grad_() for x in inputs)
        if coordinator is not None:
            coordinator.disable()
        pending = pass_through_experts(platform, first, groups[0], coordinator)
        results, errors = {}, []
        if coordinator is not None:
            coordinator.enable()

        def side(work):
            try:
                if coordinator is None:
                    work()
                else:
                    with coordinator.side():
                        work()
            except BaseException as error:
                errors.append(error)

        def forward():
            results["forward"] = pass_through_experts(
                platform, second, groups[1], coordinator
            )

        threads = [
            threading.Thread(
                target=side, args=(lambda: pending.square().sum().backward(),)
            ),
            threading.Thread(target=side, args=(forward,)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors
        return first.grad, results["forward"].detach()

    for actual, expected in zip(
        run(HookCoordinator(timeout=30)), run(None), strict=True
    ):
        assert torch.equal(actual, expected)
