# SPDX-License-Identifier: Apache-2.0
"""Makes plain inputs of a model parts of one batch, divided along the data axes of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.modules.axis import (
    Batch,
    MeshAxis,
    find_data_axes,
    set_batch,
)
from hyper_parallel.core.modules.lifting import lift_rest
from hyper_parallel.core.modules.plain import treat_plain_as_replicated
from hyper_parallel.platform import get_platform

platform = get_platform()


def divide_batches(module: Any, data_mesh: DeviceMesh, dim: int) -> None:
    """Has plain inputs count as parts of a batch, divided at ``dim`` along all axes of a mesh.

    What the module creates itself, and its buffers, are the same on every rank. Its parameters are distributed on
    the mesh already, and possibly on other axes of the same mesh.
    """
    modules = [one for _, one in platform.get_cells_and_names(module)]
    mesh = _find_joint_mesh(modules, data_mesh)
    axes: Sequence[int] = range(mesh.ndim)
    if mesh is not data_mesh:
        names = mesh.mesh_dim_names or ()
        divided = {*(data_mesh.mesh_dim_names or ()), *find_data_axes(modules)}
        axes = [axis for axis, name in enumerate(names) if name in divided]
    batch = Batch(mesh, tuple(axes), dim)
    for one in modules:
        set_batch(one, batch)
    lift_rest(module, mesh)
    source = f"batches divided over {data_mesh}"
    treat_plain_as_replicated(module, MeshAxis(data_mesh), "data axis", source=source)


def _find_joint_mesh(modules: list[Any], data_mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of the data axes and of all others that parameters are on beside them.

    Some may be on other axes of the same ranks, as experts are.
    """
    names = set(data_mesh.mesh_dim_names or ())
    meshes = [
        tensor.device_mesh
        for owner in modules
        for _, tensor in platform.own_tensors(owner)
        if isinstance(tensor, DTensor)
        and names <= set(tensor.device_mesh.mesh_dim_names or ())
    ]
    return max([data_mesh, *meshes], key=lambda mesh: mesh.ndim)
