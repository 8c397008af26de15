# SPDX-License-Identifier: Apache-2.0
"""Gradients clipped by their norm over all stages, and loss scaling: the numbers of one process."""

import math

import pytest
import torch
from pipeline_models import (
    DIM,
    Block,
    Mlp,
    Pair,
    batch,
    close,
    layers,
    mse,
    new,
    parallel,
    shard,
    tied,
    whole,
)
from torch import nn

from hyper_parallel import init_device_mesh
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.pipeline_parallel.agreement import PipelineError
from hyper_parallel.testing import on_ranks

TIED = [("1F1B", 2), ("Interleaved1F1B", 4), ("ZBV", 4), ("DualPipe", 2)]


def check_clipping(pair, axes=()):
    """Clips the gradients of both, above and below their norm."""
    alone = {id(one): one for part in pair.alone for one in part.parameters()}.values()
    gradients = [[one.grad.clone() for one in alone]]
    own = [one for stage in pair.own for one in pair.piped[stage].parameters()]
    gradients.append([one.grad.clone() for one in own])
    for norm_type in (2, 1.0, math.inf):
        for share in (0.1, 10.0):
            for parameters, saved in zip((alone, own), gradients, strict=True):
                for one, gradient in zip(parameters, saved, strict=True):
                    one.grad = gradient.clone()
            limit = share * float(nn.utils.clip_grad_norm_(alone, math.inf, norm_type))
            expected = nn.utils.clip_grad_norm_(alone, limit, norm_type)
            with CommunicationLedger() as ledger:
                total = pair.schedule.clip_grad_norm_(limit, norm_type)
            assert total.dtype is torch.double
            close(total, expected)
            close([whole(one.grad) for one in own], gradients_of(pair))
    groups = [entry.collective for entry in ledger.entries]
    assert groups == ["all_gather_into_tensor"] * (1 + len(axes))


def gradients_of(pair):
    return [one.grad for stage in pair.own for one in pair.alone[stage].parameters()]


def step(pair, x, y, scale=None):
    pair.run_alone(x, y, scale)
    pair.schedule.step(x, target=y)


@on_ranks(2)
@pytest.mark.parametrize(("name", "count"), TIED)
def test_the_norm_is_that_of_all_stages(name, count):
    """Tied parameters count once, and so do stages that two ranks have."""
    pair = tied(name, count)
    for seed in range(2):  # gradients add up
        step(pair, *batch(8, seed))
    check_clipping(pair)


@on_ranks(4)
def test_the_norm_of_stages_under_tensor_parallel():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    pair = Pair(
        new(Mlp, Mlp),
        group=mesh["pp"].get_group(),
        pipe=lambda part: parallel(part, mesh["tp"]),
    )
    step(pair, *batch())
    check_clipping(pair, ["tp"])


@on_ranks(4)
def test_the_norm_of_fully_sharded_stages():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pair = Pair(
        new(*[Block] * 4),
        "ZBV",
        micros=4,
        group=mesh["pp"].get_group(),
        pipe=lambda part: shard(part, mesh["dp"]),
    )
    step(pair, *batch(8))
    check_clipping(pair, ["dp"])


class Broken(nn.Parameter):
    """Has no gradient that can be read."""

    @property
    def grad(self):
        raise ValueError("a broken gradient")


@on_ranks(2)
def test_an_error_of_one_rank_is_an_error_on_all():
    pair = Pair(layers(2))
    step(pair, *batch())
    before = pair.piped[pair.rank].linear.weight.grad.clone()
    if pair.rank == 1:
        pair.piped[1].linear.bias = Broken(torch.zeros(DIM))
        with pytest.raises(ValueError, match="a broken gradient"):
            pair.schedule.clip_grad_norm_(0.0)
    else:
        with pytest.raises(PipelineError, match=r"failed on rank 1.*HP496"):
            pair.schedule.clip_grad_norm_(0.0)
    assert torch.equal(pair.piped[pair.rank].linear.weight.grad, before)


@on_ranks(2)
def test_a_norm_that_is_not_finite_is_told_to_all():
    for bad in (math.nan, math.inf):
        pair = Pair(layers(2))
        step(pair, *batch())
        if pair.rank == 1:
            pair.piped[1].linear.bias.grad[0] = bad
        with pytest.raises(RuntimeError, match="non-finite"):
            pair.schedule.clip_grad_norm_(1.0, error_if_nonfinite=True)
        total = pair.schedule.clip_grad_norm_(1.0)
        assert math.isnan(total) if math.isnan(bad) else math.isinf(total)
        with pytest.raises(ValueError, match="max_norm must be a number"):
            pair.schedule.clip_grad_norm_(-1.0)


def test_one_process_and_stages_without_parameters():
    from hyper_parallel.core.pipeline_parallel import PipelineStage, Schedule1F1B

    part, bare = layers(1)[0], nn.Identity()
    for module in (part, bare):
        schedule = Schedule1F1B(PipelineStage(module, 0, 1), 2, loss_fn=mse)
        x, y = batch()
        schedule.step(x.requires_grad_(), target=y)
        norms = [one.grad.norm() for one in module.parameters()]
        expected = torch.stack(norms).norm() if norms else torch.zeros(())
        close(schedule.clip_grad_norm_(1e-3).double(), expected.double())


@on_ranks(2)
@pytest.mark.parametrize("name", ["1F1B", "ZBV"])
def test_loss_scaled_once_not_per_stage(name):
    """A power of two leaves no trace: gradients are exactly that many times as large, on every stage."""
    found = []
    for scale in (1.0, 1024.0):
        pair = Pair(
            layers(2 if name == "1F1B" else 4),
            name,
            loss=lambda output, target, scale=scale: mse(output, target) * scale,
        )
        for seed in range(2):
            x, y = batch(seed=seed)
            pair.schedule.step(x, target=y)
        total = pair.schedule.clip_grad_norm_(math.inf)
        own = [one.grad for stage in pair.own for one in pair.piped[stage].parameters()]
        found.append([total, *own])
    for plain, scaled in zip(*found, strict=True):
        assert torch.equal(plain * 1024, scaled)
