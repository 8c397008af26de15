# SPDX-License-Identifier: Apache-2.0
"""Copies a model along a data axis: every rank there has the same parameters and its own part of the batch.

parallelize_module(model, mesh["tp"], plan)
replicate(model, mesh["dp"])            before the optimizer is made
loss = model(part_of_the_batch)         the loss of the whole batch, and its gradients, as on one device
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor, replicate_rest
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate
from hyper_parallel.core.tensor_parallel.line import (
    Batch,
    Line,
    axis_of,
    batch_of,
    set_batch,
)
from hyper_parallel.core.tensor_parallel.style import see_whole_tensors
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


def replicate(
    module: Any,
    device_mesh: DeviceMesh,
    *,
    batch_dim: int = 0,
    src_data_rank: int | None = 0,
) -> Any:
    """Copies a module along a mesh of one axis and returns it; parameters become others, so optimizers come after.

    What styles have put on other axes of the same mesh lies on all of them together then. Plain tensors that go in are
    this rank's part of a batch, as large as the others' and cut at ``batch_dim``; what the module makes by itself is
    taken to be the same on every rank. ``src_data_rank``: the place along the axis of the rank whose data all others
    get; None where they are equal.
    """
    if device_mesh.ndim != 1:
        raise coded(
            ValueError,
            "HP401",
            f"replicate: expected a mesh of one axis, got {device_mesh}; take one of its axes",
        )
    modules = [one for _, one in platform.get_cells_and_names(module)]
    if any(batch_of(one) is not None for one in modules):
        raise coded(
            ValueError,
            "HP408",
            "replicate: the module is copied along a data axis already",
        )
    mesh = _all_axes(modules, device_mesh)
    batch = Batch(mesh, (axis_of(mesh, device_mesh),), batch_dim)
    lifted: dict[int, tuple[Any, Any]] = {}  # a tensor that two modules share stays one
    for one in modules:
        for name, tensor in platform.own_tensors(one):
            if not isinstance(tensor, DTensor):
                continue
            if id(tensor) not in lifted:
                platform.set_own_tensor(
                    one, name, _on_all_axes(tensor, device_mesh, mesh, src_data_rank)
                )
                lifted[id(tensor)] = tensor, dict(platform.own_tensors(one))[name]
            else:
                platform.set_own_tensor(one, name, lifted[id(tensor)][1])
        set_batch(one, batch)
    replicate_rest(module, mesh, src_data_rank)
    see_whole_tensors(module, Line(device_mesh))
    return module


def _all_axes(modules: list[Any], line: DeviceMesh) -> DeviceMesh:
    """The mesh of the data axis and of all axes on which the modules' tensors lie."""
    tensors = [
        tensor
        for one in modules
        for _, tensor in platform.own_tensors(one)
        if isinstance(tensor, DTensor)
    ]
    meshes = list(dict.fromkeys([line, *(tensor.device_mesh for tensor in tensors)]))
    if len(meshes) == 1:
        return line
    root = line.root_mesh
    names = {name for mesh in meshes for name in mesh.mesh_dim_names or ("",)}
    if not all(
        _is_of(root, mesh, name)
        for mesh in meshes
        for name in mesh.mesh_dim_names or ("",)
    ):
        raise coded(
            ValueError,
            "HP408",
            f"replicate: {' and '.join(map(str, meshes))} must be axes of one mesh, cut from it by name as "
            "mesh['dp']",
        )
    return root[tuple(name for name in root.mesh_dim_names or () if name in names)]


def _is_of(root: DeviceMesh, mesh: DeviceMesh, name: str) -> bool:
    """Whether the axis of that name is one of the root's. Equal meshes may be one object, which knows one root only."""
    lines = [
        one.get_rank_list_along_axis(name)
        for one in (root, mesh)
        if name in (one.mesh_dim_names or ())
    ]
    return len(lines) == 2 and lines[0] == lines[1]


def _on_all_axes(
    tensor: DTensor, line: DeviceMesh, mesh: DeviceMesh, source: int | None
) -> DTensor:
    local = platform.detach(tensor.to_local())
    if source is not None and not platform.is_meta(local):
        local = platform.broadcast(
            platform.clone(local), line.rank_list[source], line.get_group()
        )
    own = tensor.device_mesh.mesh_dim_names or ()
    placements: list[Placement] = [
        tensor.placements[own.index(name)] if name in own else Replicate()
        for name in mesh.mesh_dim_names or ()
    ]
    layout = Layout.from_device_mesh(mesh)(placements).bind(len(tensor.shape))
    return DTensor(
        platform.set_requires_grad(local, platform.requires_grad(tensor)),
        layout,
        tensor.shape,
    )
