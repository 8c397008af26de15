# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallel: stages of a model on different ranks, schedules of micro batches, and what runs them."""

from hyper_parallel.core.pipeline_parallel.agreement import PipelineError
from hyper_parallel.core.pipeline_parallel.hook_coordinator import HookCoordinator
from hyper_parallel.core.pipeline_parallel.scheduler import (
    MetaStep,
    MetaStepType,
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
from hyper_parallel.core.pipeline_parallel.utils import BatchDimSpec

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
