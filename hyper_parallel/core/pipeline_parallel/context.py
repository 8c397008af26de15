# SPDX-License-Identifier: Apache-2.0
"""What a function is given that runs in place of a type of actions.

def forward(step: MetaStep, context: PipelineContext) -> None:
    print(step, context.kwarg_mbs[step.micro_index])
    context.run(step)

schedule.register_custom_function(MetaStepType.FWD, forward)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.pipeline_parallel.action import MetaStep
from hyper_parallel.core.pipeline_parallel.orders import Schedule
from hyper_parallel.core.pipeline_parallel.stage import PipelineStage


@dataclass(frozen=True)
class PipelineContext:
    """The step that is running, on this rank.

    ``stages``: those of this rank, by number. ``arg_mbs`` and ``kwarg_mbs``: the arguments of every micro batch.
    ``losses``: those computed so far on the rank of the last stage, by micro batch, outside of the graph.
    ``run(step)``: does what the action does without a custom function.
    """

    schedule: Schedule
    stages: Mapping[int, PipelineStage]
    arg_mbs: Sequence[tuple[Any, ...]]
    kwarg_mbs: Sequence[Mapping[str, Any]]
    losses: Mapping[int, Any]
    run: Callable[[MetaStep], None]
