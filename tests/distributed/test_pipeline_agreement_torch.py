# SPDX-License-Identifier: Apache-2.0
"""What ranks of a pipeline do differently: it is right, or an error on all of them."""

import copy
import gc
import weakref

import pytest
import torch
from pipeline_models import Layer, Pair, batch, close, layers, mse, new

from hyper_parallel.core.pipeline_parallel import (
    PipelineScheduleRuntime,
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipe,
    SharedParameterInfo,
)
from hyper_parallel.core.pipeline_parallel.action import RECEIVES
from hyper_parallel.core.pipeline_parallel.agreement import PipelineError
from hyper_parallel.core.pipeline_parallel.messages import add_messages
from hyper_parallel.core.pipeline_parallel.schedules import build_schedule
from hyper_parallel.testing import on_ranks


@on_ranks(2)
def test_only_the_last_stage_needs_the_loss_function():
    pair = Pair(layers(2))
    rank = pair.rank
    piped = copy.deepcopy(pair.alone[rank])
    stage = PipelineStage(piped, rank, 2)
    schedule = Schedule1F1B(stage, 3, loss_fn=mse if rank == 1 else None)
    x, y = batch()
    for _ in range(2):
        pair.run_alone(x, y)
        schedule.step(x, target=y)
    for own, other in zip(
        piped.parameters(), pair.alone[rank].parameters(), strict=True
    ):
        close(own.grad, other.grad)


@on_ranks(2)
def test_both_ends_of_dualpipe_need_the_loss_function():
    rank = torch.distributed.get_rank()
    stages = [PipelineStage(part, stage, 2) for stage, part in enumerate(layers(2))]
    with pytest.raises(
        ValueError,
        match="agree on whether the last stage has a loss function, got rank 0: False, rank 1: True.*HP483",
    ):
        ScheduleDualPipe(stages, 4, loss_fn=mse if rank == 1 else None)


@on_ranks(2)
def test_each_end_of_dualpipe_returns_its_half():
    rank = torch.distributed.get_rank()
    parts = layers(2)
    stages = [PipelineStage(part, stage, 2) for stage, part in enumerate(parts)]
    schedule = ScheduleDualPipe(stages, 4, loss_fn=mse)
    x, y = batch(8)
    half = slice(4, 8) if rank == 0 else slice(0, 4)
    with torch.no_grad():
        expected = parts[1](parts[0](x[half]))
    pairs = zip(expected.chunk(2), y[half].chunk(2), strict=True)
    losses = []
    close(schedule.step(x, target=y, losses=losses), expected)
    close(losses, [mse(one, target) for one, target in pairs])
    close(schedule.eval(x), expected)


def share(stage, own, parameter=None):
    layer = Layer()
    chosen = layer.linear.weight if parameter is None else parameter(layer)
    infos = [SharedParameterInfo(chosen, own)] if own else None
    return PipelineStage(layer, stage, 2, shared_parameters=infos)


@on_ranks(2)
def test_shared_parameters_that_do_not_fit_together():
    rank = torch.distributed.get_rank()
    cases = [
        (
            lambda: share(rank, [0, 1] if rank == 0 else None),
            r"stage 0 shares float32\[5, 5\] with the stages \[0, 1\], but stage 1 shares nothing.*HP483",
        ),
        (
            lambda: share(
                rank,
                [0, 1],
                None if rank == 0 else lambda layer: layer.linear.bias,
            ),
            r"stage 0 shares float32\[5, 5\].*but stage 1 shares float32\[5\] with them.*HP483",
        ),
        (
            lambda: share(rank, [0] if rank == 1 else None),
            r"stage 1 shares float32\[5, 5\] with the stages \[0\].*HP483",
        ),
    ]
    for build, message in cases:
        with pytest.raises(ValueError, match=message):
            Schedule1F1B(build(), 2, mse)


@on_ranks(2)
def test_files_that_differ(tmp_path):
    rank = torch.distributed.get_rank()
    stage = PipelineStage(new(Layer)[0], rank, 2)
    path = tmp_path / f"{rank}.csv"
    if rank == 0:
        path.write_text("0F0,0B0\n1F0,1B0\n")
    with pytest.raises(ValueError, match="agree on the schedule, got.*HP483"):
        PipelineScheduleRuntime(stage, 1, loss_fn=mse, schedule=str(path))


@on_ranks(2)
def test_outputs_that_cannot_be_joined_are_told_to_all():
    x, y = batch()
    widths = iter([1, 2, 3])

    def narrow(layer, x):
        return layer(x)[:, : next(widths, 3)]

    pair = Pair(new(Layer, narrow), loss=lambda output, _: output.sum())
    with pytest.raises(
        RuntimeError,
        match="rank 1 failed in what it returns: RuntimeError: Sizes of tensors must match.*HP484",
    ):
        pair.schedule.step(x, target=y)
    list(widths)
    pair.zero_grad()
    pair.step(x, y)


@on_ranks(2)
def test_what_a_step_returns_and_is_given_is_not_kept():
    x, y = batch()
    pair = Pair(layers(2))
    pair.schedule.eval(x)
    given = weakref.ref(x)
    output = pair.schedule.step(x, target=y)
    returned = None if output is None else weakref.ref(output)
    del x, y, output
    gc.collect()
    assert given() is None
    assert returned is None or returned() is None


def cut(layer, x):
    """The second output needs a gradient for some micro batches only."""
    y = layer(x)
    return y, y.detach() * 2 if x[0, 0] > 0 else y * 2


def check_changes(pair):
    """Trains while the first stage is frozen and not, and a step fails in between."""
    x, y = batch()
    x[:, 0] = torch.tensor([1, 1, 2, 2, -1, -1])
    for step in range(6):
        parts = [pair.alone[0]]
        if pair.rank == 0:
            parts.append(pair.piped[0])
        for part in parts:
            part.requires_grad_(step % 3 != 1)
        if step == 3:
            with pytest.raises(PipelineError, match="unexpected keyword argument"):
                pair.schedule.step(x, target=y, loss_kwargs={"wrong": 0})
            pair.zero_grad()
        pair.step(x, y)
        pair.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize(("name", "count"), [("1F1B", 2), ("ZBV", 4)])
def test_what_is_trained_may_change(name, count):
    """From step to step, and from micro batch to micro batch."""
    first = new(cut, lambda layer, x, y: layer(x + y))
    check_changes(Pair([*first, *layers(count - 2)], name))


@on_ranks(2)
def test_receives_before_it_is_known_what_is_trained():
    schedule = add_messages(build_schedule("1F1B", 2, 3))
    early = schedule.with_orders(
        tuple(
            tuple(sorted(order, key=lambda step: step.type not in RECEIVES))
            for order in schedule.orders
        )
    )
    pair = Pair(layers(2))
    pair.schedule = PipelineScheduleRuntime(pair.stages, 3, schedule=early, loss_fn=mse)
    check_changes(pair)
