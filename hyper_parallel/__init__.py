# SPDX-License-Identifier: Apache-2.0
"""Write a model for one device, say how its tensors lie on a mesh of devices, train it on the whole mesh."""

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh, get_current_mesh, init_device_mesh
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.operators import operators_come_from as _operators_come_from
from hyper_parallel.core.dtensor.placement_types import Partial, Replicate, Shard, StridedShard
from hyper_parallel.platform import CheckpointPolicy, CommunicationError, Platform, PlatformType, get_platform

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.dtensor import DTensor, distribute_module, distribute_tensor
    from hyper_parallel.core.dtensor.modes import SkipDTensorDispatch

__version__ = "0.1.0"

__all__ = [
    "CheckpointPolicy",
    "CommunicationError",
    "DTensor",
    "DeviceMesh",
    "Layout",
    "Partial",
    "Platform",
    "PlatformType",
    "Replicate",
    "Shard",
    "SkipDTensorDispatch",
    "StridedShard",
    "distribute_module",
    "distribute_tensor",
    "get_current_mesh",
    "get_platform",
    "init_device_mesh",
]

# Tensors of the framework: asking for them chooses the framework and imports it.
_OF_THE_FRAMEWORK = ("DTensor", "SkipDTensorDispatch", "distribute_module", "distribute_tensor")


def _dispatcher() -> Any:
    from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER

    return _OP_DISPATCHER


_operators_come_from(_dispatcher)


def __getattr__(name: str) -> Any:
    if name in _OF_THE_FRAMEWORK:
        from hyper_parallel.core.dtensor import dtensor

        return getattr(dtensor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
