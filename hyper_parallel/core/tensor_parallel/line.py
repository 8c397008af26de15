# SPDX-License-Identifier: Apache-2.0
"""One axis of devices, along which a style places what goes into a module and what comes out.

line = Line(mesh["tp"])
take = line.taker(Replicate())      take(module, x): a distributed tensor of a plain one that is the same along the axis
move = line.mover(Shard(1))         move(x): cut along the axis; what other axes do to it stays as it is
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate, Shard
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded, without_hint
from hyper_parallel.platform.order import first_compared

HYPER_PARALLEL_CHECK_BATCHES = "HYPER_PARALLEL_CHECK_BATCHES"

platform = get_platform()
_BATCH = "_hyper_parallel_batch"


@dataclass(frozen=True)
class Batch:
    """What plain tensors are to the modules of a model that is copied along data axes: parts of a batch, cut at a dim.

    ``mesh`` has all axes that the model lies on, ``axes`` are those that cut the batch.
    """

    mesh: DeviceMesh
    axes: tuple[int, ...]
    dim: int

    def placements(self, ndim: int) -> list[Placement]:
        """How a plain tensor lies on every axis; one without a batch is the same everywhere."""
        cut = -ndim <= self.dim < ndim
        return [
            Shard(self.dim) if cut and axis in self.axes else Replicate()
            for axis in range(self.mesh.ndim)
        ]


def set_batch(module: Any, batch: Batch) -> None:
    """From now on plain tensors are parts of a batch to this module."""
    setattr(module, _BATCH, batch)


def batch_of(module: Any) -> Batch | None:
    """What plain tensors are to a module, if that was said."""
    found: Batch | None = vars(module).get(_BATCH)
    return found


class _Running(threading.local):
    """The modules that are running now in which plain tensors count as copies, and what held before."""

    def __init__(self) -> None:
        self.stack: list[tuple[Any, bool]] = []


RUNNING = _Running()


def is_inside_model() -> bool:
    """Whether a model runs whose inputs have been placed: a plain tensor is then one that it has made."""
    return bool(RUNNING.stack)


Take = Callable[[Any, Any], DTensor]  # of a module and what goes into it
Move = Callable[[DTensor], DTensor]


class Line:
    """A mesh of one axis. Tensors may lie on a mesh with more axes, of which it is one."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def taker(
        self, placement: Placement | None = None, sizes: Mapping[int, int] | None = None
    ) -> Take:
        """A function that makes distributed tensors of plain ones that lie like this along the axis.

        Without a placement they are the same along the axis, or where that is a data axis a part of the batch. What a
        model has made while it runs is the same on every rank, whatever the placement.
        ``sizes``: of the whole, by dim, where shards may differ in size.
        """
        known: dict[Any, tuple[Layout, Any]] = {}  # by the shape of the shard
        checks = first_compared(
            os.environ.get(HYPER_PARALLEL_CHECK_BATCHES),
            variable=HYPER_PARALLEL_CHECK_BATCHES,
        )

        def taken(module: Any, value: Any) -> DTensor:
            nonlocal checks
            if isinstance(value, DTensor):
                return value
            batch, made_inside = batch_of(module), is_inside_model()
            key = (value.shape, batch, made_inside)
            found = known.get(key)
            if found is not None and not checks and platform.is_dense(value):
                return DTensor.of_plain(value, *found)
            if made_inside:
                layout, whole = (
                    _layout_of_copies(
                        self.mesh if batch is None else batch.mesh, len(value.shape)
                    ),
                    None,
                )
            else:
                layout = _layout_of_plain(self.mesh, batch, placement, len(value.shape))
                whole = _whole(layout, value.shape, sizes)
            made = _placed(module, value, layout, whole, check=checks > 0)
            checks = max(0, checks - 1)
            known[key] = layout, made.shape
            return made

        return taken

    def mover(self, placement: Placement) -> Move:
        """A function that gives tensors another placement along the axis."""
        targets: dict[Layout, Layout] = {}

        def moved(value: DTensor) -> DTensor:
            layout = value._layout
            target = targets.get(layout)
            if target is None:
                target = targets[layout] = _layout_with(layout, self.mesh, placement)
            return value if target is layout else value.redistribute(None, target)

        return moved


def _whole(
    layout: Layout, shape: Sequence[int], sizes: Mapping[int, int] | None
) -> list[int] | None:
    """The shape of the whole where more is known than the shape of a shard."""
    if not sizes or not any(layout.dim_axes[dim] for dim in sizes):
        return None
    whole = list(layout.get_global_shape(shape))
    for dim, size in sizes.items():
        whole[dim] = size
    return whole


def _placed(
    module: Any, value: Any, layout: Layout, whole: Sequence[int] | None, check: bool
) -> DTensor:
    try:
        return DTensor.from_local(value, None, layout, shape=whole, run_check=check)
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
def _layout_of_copies(mesh: DeviceMesh, ndim: int) -> Layout:
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


def axis_of(mesh: DeviceMesh, line: DeviceMesh) -> int:
    """Which axis of a mesh a mesh of one axis is."""
    found = [
        axis
        for axis in range(mesh.ndim)
        if tuple(mesh.get_rank_list_along_axis(axis)) == line.rank_list
    ]
    if (
        line.mesh_dim_names and mesh.mesh_dim_names and len(found) > 1
    ):  # axes of one rank are alike but for the name
        found = [
            axis
            for axis in found
            if mesh.mesh_dim_names[axis] == line.mesh_dim_names[0]
        ]
    if not found:
        raise coded(
            ValueError,
            "HP409",
            f"a tensor on {mesh} came to a module that lies on {line}, which is none of its axes",
        )
    return found[0]


@functools.lru_cache(maxsize=4096)
def is_even(layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether all ranks have shards of one shape, so that the whole can be told from any of them."""
    return (
        layout.get_global_shape(layout.local_shape(shape, [0] * layout.mesh.ndim))
        == shape
    )
