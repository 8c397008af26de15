# SPDX-License-Identifier: Apache-2.0
"""Replicates a model along a data axis: every rank there has the same parameters and its own part of the batch.

parallelize_module(model, mesh["tp"], plan)
replicate(model, mesh["dp"])            before the optimizer is created
loss = model(part_of_the_batch)         the loss of the whole batch, and its gradients, as on one device
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.modules.axis import (
    Batch,
    MeshAxis,
    axis_of,
    find_data_axes,
    set_batch,
)
from hyper_parallel.core.modules.lifting import lift_module
from hyper_parallel.core.modules.plain import treat_plain_as_replicated
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
    """Replicates a module along a mesh of one axis and returns it; create optimizers after it, parameters are new.

    What styles have placed on other axes of the same mesh is on all of these axes then. Plain tensors that go in are
    this rank's part of a batch, as large as the others' and sharded at ``batch_dim``; what the module creates itself
    counts as the same on every rank. ``src_data_rank``: the index along the axis of the rank whose data the others
    get; None where they are equal.
    """
    if device_mesh.ndim != 1:
        raise coded(
            ValueError,
            "HP401",
            f"replicate: expected a mesh of one axis, got {device_mesh}; take one of its axes",
        )
    modules = [one for _, one in platform.get_cells_and_names(module)]
    names = find_data_axes(modules)
    if "" in names or (device_mesh.mesh_dim_names or ("",))[0] in names:
        raise coded(
            ValueError,
            "HP408",
            "replicate: the module is copied along a data axis already",
        )
    mesh = lift_module(
        module, device_mesh, src_data_rank=src_data_rank, caller="replicate"
    )
    axes = [mesh.axis_index(name) for name in names]
    axes.append(axis_of(mesh, device_mesh))
    batch = Batch(mesh, tuple(sorted(axes)), batch_dim)
    for one in modules:
        set_batch(one, batch)
    source = f"replicate along {device_mesh}"
    treat_plain_as_replicated(module, MeshAxis(device_mesh), "data axis", source=source)
    return module
