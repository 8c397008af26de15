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
