# SPDX-License-Identifier: Apache-2.0
"""How a tensor is placed on a mesh: one placement per axis or, from the tensor's side, the axes that shard each dim.

    layout = Layout((2, 4), ("dp", "tp"))
    layout("dp", "None")                     dim 0 is sharded along dp
    layout(("dp", "tp"), "None")             dim 0 is sharded along dp, each piece along tp
    layout([Shard(0), Replicate()])          the same as the first, from the mesh's side

Layouts are values, and equal layouts are the same object: comparing and hashing them is free. Methods that change a
layout return another one. A layout given by placements has no number of dims until ``bind(ndim)``.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.geometry import Box, Partition, Region, Spans
from hyper_parallel.core.dtensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    commute,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded, prefixed

NONE = "None"  # an alias for: no axis cuts this dim

_known: WeakValueDictionary[tuple[Any, ...], Layout] = WeakValueDictionary()


class Layout:
    """A mesh with placements; a layout without placements is called to create others."""

    __slots__ = (
        "__weakref__",
        "_dim_axes",
        "_partition",
        "irregular",
        "mesh",
        "ndim",
        "placements",
    )

    mesh: DeviceMesh
    placements: tuple[Placement, ...]  # one an axis; empty before any are given
    ndim: int | None  # of the tensors it is for, if that is known
    irregular: dict[
        int, Shard
    ]  # the axes whose placement divides a dim by a rule of its own
    _dim_axes: tuple[tuple[int, ...], ...] | None
    _partition: Partition | None

    def __new__(
        cls,
        mesh_shape: Sequence[int],
        alias_name: Sequence[str],
        rank_list: Sequence[int] | None = None,
    ) -> Layout:
        shape = tuple(mesh_shape)
        ranks = (
            tuple(range(math.prod(shape))) if rank_list is None else tuple(rank_list)
        )
        if len(ranks) != math.prod(shape):
            raise coded(
                ValueError,
                "HP201",
                f"Layout: a mesh of shape {shape} needs {math.prod(shape)} ranks, got {len(ranks)}",
            )
        grid = np.asarray(ranks, dtype=np.int64).reshape(shape)
        mesh = DeviceMesh(_device_type(), grid, mesh_dim_names=alias_name)
        return cls.from_device_mesh(mesh)

    @staticmethod
    def from_device_mesh(mesh: DeviceMesh) -> Layout:
        """The layout of a mesh, without placements yet."""
        return _interned(mesh, (), None)

    def __call__(self, *specification: Any) -> Layout:
        """The layout with these placements: one alias per dim, or one list of placements."""
        if len(specification) == 1 and _is_placements(specification[0]):
            return _interned(
                self.mesh, _checked_placements(self.mesh, specification[0]), None
            )
        return self._from_aliases(specification)

    def bind(self, ndim: int) -> Layout:
        """The layout for tensors of ``ndim`` dims; resolves negative dims, raises ValueError for dims out of range."""
        if self.ndim == ndim:
            return self
        if self.ndim is not None:
            raise coded(
                ValueError,
                "HP211",
                f"{self} is for tensors of {self.ndim} dims, not of {ndim}",
            )
        return _interned(
            self.mesh,
            tuple(_resolved(self, axis, ndim) for axis in range(self.mesh.ndim)),
            ndim,
        )

    def with_placements(self, placements: Sequence[Placement]) -> Layout:
        """The layout on the same mesh, for the same number of dims, with other placements."""
        made = _interned(self.mesh, _checked_placements(self.mesh, placements), None)
        return made if self.ndim is None else made.bind(self.ndim)

    # --- from the mesh's side

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The number of ranks along each axis."""
        return self.mesh.mesh_shape

    @property
    def alias_name(self) -> tuple[str, ...]:
        """The names of the axes; their numbers if they have none."""
        return self.mesh.mesh_dim_names or tuple(map(str, range(self.mesh.ndim)))

    @property
    def rank_list(self) -> tuple[int, ...]:
        """All ranks of the mesh, the last axis fastest."""
        return self.mesh.rank_list

    @property
    def partial(self) -> list[str | None]:
        """For each axis its Partial reduction, or None."""
        return [
            p.reduce_op if isinstance(p, Partial) else None
            for p in self._placed("partial")
        ]

    def is_partial(self) -> bool:
        """Whether any axis is Partial."""
        return any(op is not None for op in self.partial) if self.placements else False

    def get_partial_by_dev_id(self, axis: int | str) -> str | None:
        """The Partial reduction of an axis, or None."""
        return self.partial[self._axis(axis)]

    def set_partial_by_dev_axis(self, axis: int | str, op: str) -> Layout:
        """The layout with Partial on an axis that does not shard the tensor."""
        index = self._axis(axis)
        placements = list(self._placed("set_partial_by_dev_axis"))
        if placements[index].is_shard():
            raise coded(
                ValueError,
                "HP213",
                f"{self}: axis {axis!r} cuts the tensor, so no reduction can be pending on it",
            )
        placements[index] = Partial(op)
        return self.with_placements(placements)

    def reset_partial(self) -> Layout:
        """The layout with Replicate on every Partial axis."""
        placements = self._placed("reset_partial")
        if not any(isinstance(p, Partial) for p in placements):
            return self
        return self.with_placements(
            [Replicate() if p.is_partial() else p for p in placements]
        )

    # --- from the tensor's side

    @property
    def dim_axes(self) -> tuple[tuple[int, ...], ...]:
        """For each dim the axes that shard it, outermost first."""
        if self._dim_axes is None:
            raise coded(
                ValueError,
                "HP211",
                f"{self} was given by placements and does not know its number of dims; bind(ndim) first",
            )
        return self._dim_axes

    @property
    def alias_placements(self) -> tuple[str | tuple[str, ...], ...]:
        """For each dim the names of the axes that shard it, in the alias form."""
        return tuple(
            _one_or_many([self.alias_name[a] for a in axes], NONE)
            for axes in self.dim_axes
        )

    @property
    def tensor_map(self) -> tuple[int | tuple[int, ...], ...]:
        """For each dim -1, or the axis that shards it counted from the right, or a tuple of them."""
        last = self.mesh.ndim - 1
        return tuple(
            _one_or_many([last - a for a in axes], -1) for axes in self.dim_axes
        )

    def placement_to_tensor_map(self, ndim: int) -> tuple[int | tuple[int, ...], ...]:
        """The tensor map for tensors of ``ndim`` dims."""
        return self.bind(ndim).tensor_map

    def tensor_map_to_placement(self) -> tuple[Placement, ...]:
        """The placements of the tensor map, including Partial."""
        return self.placements

    def get_dim_split_num(self, dim: int) -> int:
        """The number of pieces into which a dim is sharded."""
        return math.prod(self.mesh_shape[axis] for axis in self.dim_axes[dim])

    def get_split_id(self, dim: int) -> int:
        """The index of this rank's piece of a dim."""
        coordinate, piece = self._coordinate(None), 0
        for axis in self.dim_axes[dim]:
            piece = piece * self.mesh_shape[axis] + coordinate[axis]
        return piece

    def get_global_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """The global shape if every rank has a shard of this shape; not valid for uneven shards."""
        return _global_shape(self.bind(len(local_shape)), tuple(local_shape))

    def repeat_num(self) -> int:
        """The number of ranks that have the same data."""
        placed = zip(self.mesh_shape, self._placed("repeat_num"), strict=True)
        return math.prod(size for size, placement in placed if placement.is_replicate())

    # --- dims that are not divided into chunks

    @property
    def is_regular(self) -> bool:
        """Whether every sharded dim is divided into chunks."""
        return not self.irregular

    def regular(self) -> Layout:
        """The layout with every sharded dim divided into chunks, by the same axes."""
        if not self.irregular:
            return self
        placements = [
            Shard(self.irregular[axis].dim) if axis in self.irregular else placement
            for axis, placement in enumerate(self.placements)
        ]
        return self.with_placements(placements)

    def within_spans(
        self, shape: Sequence[int], coordinate: Sequence[int] | None = None
    ) -> tuple[Layout, tuple[int, ...]]:
        """What a coordinate's spans of irregular dims look like to the other axes.

        They see one tensor, of the shape returned, and need not know how those dims are
        divided.
        """
        if not self.irregular:
            return self, tuple(shape)
        bound, sizes = self.bind(len(shape)), list(shape)
        local = bound.region_of(shape, coordinate).shape
        for placement in bound.irregular.values():
            sizes[placement.dim] = local[placement.dim]
        others = [
            Replicate() if axis in bound.irregular else p
            for axis, p in enumerate(bound.placements)
        ]
        return bound.with_placements(others), tuple(sizes)

    # --- shards

    def region_of(
        self, shape: Sequence[int], coordinate: Sequence[int] | None = None
    ) -> Region:
        """What a coordinate of the mesh holds of a tensor; this rank's unless one is given."""
        bound = self.bind(len(shape))
        assert bound._partition is not None
        try:
            return bound._partition.region(shape, self._coordinate(coordinate))
        except ValueError as error:  # a placement that does not fit the shape
            raise prefixed(str(self), error) from None

    def spans_of(
        self, shape: Sequence[int], coordinate: Sequence[int] | None = None
    ) -> tuple[Spans, ...]:
        """For each dim the spans that a coordinate holds; several only if the dim is irregular."""
        return self.region_of(shape, coordinate).spans

    def boxes_of(
        self, shape: Sequence[int], coordinate: Sequence[int] | None = None
    ) -> tuple[Box, ...]:
        """The boxes that a coordinate holds; the last dim changes first."""
        return tuple(itertools.product(*self.spans_of(shape, coordinate)))

    def shard_of(
        self, shape: Sequence[int], coordinate: Sequence[int] | None = None
    ) -> Box:
        """The one box that a coordinate holds, this rank's unless one is given."""
        spans_of = self.spans_of(shape, coordinate)
        if any(len(spans) > 1 for spans in spans_of):
            raise coded(
                ValueError,
                "HP214",
                f"{self}: a shard has several boxes; call boxes_of() instead",
            )
        return tuple(span for (span,) in spans_of)

    def part_of(self, whole: Any) -> Any:
        """This rank's shard of a full plain tensor; usually a view of it."""
        for dim, spans in enumerate(self.spans_of(tuple(whole.shape))):
            before = (slice(None),) * dim
            parts = [
                whole[(*before, slice(start, start + size))] for start, size in spans
            ]
            whole = parts[0] if len(parts) == 1 else get_platform().cat(parts, dim)
        return whole

    def local_shape(
        self, shape: Sequence[int], coordinate: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """The shape of the shard at a coordinate of the mesh, by default this rank's."""
        if not any(self.bind(len(shape)).dim_axes):
            return tuple(shape)
        return self.region_of(shape, coordinate).shape

    def largest_local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The largest size of each dim that any rank holds: that of the first, if dims are chunked."""
        largest = list(self.local_shape(shape, (0,) * self.mesh.ndim))
        bound = self.bind(len(shape))
        for axis, placement in bound.irregular.items():
            largest[placement.dim] = max(bound.sizes_along(axis, shape))
        return tuple(largest)

    def sizes_along(self, axis: int, shape: Sequence[int]) -> list[int]:
        """The size of the dim that each rank holds along the axis of an irregular placement."""
        placement = self.irregular[axis]
        ranks, size = self.mesh_shape[axis], shape[placement.dim]
        spans_of = [placement.spans(size, ranks, index) for index in range(ranks)]
        return [sum(length for _, length in spans) for spans in spans_of]

    def is_empty_somewhere(self, shape: Sequence[int]) -> bool:
        """Whether some rank holds nothing of a tensor of this shape."""
        last = [size - 1 for size in self.mesh_shape]  # has the least of chunked dims
        if 0 in self.local_shape(shape, last):
            return True
        bound = self.bind(len(shape))
        return any(0 in bound.sizes_along(axis, shape) for axis in bound.irregular)

    def local_slices(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """This rank's part of a tensor of that shape."""
        return tuple(
            slice(offset, offset + size) for offset, size in self.shard_of(shape)
        )

    def tensor(self, local: Any, shape: Sequence[int]) -> Any:
        """The distributed tensor of this layout and global shape whose shard on this rank is ``local``."""
        from hyper_parallel.core.dtensor.dtensor import (
            DTensor,
        )  # which is made of layouts, and of the framework

        bound = self.bind(len(shape))
        if tuple(local.shape) != bound.local_shape(shape):
            raise coded(
                ValueError,
                "HP220",
                f"{self}: rank {self.mesh.rank} has {bound.local_shape(shape)} of a tensor of shape "
                f"{tuple(shape)}, got a shard of shape {tuple(local.shape)}",
            )
        return DTensor(local, bound, shape)

    # --- as text and data

    def to_dict(self) -> dict[str, Any]:
        """The layout as plain values."""
        return {
            "mesh_shape": list(self.mesh_shape),
            "alias_name": list(self.alias_name),
            "rank_list": list(self.rank_list),
            "placements": [str(p) for p in self.placements],
            "tensor_map": None if self._dim_axes is None else list(self.tensor_map),
            "partial": self.partial if self.placements else None,
        }

    def to_string(self) -> str:
        """A readable summary in one line."""
        axes = ", ".join(
            f"{name}={size}"
            for name, size in zip(self.alias_name, self.mesh_shape, strict=True)
        )
        placed = f" [{', '.join(map(str, self.placements))}]" if self.placements else ""
        return f"Layout({axes}){placed}"

    __repr__ = to_string

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"a layout is a value: {name} cannot be set; what changes a layout returns another"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (_interned, (self.mesh, self.placements, self.ndim))

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: Any) -> Layout:
        return self

    # --- inside

    def _from_aliases(self, specification: tuple[Any, ...]) -> Layout:
        placed: list[Placement] = [Replicate()] * self.mesh.ndim
        used: set[str] = set()
        for dim, entry in enumerate(specification):
            names = _alias_names(self, entry)
            for name in names:
                if name in used:
                    raise coded(
                        ValueError,
                        "HP212",
                        f"axis {name!r} is used twice in {specification}; an axis can cut one dim",
                    )
                used.add(name)
            for axis, placement in _shards(
                dim, [self._axis(name) for name in names], self.mesh_shape
            ):
                placed[axis] = placement
        return _interned(self.mesh, tuple(placed), None).bind(len(specification))

    def _axis(self, axis: int | str) -> int:
        if isinstance(axis, str):
            if axis not in self.alias_name:
                raise coded(
                    ValueError,
                    "HP212",
                    f"unknown axis {axis!r}; the mesh has {', '.join(self.alias_name)}",
                )
            return self.alias_name.index(axis)
        if not isinstance(axis, int) or not -self.mesh.ndim <= axis < self.mesh.ndim:
            raise coded(
                ValueError,
                "HP212",
                f"axis {axis!r} is not one of the {self.mesh.ndim} axes {', '.join(self.alias_name)}",
            )
        return axis % self.mesh.ndim

    def _placed(self, call: str) -> tuple[Placement, ...]:
        if not self.placements:
            raise coded(
                ValueError,
                "HP211",
                f"{call}: {self} has no placements yet; call it with some",
            )
        return self.placements

    def _coordinate(self, coordinate: Sequence[int] | None) -> Sequence[int]:
        return (
            self.mesh.own_coordinate(f"a shard of {self}")
            if coordinate is None
            else coordinate
        )


def _device_type() -> str:
    """The framework's device type if the process has loaded a framework; a layout used for planning needs none."""
    is_loaded = "torch" in sys.modules or "mindspore" in sys.modules
    return get_platform().device_type() if is_loaded else "cpu"


@functools.lru_cache(maxsize=4096)
def _global_shape(layout: Layout, local_shape: tuple[int, ...]) -> tuple[int, ...]:
    whole = [
        size * layout.get_dim_split_num(dim) for dim, size in enumerate(local_shape)
    ]
    for axis, placement in layout.irregular.items():
        local_size = local_shape[placement.dim]
        ranks = layout.mesh_shape[axis]
        whole[placement.dim] = placement.whole_size(local_size, ranks)
    return tuple(whole)


def _interned(
    mesh: DeviceMesh, placements: tuple[Placement, ...], ndim: int | None
) -> Layout:
    key = (mesh, placements, ndim)
    found = _known.get(key)
    if found is None:
        _check_order(mesh)
        made = _new_layout(mesh, placements, ndim)
        found = _known.setdefault(key, made)
    return found


def _new_layout(
    mesh: DeviceMesh, placements: tuple[Placement, ...], ndim: int | None
) -> Layout:
    irregular = {
        axis: placement
        for axis, placement in enumerate(placements)
        if isinstance(placement, Shard) and not placement.is_chunked
    }
    layout = object.__new__(Layout)
    values = {
        "mesh": mesh,
        "placements": placements,
        "ndim": ndim,
        "irregular": irregular,
        "_dim_axes": None,
        "_partition": None,
    }
    for name, value in values.items():
        object.__setattr__(layout, name, value)
    if ndim is not None:
        dim_axes = _ordered_axes(layout)
        rules = {placement.dim: placement for placement in irregular.values()}
        partition = Partition(mesh.mesh_shape, dim_axes, rules)
        object.__setattr__(layout, "_dim_axes", dim_axes)
        object.__setattr__(layout, "_partition", partition)
    return layout


def _check_order(mesh: DeviceMesh) -> None:
    """Groups have their ranks in ascending order, and the pieces of a tensor follow that order along an axis."""
    axis = mesh.descending_axis
    if axis is not None:
        raise coded(
            ValueError,
            "HP214",
            f"tensors lie on meshes whose ranks ascend along every axis; axis {axis} of {mesh} does not",
        )


def _is_placements(entry: Any) -> bool:
    return isinstance(entry, (list, tuple)) and any(
        isinstance(item, Placement) for item in entry
    )


def _checked_placements(
    mesh: DeviceMesh, placements: Sequence[Any]
) -> tuple[Placement, ...]:
    wrong = [p for p in placements if not isinstance(p, Placement)]
    if wrong:
        raise coded(
            ValueError,
            "HP211",
            f"expected placements (Shard, Replicate, Partial), one an axis, got {wrong[0]!r}",
        )
    pending = [p.reduce_op for p in placements if isinstance(p, Partial)]
    if not commute(pending):
        raise coded(
            ValueError,
            "HP213",
            f"reductions by {' and by '.join(sorted(set(pending)))} cannot be pending together: which is taken "
            "first makes a difference; reduce one of them before",
        )
    if len(placements) != mesh.ndim:
        raise coded(
            ValueError,
            "HP211",
            f"expected {mesh.ndim} placements, one for each axis of {mesh}, got {len(placements)}",
        )
    return tuple(placements)


def _resolved(layout: Layout, axis: int, ndim: int) -> Placement:
    """The placement with its dim counted from the front."""
    placement = layout._placed("bind")[axis]
    if not isinstance(placement, Shard):
        return placement
    if not -ndim <= placement.dim < ndim:
        name = layout.alias_name[axis]
        raise coded(
            ValueError,
            "HP211",
            f"{layout}: axis {name!r} cuts dim {placement.dim}, but the tensor has {ndim} dims",
        )
    return replace(placement, dim=placement.dim % ndim)


def _ordered_axes(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """For each dim the axes that shard it, outermost first.

    Without StridedShard that is the order of the mesh. A split factor is the number of pieces made by the later axes
    that come before this one; from the last axis to the first, it determines the position of this one.
    """
    found: list[tuple[int, ...]] = []
    for dim in range(layout.ndim or 0):
        order: list[int] = []
        for axis in reversed(range(layout.mesh.ndim)):
            placement = layout.placements[axis]
            if placement.is_shard(dim):
                order.insert(_position(layout, axis, placement, order), axis)
        if len(order) > 1 and any(axis in layout.irregular for axis in order):
            names = [layout.alias_name[axis] for axis in sorted(order)]
            raise coded(
                ValueError,
                "HP214",
                f"{layout}: only Shard can shard dim {dim} on several axes, here {names}; use it on each of them "
                "(context parallelism does with load_balance=False)",
            )
        found.append(tuple(order))
    return tuple(found)


def _position(layout: Layout, axis: int, placement: Placement, order: list[int]) -> int:
    factor = placement.split_factor if isinstance(placement, StridedShard) else 1
    pieces = 1
    for position in range(len(order) + 1):
        if pieces == factor:
            return position
        if position < len(order):
            pieces *= layout.mesh_shape[order[position]]
    sizes = [layout.mesh_shape[a] for a in order]
    raise coded(
        ValueError,
        "HP214",
        f"{layout}: the split factor {factor} on axis {layout.alias_name[axis]!r} is not made by the later axes of "
        f"that dim, whose sizes are {sizes}",
    )


def _shards(
    dim: int, axes: Sequence[int], mesh_shape: Sequence[int]
) -> list[tuple[int, Shard]]:
    """(axis, placement) for a dim that is sharded by these axes, outermost first."""
    made: list[tuple[int, Shard]] = []
    for place, axis in enumerate(axes):
        factor = math.prod(mesh_shape[other] for other in axes[:place] if other > axis)
        made.append((axis, Shard(dim) if factor == 1 else StridedShard(dim, factor)))
    return made


def placements_of(
    dim_axes: Sequence[Sequence[int]],
    partial: Sequence[str | None],
    mesh_shape: Sequence[int],
) -> tuple[Placement, ...]:
    """The placements of a tensor whose dims are sharded by these axes, Partial by these reductions."""
    placed: list[Placement] = [
        Replicate() if op is None else Partial(op) for op in partial
    ]
    for dim, axes in enumerate(dim_axes):
        for axis, placement in _shards(dim, axes, mesh_shape):
            placed[axis] = placement
    return tuple(placed)


def _alias_names(layout: Layout, entry: Any) -> tuple[str, ...]:
    if entry is None or entry == NONE:
        return ()
    names = (entry,) if isinstance(entry, str) else entry
    if not isinstance(names, (list, tuple)) or not all(
        isinstance(name, str) for name in names
    ):
        raise coded(
            ValueError,
            "HP212",
            f"expected 'None', an axis or a tuple of axes for each dim, got {entry!r}; the mesh has "
            f"{', '.join(layout.alias_name)}",
        )
    return tuple(name for name in names if name != NONE)


def _one_or_many(items: list[Any], nothing: Any) -> Any:
    return nothing if not items else items[0] if len(items) == 1 else tuple(items)
