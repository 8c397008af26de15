# SPDX-License-Identifier: Apache-2.0
"""To and from the framework's own distributed tensors and meshes, without copying: one memory, the same groups.

    theirs = to_native(ours)        on PyTorch a torch.distributed.tensor.DTensor
    ours = from_native(theirs)
    mesh = mesh_from_native(torch_mesh)

"Native" is what the framework itself has: on PyTorch ``torch.distributed.tensor.DTensor`` and
``torch.distributed.device_mesh.DeviceMesh``. Nothing is communicated, but a mesh has its groups made if they do not
exist. A leaf becomes a leaf: it shares the memory and gets a gradient of its own. What was computed keeps its graph.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import NativeMesh, NativeTensor

platform = get_platform()

_to_native: dict[DeviceMesh, Any] = {}
_from_native: dict[Any, DeviceMesh] = {}
platform.forget_groups_with(_to_native.clear)
platform.forget_groups_with(_from_native.clear)


def from_native(dtensor: Any) -> DTensor:
    """Our distributed tensor for one of the framework (PyTorch: torch.distributed.tensor.DTensor), in the same memory.

    A leaf, a parameter for instance, becomes a leaf with a gradient of its own; any other tensor keeps its graph.
    """
    parts = platform.from_native_dtensor(dtensor)
    placements = [_placement(*placement) for placement in parts.placements]
    made = DTensor.from_local(
        parts.local, mesh_from_native(parts.mesh), placements, shape=parts.shape
    )
    if not parts.is_parameter:
        return made
    parameter: DTensor = platform.Parameter(
        made, requires_grad=platform.requires_grad(parts.local)
    )
    return parameter


def to_native(dtensor: DTensor) -> Any:
    """The framework's own distributed tensor (PyTorch: torch.distributed.tensor.DTensor) for ours, in the same memory.

    A leaf, a parameter for instance, becomes a leaf with a gradient of its own; any other tensor keeps its graph.
    """
    if not isinstance(dtensor, DTensor):
        raise coded(
            TypeError,
            "HP228",
            f"to_native: expected a hyper_parallel DTensor, got {type(dtensor).__name__}",
        )
    placements = tuple(_parts_of(placement) for placement in dtensor.placements)
    is_parameter = isinstance(dtensor, platform.Parameter)
    mesh = mesh_to_native(dtensor.device_mesh)
    return platform.to_native_dtensor(
        NativeTensor(
            dtensor._local, mesh, placements, tuple(dtensor.shape), is_parameter
        )
    )


def mesh_from_native(mesh: Any) -> DeviceMesh:
    """Our mesh for one of the framework (PyTorch: torch.distributed.device_mesh.DeviceMesh), with its groups."""
    if not isinstance(mesh, Hashable) or mesh not in _from_native:
        parts = platform.from_native_mesh(mesh)
        ranks = np.asarray(parts.ranks, dtype=np.int64)
        every = ranks.reshape(-1).tolist()
        made = init_device_mesh(
            parts.device_type, ranks.shape, mesh_dim_names=parts.names, rank_list=every
        )
        _check_order("mesh_from_native", made)
        for group in parts.groups:
            if (
                platform.get_created_group(platform.get_process_group_ranks(group))
                is None
            ):
                platform.mark_created_groups(group)
        _pair(made, mesh)
    return _from_native[mesh]


def mesh_to_native(mesh: DeviceMesh) -> Any:
    """The framework's own mesh (PyTorch: torch.distributed.device_mesh.DeviceMesh) for ours, with its groups.

    Convert a mesh before tensors that lie on parts of it: ``mesh["tp"]`` then becomes a part of the converted mesh.
    """
    if not isinstance(mesh, DeviceMesh):
        raise coded(
            TypeError,
            "HP228",
            f"mesh_to_native: expected a hyper_parallel DeviceMesh, got {type(mesh).__name__}",
        )
    if mesh not in _to_native:
        _check_order("mesh_to_native", mesh)
        _pair(mesh, _part_of_root(mesh) or _made(mesh))
    return _to_native[mesh]


def _pair(ours: DeviceMesh, native: Any) -> None:
    _to_native.setdefault(ours, native)
    _from_native.setdefault(native, ours)


def _part_of_root(mesh: DeviceMesh) -> Any:
    """The same axes of the mesh that this one was cut from, if that has been converted."""
    root, names = mesh.root_mesh, mesh.mesh_dim_names
    if (
        root is mesh
        or root not in _to_native
        or not names
        or not set(names) <= set(root.mesh_dim_names or ())
    ):
        return None
    return _to_native[root][names]


def _made(mesh: DeviceMesh) -> Any:
    mesh.own_coordinate("mesh_to_native")  # a rank outside has no groups to give
    ranks = np.asarray(mesh.rank_list).reshape(mesh.mesh_shape).tolist()
    return platform.to_native_mesh(
        NativeMesh(
            mesh.device_type, ranks, mesh.mesh_dim_names, tuple(mesh.get_all_groups())
        )
    )


def _check_order(call: str, mesh: DeviceMesh) -> None:
    """A group has its ranks in ascending order, and torch takes that for the order along the axis."""
    axis = mesh.descending_axis
    if axis is not None:
        raise coded(
            ValueError,
            "HP228",
            f"{call}: the ranks of {mesh} must ascend along every axis; along axis {axis} they do not",
        )


def _placement(kind: str, *details: Any) -> Placement:
    if kind == "shard":
        dim, factor = details
        return Shard(dim) if factor == 1 else StridedShard(dim, factor)
    return Partial(*details) if kind == "partial" else Replicate()


def _parts_of(placement: Placement) -> tuple[Any, ...]:
    if isinstance(placement, Shard):
        if not placement.is_chunked:
            raise coded(
                ValueError,
                "HP228",
                f"to_native: the framework has no placement like {placement}; "
                f"redistribute() to Shard({placement.dim}) first",
            )
        return (
            "shard",
            placement.dim,
            placement.split_factor if isinstance(placement, StridedShard) else 1,
        )
    return (
        ("partial", placement.reduce_op)
        if isinstance(placement, Partial)
        else ("replicate",)
    )
