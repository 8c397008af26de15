# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002 - operands have the names that torch gives them
"""x[...] and x[...] = value.

x[:, 2, 1:5, None] of four dims      "d0 d1! d2! d3 -> d0 o2! n3! d3"      a dim that is taken whole may be cut

An assignment leaves the target where it lies: every rank writes what is its own. Tensors among the indices read a
table; one along a dim that is cut is a lookup, several need their dims whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.dtensor.routes import adopt_after_inplace, local_for
from hyper_parallel.core.shard.arguments import one_mesh, refuse_copy, replicated
from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.ops.pointwise import is_inexact
from hyper_parallel.core.shard.ops.scatters import is_mask, put, put_at_, with_indices
from hyper_parallel.core.shard.ops.slices import (
    Range,
    is_small_part,
    ranges_of,
    take_small_part,
)
from hyper_parallel.core.shard.ops.staged_reductions import is_cut
from hyper_parallel.core.shard.ops.views import moved
from hyper_parallel.core.shard.rule import Rule
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import REDUCE_OPS

platform = get_platform()

ALL = slice(None)

# --- what an index says


def spread(index: Any, ndim: int) -> list[Any]:
    """One item for every dim, and those that make new dims: an ellipsis is written out, what is missing is all."""
    items = list(index) if isinstance(index, tuple) else [index]
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    used = sum(_dims_of(item) for item in items)
    if used > ndim:
        raise IndexError(f"too many indices: {used} for a tensor with {ndim} dims")
    if len(dots) > 1:
        raise IndexError("an index can have one ellipsis ('...')")
    at = dots[0] if dots else len(items)
    return items[:at] + [ALL] * (ndim - used) + items[at + len(dots) :]


def _dims_of(item: Any) -> int:
    """How many dims an item is for."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return len(item.shape) if is_mask(item) else 1


def _is_basic(item: Any) -> bool:
    """Whether an item only moves elements, and says so by itself."""
    if isinstance(item, slice):
        return not any(
            isinstance(part, DTensor) for part in (item.start, item.stop, item.step)
        )
    return item is None or (
        hasattr(item, "__index__")
        and not isinstance(item, (bool, DTensor, platform.Tensor))
    )


def _is_known(item: Any) -> bool:
    """Whether an item is one that the rules here can take, of which the shape does not depend on the data."""
    if isinstance(item, list):
        return all(isinstance(one, int) and not isinstance(one, bool) for one in item)
    is_rows = (
        isinstance(item, DTensor) and not is_mask(item) and not is_inexact(item.dtype)
    )
    return _is_basic(item) or isinstance(item, slice) or is_rows


def _settled(item: Any, input: Any) -> Any:
    """Tensors without dims as ints, lists as tensors."""
    if isinstance(item, slice):
        return slice(
            *(
                int(part) if isinstance(part, DTensor) else part
                for part in (item.start, item.stop, item.step)
            )
        )
    if isinstance(item, DTensor) and not item.shape:
        return int(item)
    if isinstance(item, list):
        return replicated(
            platform.tensor(
                item, dtype=platform.str_to_dtype("int64"), device=input.device
            ),
            input,
        )
    return item


# --- reading


def _getitem(input: Any, index: Any) -> Any:
    items = spread(index, len(input.shape))
    if all(map(_is_basic, items)):
        if is_small_part(input, items):
            return _take_small_part
        return _basic_rule(tuple(input.shape), items)
    return _read if all(map(_is_known, items)) else None


def _take_small_part(input: Any, index: Any) -> Any:
    return take_small_part(input, spread(index, len(input.shape)))


def _basic_rule(shape: Sequence[int], items: Sequence[Any]) -> RuleForCall:
    left: list[str] = []
    right: list[str] = []
    sizes: dict[str, int] = {}
    for number, item in enumerate(items):
        dim = len(left)
        if item is None:
            right.append(f"n{number}!")
            sizes[f"n{number}"] = 1
        elif not isinstance(item, slice):
            left.append(f"d{dim}!")
        elif _is_all(item, shape[dim]):
            left.append(f"d{dim}")
            right.append(f"d{dim}")
        else:
            left.append(f"d{dim}!")
            right.append(f"o{dim}!")
            sizes[f"o{dim}"] = len(range(*item.indices(shape[dim])))
    return moved(left, right, **sizes)


def _is_all(item: Any, size: int) -> bool:
    return isinstance(item, slice) and item.indices(size) == (0, size, 1)


def _read(input: Any, index: Any) -> Any:
    """What is basic first, as torch does it, then the tensors."""
    items = [_settled(item, input) for item in spread(index, len(input.shape))]
    taken = input[tuple(ALL if isinstance(item, DTensor) else item for item in items)]
    left = [
        item for item in items if item is None or isinstance(item, (slice, DTensor))
    ]  # an int takes its dim away
    at = {dim: item for dim, item in enumerate(left) if isinstance(item, DTensor)}
    if not at:
        return taken
    if len(at) == 1:
        ((dim, rows),) = at.items()
        if taken._layout.dim_axes[dim]:
            return _looked_up(taken, dim, rows)
    return DTensor.dispatch(index_at, (taken, tuple(at), list(at.values())), {})


def _looked_up(input: Any, dim: int, index: Any) -> Any:
    """One tensor along a dim that is cut: nobody needs more than its own rows."""
    size = input.shape[dim]
    rows = platform.operator("where")(index < 0, index + size, index)
    if len(index.shape) == 1:
        return input.index_select(dim, rows)
    return platform.operator("unflatten")(
        input.index_select(dim, rows.reshape(-1)), dim, tuple(index.shape)
    )


def index_at(input: Any, dims: Sequence[int], indices: Sequence[Any]) -> Any:
    """The elements at these indices along these dims."""
    at = dict(zip(dims, indices, strict=True))
    return input[tuple(at.get(i, ALL) for i in range(len(input.shape)))]


def _index_at(input: Any, dims: Sequence[int], indices: Sequence[Any]) -> RuleForCall:
    left = [f"d{i}{'!' if i in dims else ''}" for i in range(len(input.shape))]
    right = with_indices(left, dims, ["..."])
    text = f"{' '.join(left)}, {', '.join(['...'] * len(indices))} -> {' '.join(right)}"
    return RuleForCall(
        Rule(text, linear=((0,),), carries=REDUCE_OPS), operands=[input, *indices]
    )


operator("getitem", "input, index", _getitem, view=True)
operator("index_at", "input, dims, indices", _index_at)

# --- writing


def _setitem(input: Any, index: Any, value: Any) -> None:
    refuse_copy("setitem", input)
    value = _as_value(value, input)
    items = spread(index, len(input.shape))
    if not all(map(_is_known, items)):
        _assign_by_masks(input, items, value)
        return
    items = [_settled(item, input) for item in items]
    assign = (
        _assign_by_tensors
        if any(isinstance(item, DTensor) for item in items)
        else _assign
    )
    assign(input, items, value)


def _as_value(value: Any, input: Any) -> Any:
    """A number or a distributed tensor."""
    if isinstance(value, DTensor):
        one_mesh("setitem", [input, value])
    elif not isinstance(value, (bool, int, float, complex)):
        raise TypeError(
            f"can't assign a {type(value).__name__} to a distributed tensor"
        )
    return value


def _filled(value: Any, input: Any) -> Any:
    """A number as a tensor."""
    if isinstance(value, DTensor):
        return value
    return replicated(
        platform.full((), value, dtype=input.dtype, device=input.device), input
    )


def _assign(input: Any, items: Sequence[Any], value: Any) -> None:
    """Every rank writes what is its own; nothing of the target is communicated."""
    shape = tuple(input.shape)
    ranges = ranges_of(shape, [item for item in items if item is not None])
    spans = input._layout.shard_of(shape)
    pieces = [chosen.within(*span) for chosen, span in zip(ranges, spans, strict=True)]
    own = tuple(piece for piece, _ in pieces)
    if not isinstance(value, DTensor) and not input._layout.is_partial():
        adopt_after_inplace(input, platform.assign(input._local, own, value))
        return
    value = _stretched(_filled(value, input), _region(items, ranges), input)
    value = value.reshape([chosen.length for chosen in ranges])
    layout, summed = _layout_of_value(input, ranges)
    given = local_for(value, layout, summed)
    parts = [
        ALL if cut else part
        for cut, (_, part) in zip(layout.dim_axes, pieces, strict=True)
    ]
    # A rank that has nothing of it writes nothing, but stays in the graph for the sum of the gradient.
    part = platform.operator("getitem")(given, tuple(parts))
    adopt_after_inplace(input, platform.assign(input._local, own, part))


def _region(items: Sequence[Any], ranges: Sequence[Range]) -> list[int]:
    """The shape of what is written to, as reading it would give."""
    following = iter(ranges)
    sizes = [(item, 1 if item is None else next(following).length) for item in items]
    return [size for item, size in sizes if item is None or isinstance(item, slice)]


def _stretched(value: Any, region: Sequence[int], input: Any) -> Any:
    """The value in the shape of what it is written to, and without a sum that its cast would not let pass."""
    while len(value.shape) > len(region) and value.shape[0] == 1:
        value = value.squeeze(0)
    if not is_inexact(value.dtype) or not is_inexact(input.dtype):
        value = value.reduce_partial()
    return value if tuple(value.shape) == tuple(region) else value.expand(list(region))


def _layout_of_value(
    input: Any, ranges: Sequence[Range]
) -> tuple[Layout, tuple[int, ...]]:
    """How the value lies: as the target along dims that are written whole; along others every rank takes its part."""
    whole = [
        chosen.is_all(size) for chosen, size in zip(ranges, input.shape, strict=True)
    ]
    placements: list[Placement] = []
    summed = []
    for axis, placement in enumerate(input._layout.placements):
        kept = not isinstance(placement, Shard) or whole[placement.dim]
        placements.append(placement if kept else Replicate())
        if not kept:
            summed.append(axis)
    return input._layout.with_placements(placements), tuple(summed)


def _assign_by_tensors(input: Any, items: Sequence[Any], value: Any) -> None:
    """What is basic is read, changed and written; without any, and with the indexed dims whole, it is done in place.

    Not where a rank has nothing to change: its part of the graph would be another than that of the others.
    """
    value = _filled(value, input).to(input.dtype)
    basic = tuple(ALL if isinstance(item, DTensor) else item for item in items)
    left = [
        item for item in items if item is None or isinstance(item, (slice, DTensor))
    ]
    at = {dim: item for dim, item in enumerate(left) if isinstance(item, DTensor)}
    if any(item != ALL for item in basic):
        _setitem(input, basic, put(input[basic], tuple(at), list(at.values()), value))
    elif (
        input._layout.is_partial()
        or is_cut(input, tuple(at))
        or input._layout.is_empty_somewhere(input.shape)
    ):
        input.copy_(put(input, tuple(at), list(at.values()), value))
    else:
        DTensor.dispatch(put_at_, (input, tuple(at), list(at.values()), value), {})


def _assign_by_masks(input: Any, items: Sequence[Any], value: Any) -> None:
    masks = [(i, item) for i, item in enumerate(items) if isinstance(item, DTensor)]
    others = [item for item in items if not isinstance(item, DTensor)]
    single = not isinstance(value, DTensor) or not value.shape
    if (
        single
        and len(masks) == 1
        and others == [ALL] * len(others)
        and is_mask(masks[0][1])
    ):
        ((before, mask),) = masks
        shape, after = tuple(mask.shape), len(others) - before
        indexed = tuple(input.shape)[before : before + len(shape)]
        if indexed != shape:  # masked_fill would stretch it
            raise IndexError(
                f"the shape of the mask, {shape}, is not that of the indexed dims, {indexed}"
            )
        input.masked_fill_(
            mask.bool().reshape((1,) * before + shape + (1,) * after), value
        )
    else:
        input.copy_(DTensor.dispatch(assigned, (input, tuple(items), value), {}))


def assigned(input: Any, index: Any, value: Any) -> Any:
    """The tensor with a value at an index."""
    result = platform.operator("clone")(input)
    result[index] = value
    return result


operator("setitem", "input, index, value", handler=_setitem)
