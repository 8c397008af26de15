# SPDX-License-Identifier: Apache-2.0
"""Write a model for one device, say how its tensors lie on a mesh of devices, train it on the whole mesh."""

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh, get_current_mesh, init_device_mesh
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Partial, Replicate, Shard, StridedShard
from hyper_parallel.platform import CheckpointPolicy, CommunicationError, Platform, PlatformType, get_platform

__version__ = "0.1.0"

__all__ = [
    "CheckpointPolicy",
    "CommunicationError",
    "DeviceMesh",
    "Layout",
    "Partial",
    "Platform",
    "PlatformType",
    "Replicate",
    "Shard",
    "StridedShard",
    "get_current_mesh",
    "get_platform",
    "init_device_mesh",
]
