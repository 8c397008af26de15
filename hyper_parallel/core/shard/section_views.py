# SPDX-License-Identifier: Apache-2.0
"""Views of a FusedShard tensor along the borders of its sections.

qkv = linear(x, weight)               weight is FusedShard(0, (16, 8, 8)), so qkv is FusedShard(-1, (16, 8, 8))
q, k, v = qkv.split((16, 8, 8), -1)   views of the shard, each Shard(-1)

Any other call on such a tensor goes the way of ``irregular.py``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.geometry import chunk_sizes
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import FusedShard, Placement, Shard
from hyper_parallel.core.shard.execution import Run
from hyper_parallel.core.shard.ops.indexing import ALL, spread
from hyper_parallel.core.shard.rule import BoundRule
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import OpName

platform = get_platform()


def find_section_view(
    called: OpName, bound: BoundRule, arguments: dict[str, Any]
) -> Run | None:
    """How to run a view along the borders of sections; None for any other call."""
    find, tensor = _VIEWS.get(called.name), arguments.get("input")
    if find is None or not isinstance(tensor, DTensor):
        return None
    others = {
        name: value
        for name, value in arguments.items()
        if name not in ("input", "shape")
    }
    for axis, placement in tensor._layout.irregular.items():
        if not isinstance(placement, FusedShard):
            continue
        found = find(
            _Sections(tensor, axis, placement), bound.result_shapes[0], **others
        )
        if found is not None:
            return found
    return None


class _Sections:
    """A dim of a tensor that is sharded section by section."""

    def __init__(self, tensor: DTensor, axis: int, placement: FusedShard) -> None:
        self.layout: Layout = tensor._layout
        self.shape = tuple(tensor._shape)
        self.axis, self.dim, self.sections = axis, placement.dim, placement.sections
        self.ranks = self.layout.mesh_shape[axis]
        place = self.layout.mesh.own_coordinate("a view of sections")
        self.own = [
            size
            for _, size in placement.spans(
                self.shape[self.dim], self.ranks, place[axis]
            )
        ]

    def is_along(self, dim: int) -> bool:
        return dim % len(self.shape) == self.dim

    def parts(
        self, sizes: Sequence[int]
    ) -> list[tuple[Layout, tuple[int, ...], int]] | None:
        """(layout, shape, this rank's size) of parts of these sizes; None unless they end where sections end."""
        stops, borders = (
            list(itertools.accumulate(sizes)),
            [0, *itertools.accumulate(self.sections)],
        )
        if min(sizes) < 0 or stops[-1] != borders[-1] or not set(stops) <= set(borders):
            return None
        found = []
        for start, stop in zip([0, *stops], stops, strict=False):
            within = slice(borders.index(start), borders.index(stop))
            placement = _placement(self.dim, self.sections[within])
            shape = (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :])
            found.append((self._layout_with(placement), shape, sum(self.own[within])))
        return found

    def unflattened(
        self, sizes: Sequence[int]
    ) -> tuple[Layout, tuple[int, ...]] | None:
        """(layout, shape) with the dim as these: as (sections, size of one, ...), or (heads of all, size of one)."""
        shape = (*self.shape[: self.dim], *sizes, *self.shape[self.dim + 1 :])
        sections = [size for size in self.sections if size]
        at = next((i for i, size in enumerate(sizes) if i and size != 1), 1)
        inner = math.prod(sizes[1:])
        if set(sections) == {inner} and self._is_cut_alike(
            [sizes[at]], inner // sizes[at]
        ):
            return self._layout_with(Shard(self.dim + at), len(sizes) - 1), shape
        heads = [size // inner for size in sections if size % inner == 0]
        if len(heads) == len(sections) and self._is_cut_alike(heads, inner):
            return self._layout_with(_placement(self.dim, heads), len(sizes) - 1), shape
        return None

    def _is_cut_alike(self, outer: Sequence[int], inner: int) -> bool:
        """Whether cutting merged dims is cutting the outer one."""
        cuts = (
            (chunk_sizes(size, self.ranks), chunk_sizes(size * inner, self.ranks))
            for size in outer
        )
        return all(
            [piece * inner for piece in pieces] == merged for pieces, merged in cuts
        )

    def _layout_with(self, placement: Placement, more: int = 0) -> Layout:
        """The layout with another placement of the axis, and ``more`` dims after this one."""
        placements: list[Placement] = [
            replace(p, dim=p.dim + more)
            if isinstance(p, Shard) and p.dim > self.dim
            else p
            for p in self.layout.placements
        ]
        placements[self.axis] = placement
        base = Layout.from_device_mesh(self.layout.mesh)
        return base(placements).bind(len(self.shape) + more)


def _placement(dim: int, sections: Sequence[int]) -> Shard:
    """How these sections lie: a single one is cut as any dim."""
    sizes = tuple(size for size in sections if size)
    return FusedShard(dim, sizes) if len(sizes) > 1 else Shard(dim)


def _viewed(base: DTensor, local: Any, layout: Layout, shape: Sequence[int]) -> DTensor:
    made = DTensor(local, layout, shape)
    made._lost_view_of = base._lost_view_of
    return made


def _split(fused: _Sections, shapes: Any, dim: int = 0, **_: Any) -> Run | None:
    parts = (
        fused.parts([shape[fused.dim] for shape in shapes])
        if fused.is_along(dim)
        else None
    )
    if parts is None:
        return None
    split, sizes = platform.operator("split_with_sizes"), [size for *_, size in parts]

    def run(tensors: list[DTensor], args: Any, kwargs: Any) -> Any:  # noqa: ARG001 - as every other way
        (tensor,) = tensors
        pairs = zip(split(tensor._local, sizes, fused.dim), parts, strict=True)
        return tuple(
            _viewed(tensor, local, layout, shape) for local, (layout, shape, _) in pairs
        )

    return run


def _narrow(
    fused: _Sections,
    shape: Any,  # noqa: ARG001 - as others
    dim: int,
    start: int,
    length: int,
    **_: Any,
) -> Run | None:
    if not fused.is_along(dim):
        return None
    return _narrow_to(
        fused, start + fused.shape[fused.dim] if start < 0 else start, length
    )


def _narrow_to(
    fused: _Sections, start: int, length: int, rest: Any = None
) -> Run | None:
    """From ``start`` along the dim; ``rest``: an index of the other dims."""
    parts = fused.parts([start, length, fused.shape[fused.dim] - start - length])
    if parts is None:
        return None
    (*_, begin), (layout, shape, size), _ = parts
    own = (ALL,) * fused.dim + (slice(begin, begin + size),)

    def run(tensors: list[DTensor], args: Any, kwargs: Any) -> Any:  # noqa: ARG001 - as every other way
        taken = _viewed(tensors[0], tensors[0]._local[own], layout, shape)
        return taken if rest is None else taken[rest]

    return run


def _getitem(fused: _Sections, shape: Any, index: Any, **_: Any) -> Run | None:  # noqa: ARG001 - as others
    items = spread(index, len(fused.shape))
    at = [i for i, item in enumerate(items) if item is not None][fused.dim]
    if not isinstance(items[at], slice):
        return None
    start, stop, step = items[at].indices(fused.shape[fused.dim])
    if step != 1 or (start, stop) == (0, fused.shape[fused.dim]):
        return None
    items[at] = ALL
    rest = None if all(item == ALL for item in items) else tuple(items)
    return _narrow_to(fused, start, max(0, stop - start), rest)


def _view(fused: _Sections, shape: Any, **_: Any) -> Run | None:
    return _reshaped(fused, shape, "view")


def _reshape(fused: _Sections, shape: Any, **_: Any) -> Run | None:
    return _reshaped(fused, shape, "reshape")


def _reshaped(fused: _Sections, shape: tuple[int, ...], way: str) -> Run | None:
    """The dim becomes several and nothing else; what happens to other dims comes after."""
    sizes = _sizes_for(fused.dim, fused.shape, shape)
    found = fused.unflattened(sizes) if len(sizes) > 1 else None
    if found is None:
        return None
    layout, first = found
    local = layout.local_shape(first)[fused.dim : fused.dim + len(sizes)]

    def run(tensors: list[DTensor], args: Any, kwargs: Any) -> Any:  # noqa: ARG001 - as every other way
        made = _viewed(
            tensors[0], tensors[0]._local.unflatten(fused.dim, local), layout, first
        )
        return made if first == shape else getattr(made, way)(shape)

    return run


def _sizes_for(dim: int, old: Sequence[int], new: Sequence[int]) -> Sequence[int]:
    """The dims of a new shape that are those of one dim of the old; none where they are not by themselves."""
    if not math.prod(old) == math.prod(new) > 0:
        return ()
    before = list(itertools.accumulate(new, lambda a, b: a * b, initial=1))
    start, stop = math.prod(old[:dim]), math.prod(old[: dim + 1])
    if start not in before or stop not in before:
        return ()
    first = len(before) - 1 - before[::-1].index(start)  # dims of one are no part of it
    return new[first : before.index(stop)]


_VIEWS: dict[str, Callable[..., Run | None]] = {
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), _split),
    **dict.fromkeys(("view", "unflatten"), _view),
    "reshape": _reshape,
    "narrow": _narrow,
    "getitem": _getitem,
}
