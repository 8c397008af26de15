# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallel: stages of a model on different ranks, schedules of micro batches, and what runs them.

Names that run something are imported when they are asked for: schedules can be laid out, checked and simulated without
a framework.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.pipeline_parallel.action import MetaStep, MetaStepType
from hyper_parallel.core.pipeline_parallel.hook_coordinator import (
    HookCoordinator,
    HookRole,
)
from hyper_parallel.core.pipeline_parallel.utils import BatchDimSpec

if TYPE_CHECKING:
    from hyper_parallel.core.pipeline_parallel.agreement import PipelineError
    from hyper_parallel.core.pipeline_parallel.comm_compute_overlap import (
        CommComputeOverlap,
    )
    from hyper_parallel.core.pipeline_parallel.context import PipelineContext
    from hyper_parallel.core.pipeline_parallel.costs import count_costs, measure_costs
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
    from hyper_parallel.core.pipeline_parallel.schedules import build_schedule
    from hyper_parallel.core.pipeline_parallel.split_stage import build_stages
    from hyper_parallel.core.pipeline_parallel.stage import (
        PipelineStage,
        SharedParameterInfo,
    )
    from hyper_parallel.core.pipeline_parallel.stage_plan import StagePlan, plan_stages

__all__ = [
    "BatchDimSpec",
    "CommComputeOverlap",
    "HookCoordinator",
    "HookRole",
    "MetaStep",
    "MetaStepType",
    "PipelineContext",
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
    "StagePlan",
    "build_schedule",
    "build_stages",
    "count_costs",
    "get_schedule_class",
    "measure_costs",
    "plan_stages",
]

_HOMES = {
    "CommComputeOverlap": "comm_compute_overlap",
    "PipelineContext": "context",
    "PipelineError": "agreement",
    "PipelineStage": "stage",
    "SharedParameterInfo": "stage",
    "StagePlan": "stage_plan",
    "build_schedule": "schedules",
    "build_stages": "split_stage",
    "count_costs": "costs",
    "measure_costs": "costs",
    "plan_stages": "stage_plan",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "scheduler")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
