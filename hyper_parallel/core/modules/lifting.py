# SPDX-License-Identifier: Apache-2.0
"""Lifts a model onto a larger mesh: what is sharded along some axes is replicated along one more.

mesh = lift_module(model, mesh["dp"])       parameters on mesh["tp"] are now on mesh["dp", "tp"]
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor, replicate_rest
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


def lift_module(
    module: Any, axis_mesh: DeviceMesh, *, src_data_rank: int | None, caller: str
) -> DeviceMesh:
    """Replicates a module's tensors along one more axis, and returns the mesh of all axes that they are on then.

    Those that are on the axis already, such as experts that its ranks share, stay as they are along it.
    ``src_data_rank``: the index along the axis of the rank whose data the others get; None where they are equal.
    ``caller``: the public function, for messages.
    """
    modules = [one for _, one in platform.get_cells_and_names(module)]
    mesh = _join_axes(modules, axis_mesh, caller)
    lifted: dict[int, tuple[Any, Any]] = {}  # a tensor that two modules share stays one
    for owner in modules:
        for name, tensor in platform.own_tensors(owner):
            if not isinstance(tensor, DTensor):
                continue
            if id(tensor) not in lifted:
                new = _lift_tensor(tensor, axis_mesh, mesh, src_data_rank)
                platform.set_own_tensor(owner, name, new)
                # The old tensor is kept, since its id must not be taken by another one.
                lifted[id(tensor)] = tensor, dict(platform.own_tensors(owner))[name]
            else:
                platform.set_own_tensor(owner, name, lifted[id(tensor)][1])
    replicate_rest(module, mesh, src_data_rank)
    return mesh


def _join_axes(modules: list[Any], axis_mesh: DeviceMesh, caller: str) -> DeviceMesh:
    """The mesh of this axis and of all axes that the modules' tensors are on."""
    tensors = [tensor for owner in modules for _, tensor in platform.own_tensors(owner)]
    own = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
    meshes = list(dict.fromkeys([axis_mesh, *own]))
    if len(meshes) == 1:
        return axis_mesh
    root = axis_mesh.root_mesh
    names = _find_axes(root, meshes, caller)
    in_order = [name for name in root.mesh_dim_names or () if name in names]
    return root[tuple(in_order)]


def _find_axes(root: DeviceMesh, meshes: list[DeviceMesh], caller: str) -> set[str]:
    """The names of the meshes' axes, all of which must be axes of the root."""
    axes = [(mesh, name) for mesh in meshes for name in mesh.mesh_dim_names or ("",)]
    if not all(_is_axis_of(root, mesh, name) for mesh, name in axes):
        raise coded(
            ValueError,
            "HP408",
            f"{caller}: {' and '.join(map(str, meshes))} must be axes of one mesh, cut from it by name as "
            "mesh['dp']",
        )
    return {name for _, name in axes}


def _is_axis_of(root: DeviceMesh, mesh: DeviceMesh, name: str) -> bool:
    """Whether the axis of that name is one of the root's. Equal meshes may be one object, which knows one root only."""
    ranks = [
        one.get_rank_list_along_axis(name)
        for one in (root, mesh)
        if name in (one.mesh_dim_names or ())
    ]
    return len(ranks) == 2 and ranks[0] == ranks[1]


def _lift_tensor(
    tensor: DTensor, axis_mesh: DeviceMesh, mesh: DeviceMesh, source: int | None
) -> DTensor:
    local = platform.detach(tensor.to_local())
    [axis_name] = axis_mesh.mesh_dim_names or ("",)
    is_there = axis_name in (tensor.device_mesh.mesh_dim_names or ("",))
    if source is not None and not platform.is_meta(local) and not is_there:
        rank, group = axis_mesh.rank_list[source], axis_mesh.get_group()
        local = platform.broadcast(platform.clone(local), rank, group)
    return _place_on(tensor, local, mesh)


def _place_on(tensor: DTensor, local: Any, mesh: DeviceMesh) -> DTensor:
    """A shard of the tensor on a mesh with more axes, replicated along those."""
    own = tensor.device_mesh.mesh_dim_names or ()
    placements: list[Placement] = [
        tensor.placements[own.index(name)] if name in own else Replicate()
        for name in mesh.mesh_dim_names or ()
    ]
    layout = Layout.from_device_mesh(mesh)(placements).bind(len(tensor.shape))
    local = platform.set_requires_grad(local, platform.requires_grad(tensor))
    return DTensor(local, layout, tensor.shape)


def lift_rest(module: Any, mesh: DeviceMesh) -> None:
    """Puts all tensors of a module that are not on the mesh yet onto it, replicated along the axes that they lack.

    They are the same along these axes already.
    """
    for _, owner in platform.get_cells_and_names(module):
        for name, tensor in platform.own_tensors(owner):
            if isinstance(tensor, DTensor) and tensor.device_mesh.ndim < mesh.ndim:
                local = platform.detach(tensor.to_local())
                platform.set_own_tensor(owner, name, _place_on(tensor, local, mesh))
    replicate_rest(module, mesh, None)
