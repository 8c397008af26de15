# SPDX-License-Identifier: Apache-2.0
"""Shards parameters of experts along one axis of a mesh after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor, distribute_tensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


def shard_parameter(
    module: Any,
    name: str,
    placements: Mapping[DeviceMesh, Placement],
    src_data_rank: int | None,
) -> None:
    """Shards a parameter of the module along axes, each a mesh of one axis, beside those along which it is already.

    ``src_data_rank``: the index along each axis of the rank whose data the others get; None where they are equal.
    """
    tensor = dict(platform.own_tensors(module))[name]
    axes = list(placements)
    if isinstance(tensor, DTensor):
        for axis, placement in placements.items():
            tensor = _shard_further(tensor, axis, placement, src_data_rank)
    else:
        mesh = axes[0] if len(axes) == 1 else _join(axes)
        is_equal = src_data_rank is None or platform.is_meta(tensor)
        source = None if is_equal else mesh.rank_list[src_data_rank or 0]
        wanted = list(placements.values())
        tensor = distribute_tensor(tensor, mesh, wanted, src_data_rank=source)
    platform.set_own_tensor(module, name, tensor)


def _join(axes: Sequence[DeviceMesh]) -> DeviceMesh:
    """The mesh of these axes, in the order that they have in their root."""
    names = [name for axis in axes for name in axis.mesh_dim_names or ()]
    return axes[0].root_mesh[tuple(names)]


def _shard_further(
    tensor: DTensor, axis: DeviceMesh, placement: Placement, src_data_rank: int | None
) -> DTensor:
    own = dict(
        zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    )
    [axis_name] = axis.mesh_dim_names or ("",)
    root = axis.root_mesh
    names = [
        name for name in root.mesh_dim_names or () if name in own or name == axis_name
    ]
    if axis_name in own or len(names) != len(own) + 1:
        raise coded(
            ValueError,
            "HP405",
            f"experts in {tensor.layout} cannot be sharded along {axis}: it must be another axis of the same mesh, cut "
            "from it by name",
        )
    local = platform.detach(tensor.to_local())
    if platform.is_meta(local):
        raise coded(
            ValueError,
            "HP405",
            "experts without data cannot be sharded along one axis after the other; use ExpertTensorParallel",
        )
    if src_data_rank is not None:
        rank, group = axis.rank_list[src_data_rank], axis.get_group()
        local = platform.broadcast(platform.clone(local), rank, group)
    along_axis = Layout.from_device_mesh(axis)([placement]).bind(len(tensor.shape))
    part = platform.clone(along_axis.part_of(local))
    joint = root[tuple(names)]
    merged = {**own, axis_name: placement}
    layout = Layout.from_device_mesh(joint)([merged[name] for name in names])
    part = platform.set_requires_grad(part, platform.requires_grad(tensor))
    return DTensor(part, layout.bind(len(tensor.shape)), tensor.shape)
