# SPDX-License-Identifier: Apache-2.0
"""One step of training a pipeline: micro batches by a schedule, clipping over all stages, optimizer.

result = pipeline_step(schedule, model, optimizer, (x,), y, max_norm=1.0)
result.loss, result.norm, result.idle
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.pipeline_parallel.scheduler import PipelineScheduleRuntime
from hyper_parallel.platform import get_platform

platform = get_platform()


class PipelineStep(NamedTuple):
    """What came of a step, the same on every rank of the pipeline.

    ``loss``: the mean of the micro batches' losses. ``norm``: that of all gradients together before clipping.
    ``idle``: by rank, the part of the step's time in which it waited for others.
    """

    loss: float
    norm: float
    idle: tuple[float, ...]


def pipeline_step(
    schedule: PipelineScheduleRuntime,
    module: Any,
    optimizer: Any,
    args: Sequence[Any],
    target: Any,
    max_norm: float | None = None,
) -> PipelineStep:
    """Updates what this rank has of a module by the gradients of the mean loss, clipped to ``max_norm``.

    All ranks of the pipeline call it with the step's inputs and targets.
    """
    loss, idle = run_micro_batches(schedule, args, target)
    norm = schedule.clip_grad_norm_(math.inf if max_norm is None else max_norm)
    parameters = filter(
        platform.requires_grad, platform.parameters_dict(module).values()
    )
    gradients = [(one, platform.gradient_of(one)) for one in parameters]
    platform.apply_gradients(optimizer, gradients)
    for parameter, _ in gradients:
        platform.forget_gradient(parameter)
    return PipelineStep(loss, norm.item(), idle)


def run_micro_batches(
    schedule: PipelineScheduleRuntime, args: Sequence[Any], target: Any
) -> tuple[float, tuple[float, ...]]:
    """Forward and backward of a step: the mean loss, and the part of the time in which each rank waited."""
    losses: list[Any] = []
    schedule.step(*args, target=target, losses=losses, return_outputs=False)
    rows = schedule.gather_numbers(_sum(losses), schedule.idle)
    totals, idle = zip(*rows, strict=True)
    return sum(totals) / schedule.micro_batch_num, tuple(idle)


def pipeline_loss(
    schedule: PipelineScheduleRuntime, args: Sequence[Any], target: Any
) -> float:
    """The mean of the micro batches' losses, on every rank, without training."""
    losses: list[Any] = []
    schedule.eval(*args, target=target, losses=losses, return_outputs=False)
    totals = [total for [total] in schedule.gather_numbers(_sum(losses))]
    return sum(totals) / schedule.micro_batch_num


def _sum(losses: Sequence[Any]) -> float:
    """The sum of this rank's losses; 0 where the last stage is elsewhere."""
    whole = (x.full_tensor() if isinstance(x, DTensor) else x for x in losses)
    return float(sum(one.item() for one in whole))
