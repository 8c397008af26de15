# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallel: stages of a model on different ranks, schedules of micro batches, and what runs them.

Names that run something are imported when they are asked for: schedules can be laid out, checked and simulated without
a framework.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.pipeline_parallel.action import MetaStep, MetaStepType
from hyper_parallel.core.pipeline_parallel.hook_coordinator import HookCoordinator
from hyper_parallel.core.pipeline_parallel.utils import BatchDimSpec

if TYPE_CHECKING:
    from hyper_parallel.core.pipeline_parallel.agreement import PipelineError
    from hyper_parallel.core.pipeline_parallel.scheduler import (
        PipelineScheduleRuntime,
        Schedule1F1B,
        ScheduleDualPipe,
        ScheduleDualPipeV,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleLoopedBFS,
        ScheduleVHalf,
        ScheduleVMin,
        ScheduleZBH1,
        ScheduleZBH2,
        ScheduleZBVZeroBubble,
        get_schedule_class,
    )
    from hyper_parallel.core.pipeline_parallel.stage import (
        PipelineStage,
        SharedParameterInfo,
    )

__all__ = [
    "BatchDimSpec",
    "HookCoordinator",
    "MetaStep",
    "MetaStepType",
    "PipelineError",
    "PipelineScheduleRuntime",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipe",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleVHalf",
    "ScheduleVMin",
    "ScheduleZBH1",
    "ScheduleZBH2",
    "ScheduleZBVZeroBubble",
    "SharedParameterInfo",
    "get_schedule_class",
]

_HOMES = {
    "PipelineError": "agreement",
    "PipelineStage": "stage",
    "SharedParameterInfo": "stage",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "scheduler")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
