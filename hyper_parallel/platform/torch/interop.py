# SPDX-License-Identifier: Apache-2.0
"""torch's own distributed tensors and meshes, taken apart and put together without copying.

torch.distributed.tensor is heavy and is imported when one of these is called.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import NativeMesh, NativeTensor, Platform
from hyper_parallel.platform.strides import whole_stride

_OPS_OF_TORCH = {"prod": "product"}
_OPS = {theirs: ours for ours, theirs in _OPS_OF_TORCH.items()}


class Interop(Platform):
    """The part of the contract that is about torch.distributed.tensor."""

    def from_native_mesh(self, mesh: Any) -> NativeMesh:
        from torch.distributed.device_mesh import DeviceMesh

        if not isinstance(mesh, DeviceMesh):
            raise coded(
                TypeError,
                "HP228",
                f"mesh_from_native: expected a torch DeviceMesh, got {type(mesh).__name__}",
            )
        groups = mesh.get_all_groups() if mesh.get_coordinate() is not None else ()
        return NativeMesh(
            mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names, tuple(groups)
        )

    def to_native_mesh(self, parts: NativeMesh) -> Any:
        from torch.distributed.device_mesh import DeviceMesh

        if len(parts.groups) == 1:
            return DeviceMesh.from_group(
                parts.groups[0],
                parts.device_type,
                parts.ranks,
                mesh_dim_names=parts.names,
            )
        # torch wants names where there are several axes; their numbers are what a layout calls them.
        names = parts.names or tuple(map(str, range(len(parts.groups))))
        return DeviceMesh.from_group(
            list(parts.groups), parts.device_type, parts.ranks, mesh_dim_names=names
        )

    def from_native_dtensor(self, tensor: Any) -> NativeTensor:
        from torch.distributed._functional_collectives import (
            AsyncCollectiveTensor,
            wait_tensor,
        )
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            raise coded(
                TypeError,
                "HP228",
                f"from_native: expected a torch.distributed.tensor.DTensor, got {type(tensor).__name__}",
            )
        if tensor.is_leaf:
            with torch.no_grad():
                local = tensor.to_local()
        else:
            local = tensor.to_local()
        if isinstance(local, AsyncCollectiveTensor):
            local = wait_tensor(local)
        if tensor.is_leaf:
            local = local.detach().requires_grad_(tensor.requires_grad)
        placements = _placements(tensor._spec)
        return NativeTensor(
            local,
            tensor.device_mesh,
            placements,
            tuple(tensor.shape),
            isinstance(tensor, nn.Parameter),
        )

    def to_native_dtensor(self, parts: NativeTensor) -> Any:
        from torch.distributed.tensor import DTensor

        local = parts.local
        device = parts.mesh.device_type
        if local.device.type not in (device, "meta"):
            raise coded(
                ValueError,
                "HP228",
                f"to_native: the shard lies on {local.device}, but the mesh is one of {device}: torch would copy "
                f"it; move the tensor with to({device!r}) first",
            )
        made = DTensor.from_local(
            local.detach() if local.is_leaf else local,
            parts.mesh,
            [_native_placement(*placement) for placement in parts.placements],
            shape=torch.Size(parts.shape),
            stride=whole_stride(parts.shape, local),
        )
        if parts.is_parameter:
            return nn.Parameter(made, requires_grad=local.requires_grad)
        return made.requires_grad_(local.requires_grad) if local.is_leaf else made


def _placements(spec: Any) -> tuple[tuple[Any, ...], ...]:
    """A shard's split factor, by which torch tells that an axis is not the outer one; or the order tells it."""
    from torch.distributed.tensor.placement_types import (
        Partial,
        Replicate,
        Shard,
        _StridedShard,
    )

    order = {entry.tensor_dim: entry.mesh_dims for entry in spec.shard_order or ()}
    found: list[tuple[Any, ...]] = []
    for axis, placement in enumerate(spec.placements):
        if type(placement) is Shard:
            axes = order.get(placement.dim, (axis,))
            outer = axes[: axes.index(axis)]
            found.append(
                (
                    "shard",
                    placement.dim,
                    math.prod(spec.mesh.size(a) for a in outer if a > axis),
                )
            )
        elif type(placement) is _StridedShard and spec.use_strided_shard_as_shard_order:
            found.append(("shard", placement.dim, int(placement.split_factor)))
        elif type(placement) is Replicate:
            found.append(("replicate",))
        elif type(placement) is Partial:
            found.append(
                ("partial", _OPS.get(placement.reduce_op, placement.reduce_op))
            )
        else:
            raise coded(
                ValueError,
                "HP228",
                f"from_native: {placement!r} on axis {axis} has no counterpart here; redistribute the tensor to "
                "Shard, Replicate or Partial first",
            )
    return tuple(found)


def _native_placement(kind: str, *details: Any) -> Any:
    from torch.distributed.tensor.placement_types import (
        Partial,
        Replicate,
        Shard,
        _StridedShard,
    )

    if kind == "shard":
        dim, factor = details
        return Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
    return (
        Partial(*(_OPS_OF_TORCH.get(op, op) for op in details))
        if kind == "partial"
        else Replicate()
    )
