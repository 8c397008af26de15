# SPDX-License-Identifier: Apache-2.0
"""Pipelines of real ranks, compared with one process that runs the micro batches one after the other."""

import copy

import torch
from pipeline_models import Pair, layers
from pipeline_models import batch as batch_of
from thorough import THOROUGH
from torch import nn

from hyper_parallel.core.pipeline_parallel import (
    PipelineStage,
    get_schedule_class,
)
from hyper_parallel.core.pipeline_parallel.mapping import StageMapping
from hyper_parallel.core.pipeline_parallel.schedules import SCHEDULES
from hyper_parallel.testing import on_ranks

DIM = 5


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


def build_layers(stages):
    torch.manual_seed(0)
    return [Layer().double() for _ in range(stages)]


def batch(micros, rows=2):
    generator = torch.Generator().manual_seed(1)
    shape = (micros * rows, DIM)
    return [
        torch.randn(shape, generator=generator, dtype=torch.double) for _ in range(2)
    ]


def mse(output, target):
    return (output - target).square().mean()


def run_alone(layers, x, y, micros):
    """(outputs, losses) of one process; gradients of the mean of the losses."""
    model = nn.Sequential(*layers)
    outputs, losses = [], []
    for one, target in zip(x.chunk(micros), y.chunk(micros), strict=True):
        output = model(one)
        loss = mse(output, target)
        (loss / micros).backward()
        outputs.append(output.detach())
        losses.append(loss.detach())
    return torch.cat(outputs), losses


def own_stages(name, chunks, ranks, rank, layers, micros, **options):
    kind = SCHEDULES[name]
    stages = ranks * (1 if kind.style == "bidirectional" else chunks)
    mapping = StageMapping(kind.style, ranks, stages, micros)
    per_stage = len(layers) // stages
    return [
        PipelineStage(
            nn.Sequential(*layers[stage * per_stage : (stage + 1) * per_stage]),
            stage,
            stages,
            **options,
        )
        for stage in mapping.stages_of(rank)
    ]


def check_step(name, chunks, micros, steps=2):
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    kind = SCHEDULES[name]
    chunks = kind.chunks or chunks
    alone = build_layers(ranks * chunks)
    piped = copy.deepcopy(alone)
    stages = own_stages(name, chunks, ranks, rank, piped, micros)
    schedule = get_schedule_class(name)(stages, micros, mse)
    has_last = any(stage.is_last_stage for stage in stages)
    for _ in range(steps):  # without zero_grad: gradients add up
        x, y = batch(micros)
        outputs, losses = run_alone(alone, x, y, micros)
        own = []
        output = schedule.step(x, target=y, losses=own)
        assert [str(one) for one in schedule.trace] == [
            str(one) for one in schedule.exec_order[rank]
        ]
        if has_last:
            if kind.style != "bidirectional":
                torch.testing.assert_close(output, outputs, rtol=0, atol=1e-12)
                torch.testing.assert_close(own, losses, rtol=0, atol=1e-12)
        else:
            assert output is None
            assert own == []
    per_stage = len(alone) // stages[0].stage_num
    for stage in stages:
        start = stage.stage_index * per_stage
        for layer, same in zip(
            stage.submodule, alone[start : start + per_stage], strict=True
        ):
            for parameter, other in zip(
                layer.parameters(), same.parameters(), strict=True
            ):
                torch.testing.assert_close(
                    parameter.grad, other.grad, rtol=0, atol=1e-12
                )


ONE_CHUNK = ("GPipe", "1F1B", "ZB-H1", "ZB-H2")


@on_ranks(2)
def test_every_schedule__two_ranks():
    for name, kind in SCHEDULES.items():
        for micros in range(1, 10) if THOROUGH else (1, 2, 3, 5):
            if micros % kind.micro_multiple == 0:
                check_step(name, 2, micros)


@on_ranks(4)
def test_every_schedule__four_ranks():
    for name, kind in SCHEDULES.items():
        for micros in range(1, 10) if THOROUGH else (2, 7, 8):
            if micros % kind.micro_multiple == 0:
                check_step(name, 2, micros, steps=1)


@on_ranks(4)
def test_every_schedule__three_of_four_ranks():
    group = torch.distributed.new_group([0, 1, 2])
    if torch.distributed.get_rank() == 3:
        return
    for name, kind in SCHEDULES.items():
        if kind.style == "bidirectional":  # needs an even number of ranks
            continue
        for micros in range(1, 10) if THOROUGH else (1, 4):
            pair = Pair(layers(3 * (kind.chunks or 2)), name, micros, group=group)
            pair.step(*batch_of(2 * micros))


@on_ranks(2)
def test_eval_then_train_then_eval():
    rank, micros = torch.distributed.get_rank(), 3
    layers = build_layers(2)
    alone = copy.deepcopy(layers)
    stages = own_stages("1F1B", 1, 2, rank, layers, micros)
    schedule = get_schedule_class("1F1B")(stages, micros, mse)
    x, y = batch(micros)
    for _ in range(2):
        outputs, _ = run_alone(alone, x, y, micros)
        before = schedule.eval(x, target=y)
        schedule.step(x, target=y)
        after = schedule.eval(x)
        for output in (before, after):
            if rank == 1:
                torch.testing.assert_close(output, outputs, rtol=0, atol=1e-12)
            else:
                assert output is None
