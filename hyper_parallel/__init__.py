# SPDX-License-Identifier: Apache-2.0
"""Write a model for one device, say how its tensors lie on a mesh of devices, train it on the whole mesh."""

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.device_mesh import (
    DeviceMesh,
    get_current_mesh,
    init_device_mesh,
)
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.operators import (
    operators_come_from as _operators_come_from,
)
from hyper_parallel.core.dtensor.placement_types import (
    FusedShard,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    ZigzagShard,
)
from hyper_parallel.platform import (
    CheckpointPolicy,
    CommunicationError,
    Platform,
    PlatformType,
    get_platform,
)

if TYPE_CHECKING:
    from hyper_parallel.core.activation_checkpoint import (
        checkpoint_wrapper,
        swap_wrapper,
    )
    from hyper_parallel.core.context_parallel import (
        AsyncContextParallel,
        ContextParallel,
        shard_sequence,
    )
    from hyper_parallel.core.data_parallel import (
        local_batch,
        replicate,
        same_everywhere,
    )
    from hyper_parallel.core.distributed_checkpoint import async_save, load, save
    from hyper_parallel.core.dtensor.dtensor import (
        DTensor,
        distribute_module,
        distribute_tensor,
    )
    from hyper_parallel.core.dtensor.initialisation import init_empty_weights
    from hyper_parallel.core.dtensor.ledger import CommunicationLedger
    from hyper_parallel.core.dtensor.modes import (
        SkipDTensorDispatch,
        explicit,
        implicit_replication,
        strict,
    )
    from hyper_parallel.core.expert_parallel import (
        ExpertParallel,
        ExpertTensorParallel,
    )
    from hyper_parallel.core.fully_shard import (
        CPUOffloadPolicy,
        FSDPModule,
        HSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        hsdp_sync_stream,
    )
    from hyper_parallel.core.pipeline_parallel import (
        BatchDimSpec,
        MetaStep,
        MetaStepType,
        PipelineStage,
        Schedule1F1B,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
    )
    from hyper_parallel.core.tensor_parallel import (
        ColwiseParallel,
        FusedColwiseParallel,
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        Replicated,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallel_table,
        parallelize_module,
    )
    from hyper_parallel.planning import ParallelPlan, auto_plan
    from hyper_parallel.verification import verify

__version__ = "0.1.0"

__all__ = [
    "AsyncContextParallel",
    "BatchDimSpec",
    "CPUOffloadPolicy",
    "CheckpointPolicy",
    "ColwiseParallel",
    "CommunicationError",
    "CommunicationLedger",
    "ContextParallel",
    "DTensor",
    "DeviceMesh",
    "ExpertParallel",
    "ExpertTensorParallel",
    "FSDPModule",
    "FusedColwiseParallel",
    "FusedShard",
    "HSDPModule",
    "Layout",
    "MetaStep",
    "MetaStepType",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParallelPlan",
    "Partial",
    "PipelineStage",
    "Platform",
    "PlatformType",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RaggedShard",
    "Replicate",
    "Replicated",
    "RowwiseParallel",
    "Schedule1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "SequenceParallel",
    "Shard",
    "SkipDTensorDispatch",
    "StridedShard",
    "ZigzagShard",
    "async_save",
    "auto_plan",
    "checkpoint_wrapper",
    "distribute_module",
    "distribute_tensor",
    "explicit",
    "fully_shard",
    "get_current_mesh",
    "get_platform",
    "hsdp_sync_stream",
    "implicit_replication",
    "init_device_mesh",
    "init_empty_weights",
    "load",
    "local_batch",
    "loss_parallel",
    "parallel_table",
    "parallelize_module",
    "replicate",
    "same_everywhere",
    "save",
    "shard_sequence",
    "strict",
    "swap_wrapper",
    "verify",
]

# Names that need a framework: asking for one chooses the framework and imports it.
_HOMES = {
    "core.activation_checkpoint": ("checkpoint_wrapper", "swap_wrapper"),
    "core.context_parallel": (
        "AsyncContextParallel",
        "ContextParallel",
        "shard_sequence",
    ),
    "core.data_parallel": ("local_batch", "replicate", "same_everywhere"),
    "core.distributed_checkpoint": ("async_save", "load", "save"),
    "core.dtensor.dtensor": ("DTensor", "distribute_module", "distribute_tensor"),
    "core.dtensor.initialisation": ("init_empty_weights",),
    "core.dtensor.ledger": ("CommunicationLedger",),
    "core.dtensor.modes": (
        "SkipDTensorDispatch",
        "explicit",
        "implicit_replication",
        "strict",
    ),
    "core.expert_parallel": ("ExpertParallel", "ExpertTensorParallel"),
    "core.fully_shard": (
        "CPUOffloadPolicy",
        "FSDPModule",
        "HSDPModule",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "fully_shard",
        "hsdp_sync_stream",
    ),
    "core.pipeline_parallel": (
        "BatchDimSpec",
        "MetaStep",
        "MetaStepType",
        "PipelineStage",
        "Schedule1F1B",
        "ScheduleGPipe",
        "ScheduleInterleaved1F1B",
    ),
    "core.tensor_parallel": (
        "ColwiseParallel",
        "FusedColwiseParallel",
        "PrepareModuleInput",
        "PrepareModuleInputOutput",
        "PrepareModuleOutput",
        "Replicated",
        "RowwiseParallel",
        "SequenceParallel",
        "loss_parallel",
        "parallel_table",
        "parallelize_module",
    ),
    "planning": ("ParallelPlan", "auto_plan"),
    "verification": ("verify",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def _dispatcher() -> Any:
    from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER

    return _OP_DISPATCHER


_operators_come_from(_dispatcher)


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        import importlib

        home = importlib.import_module(f"{__name__}.{_HOME_OF[name]}")
        return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    special = [name for name in globals() if name.startswith("__")]
    return sorted({*__all__, *special})
