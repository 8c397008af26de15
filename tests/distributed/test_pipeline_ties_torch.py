# SPDX-License-Identifier: Apache-2.0
"""Tied weights of different stages, and one checkpoint for any number of stages."""

import pytest
import torch
from pipeline_models import (
    Embed,
    Head,
    Layer,
    batch,
    check_whole_gradients,
    close,
    mse,
    new,
    tied,
    whole,
)
from torch import nn

from hyper_parallel import (
    Replicate,
    Shard,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
)
from hyper_parallel.core.distributed_checkpoint.api import load, save
from hyper_parallel.core.distributed_checkpoint.training_state import ModelState
from hyper_parallel.core.pipeline_parallel import (
    PipelineStage,
    Schedule1F1B,
    SharedParameterInfo,
)
from hyper_parallel.testing import on_ranks

# --- tied parameters


def optimizers_of(pair):
    """An optimizer of the model in one process, and one of this rank's stages."""
    return [
        torch.optim.AdamW(
            {id(p): p for part in parts for p in part.parameters()}.values(), lr=0.05
        )
        for parts in (pair.alone, [pair.piped[stage] for stage in pair.own])
    ]


def update(pair, optimizers, x, y):
    pair.run_alone(x, y)
    pair.schedule.step(x, target=y)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def gather_copies(pair, group=None):
    """The tied weight of every rank that has it."""
    count = len(pair.alone)
    own = [pair.piped[n].weight for n in pair.own if n in (0, count - 1)]
    everyone = [None] * torch.distributed.get_world_size(group)
    shards = [getattr(one, "_local", one).detach() for one in own]
    torch.distributed.all_gather_object(everyone, shards, group)
    return [one for of_rank in everyone for one in of_rank]


def check_equal(pair, group=None):
    copies = gather_copies(pair, group)
    assert len(copies) == 2
    assert torch.equal(*copies)
    for stage in pair.own:
        for own, other in zip(
            pair.piped[stage].parameters(), pair.alone[stage].parameters(), strict=True
        ):
            close(whole(own).detach(), other.detach(), 1e-11)


@on_ranks(2)
@pytest.mark.parametrize(("name", "count"), [("1F1B", 2), ("ZBV", 4)])
def test_tied_embedding__bitwise_equal_after_100_steps(name, count):
    pair = tied(name, count, micros=2)
    optimizers = optimizers_of(pair)
    for seed in range(100):
        update(pair, optimizers, *batch(2, seed))
    check_equal(pair)


@on_ranks(4)
def test_tied_embedding__with_fsdp():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    group, place = mesh["pp"].get_group(), mesh["dp"].get_local_rank()
    for name, count in (("1F1B", 2), ("Interleaved1F1B", 4)):
        pair = tied(
            name, count, 2, group=group, pipe=lambda p: fully_shard(p, mesh=mesh["dp"])
        )
        optimizers = optimizers_of(pair)
        for seed in range(3):
            x, y = batch(8, seed)
            halves = list(zip(x.chunk(2), y.chunk(2), strict=True))
            for half in halves:
                pair.run_alone(*half, scale=1 / 4)
            pair.schedule.step(halves[place][0], target=halves[place][1])
            check_whole_gradients(pair)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        check_equal(pair, group)


@on_ranks(4)
def test_tied_embedding__with_tensor_parallel():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    group = mesh["pp"].get_group()

    def distribute(part):
        if isinstance(part, Embed):
            placed = distribute_tensor(part.weight.detach(), mesh["tp"], [Shard(0)])
            part.weight = nn.Parameter(placed)
        return part

    def loss(output, target):
        return mse(whole(output), target)

    pair = tied("ZB-H1", 2, 2, group=group, pipe=distribute, loss=loss)
    optimizers = optimizers_of(pair)
    for seed in range(3):
        x, y = batch(4, seed)
        for one, target in zip(x.chunk(2), y.chunk(2), strict=True):
            (loss(pair.forward_alone(one), target) / 2).backward()
        given = distribute_tensor(x, mesh["tp"], [Replicate()])
        pair.schedule.step(given, target=y)
        check_whole_gradients(pair)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_equal(pair, group)


# --- one checkpoint for any number of stages


class Model(nn.Module):
    """Layers by their numbers, of which a stage keeps its own; the first and the last one have one weight."""

    def __init__(self, numbers=range(4), seed=0):
        super().__init__()
        parts = new(Embed, Layer, Layer, Head)
        self.layers = nn.ModuleDict({str(n): parts[n] for n in numbers})
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(seed)
        if {0, 3} <= set(numbers):
            parts[3].weight = parts[0].weight

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def build_pipeline(stages, group, seed):
    """(the stage, its schedule): layers divided evenly, as the rank's place in the group says."""
    place = torch.distributed.get_rank(group)
    numbers = range(place * 4 // stages, (place + 1) * 4 // stages)
    part = Model(numbers, seed)
    shared = [
        SharedParameterInfo(part.layers[str(n)].weight, [0, stages - 1])
        for n in numbers
        if n in (0, 3)
    ]
    stage = PipelineStage(part, place, stages, group=group, shared_parameters=shared)
    return part, Schedule1F1B(stage, 2, loss_fn=mse)


@on_ranks(4)
def test_one_checkpoint_serves_any_number_of_stages(tmp_path):
    """Written by two stages of which there are two copies each; read by one process, by four stages, and by two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    group = mesh["pp"].get_group()
    part, schedule = build_pipeline(2, group, 0)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    x, y = batch(4)
    schedule.step(x, target=y)
    optimizer.step()
    save({"model": ModelState(part)}, checkpoint_id=tmp_path / "saved")
    alone = Model(seed=3)
    names = set(alone.state_dict())
    assert set(part.state_dict()) < names
    load({"model": ModelState(alone)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    optimizer.zero_grad()
    for one, target in zip(x.chunk(2), y.chunk(2), strict=True):
        (mse(alone(one), target) / 2).backward()
    own = dict(part.named_parameters())
    for name, parameter in alone.named_parameters(remove_duplicate=False):
        if name in own:
            close(own[name].detach(), parameter.detach(), 0)
    for stages, ranks in ((2, group), (4, None)):
        again, schedule = build_pipeline(stages, ranks, 5)
        load(
            {"model": ModelState(again)}, checkpoint_id=tmp_path / "saved", strict=False
        )
        schedule.step(x, target=y)
        expected = dict(alone.named_parameters(remove_duplicate=False))
        for name, parameter in again.named_parameters():
            close(parameter.detach(), expected[name].detach(), 0)
            close(parameter.grad, expected[name].grad)
    assert torch.distributed.get_world_size() == 4
