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
    from hyper_parallel.core.dtensor.dtensor import (
        DTensor,
        distribute_module,
        distribute_tensor,
    )
    from hyper_parallel.core.dtensor.modes import SkipDTensorDispatch
    from hyper_parallel.core.tensor_parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )
    from hyper_parallel.verification import verify

__version__ = "0.1.0"

__all__ = [
    "CheckpointPolicy",
    "ColwiseParallel",
    "CommunicationError",
    "DTensor",
    "DeviceMesh",
    "FusedShard",
    "Layout",
    "Partial",
    "Platform",
    "PlatformType",
    "RaggedShard",
    "Replicate",
    "RowwiseParallel",
    "SequenceParallel",
    "Shard",
    "SkipDTensorDispatch",
    "StridedShard",
    "ZigzagShard",
    "distribute_module",
    "distribute_tensor",
    "get_current_mesh",
    "get_platform",
    "init_device_mesh",
    "parallelize_module",
    "verify",
]

# Tensors of the framework: asking for them chooses the framework and imports it.
_OF_THE_FRAMEWORK = {
    **dict.fromkeys(
        ("DTensor", "SkipDTensorDispatch", "distribute_module", "distribute_tensor"),
        "core.dtensor.dtensor",
    ),
    **dict.fromkeys(
        ("ColwiseParallel", "RowwiseParallel", "SequenceParallel"),
        "core.tensor_parallel.style",
    ),
    "parallelize_module": "core.tensor_parallel.api",
    "verify": "verification.api",
}


def _dispatcher() -> Any:
    from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER

    return _OP_DISPATCHER


_operators_come_from(_dispatcher)


def __getattr__(name: str) -> Any:
    if name in _OF_THE_FRAMEWORK:
        import importlib

        return getattr(
            importlib.import_module(f"{__name__}.{_OF_THE_FRAMEWORK[name]}"), name
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    special = [name for name in globals() if name.startswith("__")]
    return sorted({*__all__, *special})
