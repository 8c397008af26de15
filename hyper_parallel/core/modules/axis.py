# SPDX-License-Identifier: Apache-2.0
"""One axis of a mesh, along which a style places what goes into a module and what comes out.

axis = MeshAxis(mesh["tp"])
wrap = axis.wrap_fn(Replicate())               wrap(module, x): a distributed tensor, the same along the axis
redistribute = axis.redistribute_fn(Shard(1))  redistribute(x): sharded along the axis; its other placements stay
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.modules.running import is_inside_model
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded, without_hint
from hyper_parallel.platform.order import first_compared

HYPER_PARALLEL_CHECK_BATCHES = "HYPER_PARALLEL_CHECK_BATCHES"

platform = get_platform()
_BATCH = "_hyper_parallel_batch"


@dataclass(frozen=True)
class Batch:
    """What plain tensors are to the modules of a model replicated along data axes: parts of a batch, sharded at a dim.

    ``mesh`` has all axes of the model, ``axes`` are those that shard the batch.
    """

    mesh: DeviceMesh
    axes: tuple[int, ...]
    dim: int

    def placements(self, ndim: int) -> list[Placement]:
        """The placements of a plain tensor; one without a batch dim is the same everywhere."""
        has_batch = -ndim <= self.dim < ndim
        return [
            Shard(self.dim) if has_batch and axis in self.axes else Replicate()
            for axis in range(self.mesh.ndim)
        ]


def set_batch(module: Any, batch: Batch) -> None:
    """Makes plain tensors parts of a batch to this module."""
    setattr(module, _BATCH, batch)


def batch_of(module: Any) -> Batch | None:
    """What plain tensors are to a module of a model on a data axis; None without one."""
    batch: Batch | None = vars(module).get(_BATCH)
    return batch


def find_data_axes(modules: Iterable[Any]) -> list[str]:
    """The names of the axes that divide the batch of modules already; "" for an axis without a name."""
    found: dict[str, None] = {}
    for batch in map(batch_of, modules):
        if batch is not None:
            names = batch.mesh.mesh_dim_names or ("",) * batch.mesh.ndim
            found.update((names[axis], None) for axis in batch.axes)
    return list(found)


Wrap = Callable[[Any, Any], DTensor]  # of a module and a value that goes into it
Redistribute = Callable[[DTensor], DTensor]


class MeshAxis:
    """A mesh of one axis. Tensors may be on a mesh with more axes, one of which it is."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def wrap_fn(
        self, placement: Placement | None = None, sizes: Mapping[int, int] | None = None
    ) -> Wrap:
        """A function that wraps plain tensors with this placement along the axis as distributed ones.

        Without a placement they are the same along the axis, or a part of the batch along a data axis. What a model
        has made while it runs is the same on every rank, whatever the placement.
        ``sizes``: global sizes by dim, where shards may differ in size.
        """
        known: dict[Any, tuple[Layout, Any]] = {}  # by the shape of the shard
        checks = first_compared(
            os.environ.get(HYPER_PARALLEL_CHECK_BATCHES),
            variable=HYPER_PARALLEL_CHECK_BATCHES,
        )

        def wrap(module: Any, value: Any) -> DTensor:
            nonlocal checks
            if isinstance(value, DTensor):
                return value
            batch, made_inside = batch_of(module), is_inside_model()
            key = (value.shape, batch, made_inside)
            seen = known.get(key)
            if seen is not None and not checks and platform.is_dense(value):
                return DTensor.of_plain(value, *seen)
            ndim = len(value.shape)
            if made_inside:
                mesh = self.mesh if batch is None else batch.mesh
                layout, shape = _replicated_layout(mesh, ndim), None
            else:
                layout = _layout_of_plain(self.mesh, batch, placement, ndim)
                shape = _global_shape(layout, value.shape, sizes)
            wrapped = _wrap(module, value, layout, shape, check=checks > 0)
            checks = max(0, checks - 1)
            known[key] = layout, wrapped.shape
            return wrapped

        return wrap

    def redistribute_fn(self, placement: Placement) -> Redistribute:
        """A function that gives tensors another placement along the axis."""
        targets: dict[Layout, Layout] = {}

        def redistribute(value: DTensor) -> DTensor:
            layout = value._layout
            target = targets.get(layout)
            if target is None:
                target = targets[layout] = _layout_with(layout, self.mesh, placement)
            return value if target is layout else value.redistribute(None, target)

        return redistribute


def _global_shape(
    layout: Layout, local: Sequence[int], sizes: Mapping[int, int] | None
) -> list[int] | None:
    """The global shape where it does not follow from the shape of a shard; else None."""
    if not sizes or not any(layout.dim_axes[dim] for dim in sizes):
        return None
    shape = list(layout.get_global_shape(local))
    for dim, size in sizes.items():
        shape[dim] = size
    return shape


def _wrap(
    module: Any, value: Any, layout: Layout, shape: Sequence[int] | None, check: bool
) -> DTensor:
    try:
        return DTensor.from_local(value, None, layout, shape=shape, run_check=check)
    except ValueError as error:
        if not check:
            raise
        raise coded(
            ValueError,
            "HP412",
            f"{type(module).__name__}: the plain tensors of shape {tuple(value.shape)} and others that went in do "
            f"not fit together: {without_hint(error)}. A plain tensor that goes into a model is this rank's "
            "part of the batch, as large as the others' along a data axis and the same along every other axis: "
            "give a sampler the place and the size of the data axis, not those of the whole job",
        ) from None


@functools.lru_cache(maxsize=4096)
def _replicated_layout(mesh: DeviceMesh, ndim: int) -> Layout:
    return Layout.from_device_mesh(mesh)([Replicate()] * mesh.ndim).bind(ndim)


@functools.lru_cache(maxsize=4096)
def _layout_of_plain(
    mesh: DeviceMesh, batch: Batch | None, placement: Placement | None, ndim: int
) -> Layout:
    if batch is None:
        return Layout.from_device_mesh(mesh)([placement or Replicate()]).bind(ndim)
    placements = batch.placements(ndim)
    if placement is not None:
        placements[axis_of(batch.mesh, mesh)] = placement
    return Layout.from_device_mesh(batch.mesh)(placements).bind(ndim)


@functools.lru_cache(maxsize=4096)
def _layout_with(layout: Layout, mesh: DeviceMesh, placement: Placement) -> Layout:
    placements = list(layout.placements)
    placements[axis_of(layout.mesh, mesh)] = placement
    return layout.with_placements(placements)


def axis_of(mesh: DeviceMesh, axis_mesh: DeviceMesh) -> int:
    """The index of the axis that a mesh of one axis is in a mesh."""
    matching = [
        axis
        for axis in range(mesh.ndim)
        if tuple(mesh.get_rank_list_along_axis(axis)) == axis_mesh.rank_list
    ]
    names = mesh.mesh_dim_names
    if axis_mesh.mesh_dim_names and names and len(matching) > 1:
        # Axes of one rank differ in nothing but the name.
        own = axis_mesh.mesh_dim_names[0]
        matching = [axis for axis in matching if names[axis] == own]
    if not matching:
        raise coded(
            ValueError,
            "HP409",
            f"the tensor is on {mesh}, but the module is parallelized over {axis_mesh}, which is not an axis of the "
            "tensor's mesh",
        )
    return matching[0]


@functools.lru_cache(maxsize=4096)
def is_even(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether all ranks have shards of one shape, from which the global shape follows."""
    return (
        layout.get_global_shape(layout.local_shape(shape, [0] * layout.mesh.ndim))
        == shape
    )
