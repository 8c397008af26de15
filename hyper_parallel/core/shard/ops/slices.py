# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002 - operands have the names that torch gives them
"""A small part of a tensor along a dim that is cut: every rank gives what it has of it, in one all-reduce.

x[3], x[:, :2]      the part on every rank, and in backward every rank takes the gradient of its own elements

A part that is not small goes the way of the rule: its dim is gathered and another is cut.
"""

from __future__ import annotations

import math
import operator as python
from collections.abc import Sequence
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.modes import MODES
from hyper_parallel.core.dtensor.placement_types import Partial, Replicate, Shard
from hyper_parallel.core.shard.arguments import check_explicit
from hyper_parallel.platform import get_platform

platform = get_platform()
call = platform.operator

ALL = slice(None)
SUMMED = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "int32",
    "int64",
)  # that every backend adds up, exactly


class Range(NamedTuple):
    """Some indices of a dim: ``length`` from ``start`` by ``step``."""

    start: int
    length: int
    step: int

    def within(self, offset: int, size: int) -> tuple[slice, slice]:
        """Which elements of a piece are among them, and which of them those are."""
        first = max(0, -(-(offset - self.start) // self.step))
        past = max(
            first, min(self.length, -(-(offset + size - self.start) // self.step))
        )
        if past == first:
            return slice(0, 0), slice(0, 0)
        begin = self.start + first * self.step - offset
        return slice(
            begin, begin + (past - first - 1) * self.step + 1, self.step
        ), slice(first, past)

    def is_all(self, size: int) -> bool:
        """Whether they are all of a dim of that size."""
        return self == Range(0, size, 1)


def ranges_of(shape: Sequence[int], items: Sequence[Any]) -> list[Range]:
    """The indices that ints and slices take of each dim."""
    found = []
    for size, item in zip(shape, items, strict=True):
        if isinstance(item, slice):
            start, stop, step = item.indices(size)
            if step <= 0:
                raise ValueError("step must be greater than zero")
            found.append(Range(start, len(range(start, stop, step)), step))
            continue
        at = python.index(item)
        if not -size <= at < size:
            raise IndexError(f"index {at} is out of bounds for a dim of size {size}")
        found.append(Range(at % size, 1, 1))
    return found


def is_small_part(input: Any, items: Sequence[Any]) -> bool:
    """Whether these ints, slices and Nones take so little along cut dims that an all-reduce moves no more bytes."""
    layout, shape = input.layout, tuple(input.shape)
    name = str(input.dtype).rpartition(".")[2].lower()
    plain = all(isinstance(p, Replicate) or type(p) is Shard for p in layout.placements)
    if name not in SUMMED or not plain:
        return False
    chosen = _parts(shape, items)
    if not any(
        one is not None and layout.dim_axes[dim] for dim, one in enumerate(chosen)
    ):
        return False
    held = layout.local_shape(shape, (0,) * layout.mesh.ndim)
    taken = [
        size if one is None else one.length
        for size, one in zip(held, chosen, strict=True)
    ]
    return bool(0 < 2 * math.prod(taken) <= math.prod(held))


def take_small_part(input: Any, items: Sequence[Any]) -> DTensor:
    """``input[items]`` on every rank along the axes that cut the dims of which a part is taken."""
    layout, shape = input.layout, tuple(input.shape)
    chosen = _parts(shape, items)
    axes = {
        axis
        for dim, one in enumerate(chosen)
        if one is not None
        for axis in layout.dim_axes[dim]
    }
    if MODES.explicit:
        check_explicit("getitem", input, 0, _with(layout, axes, Replicate()))
    spans = layout.shard_of(shape)
    part = platform.call_where_empty(_own_part, (input._local, chosen, spans), {})
    sizes = [
        size if one is None else one.length
        for size, one in zip(shape, chosen, strict=True)
    ]
    summed = DTensor(part, _with(layout, axes, Partial()), sizes)
    found = DTensor.redistribute(summed, None, _with(layout, axes, Replicate()))
    # Ints take their dims away and None makes new ones, which touches no dim that is cut.
    left = tuple(
        item if item is None else ALL if isinstance(item, slice) else 0
        for item in items
    )
    found = found if all(item == ALL for item in left) else found[left]
    found._lost_view_of = "getitem"
    return found


def _parts(shape: Sequence[int], items: Sequence[Any]) -> list[Range | None]:
    """The indices that are taken of every dim; None where it is all of it."""
    chosen = ranges_of(shape, [item for item in items if item is not None])
    return [
        None if one.is_all(size) else one
        for one, size in zip(chosen, shape, strict=True)
    ]


def _with(layout: Layout, axes: set[int], placement: Any) -> Layout:
    placements = enumerate(layout.placements)
    return layout.with_placements(
        [placement if axis in axes else p for axis, p in placements]
    )


def _own_part(
    shard: Any, chosen: Sequence[Range | None], spans: Sequence[tuple[int, int]]
) -> Any:
    """What this rank has of the part, and minus zero for what it has not: added, that changes nothing, not even -0."""
    if (
        len(shard.shape) == 1
    ):  # of one dim and without elements, torch.cat would drop it from the graph
        return _own_part(
            call("unsqueeze")(shard, 0), [None, *chosen], [(0, 1), *spans]
        )[0]
    for dim, (one, (offset, size)) in enumerate(zip(chosen, spans, strict=True)):
        if one is None:
            continue
        piece, taken = one.within(offset, size)
        own = call("getitem")(shard, (*(ALL,) * dim, piece))
        before, after = (
            _nothing(shard, dim, taken.start),
            _nothing(shard, dim, one.length - taken.stop),
        )
        shard = platform.cat([before, own, after], dim)
    return shard


def _nothing(like: Any, dim: int, count: int) -> Any:
    shape = [count if at == dim else size for at, size in enumerate(like.shape)]
    zero = -0.0 if platform.is_floating_point(like) else 0
    return platform.full(shape, zero, dtype=like.dtype, device=like.device)
