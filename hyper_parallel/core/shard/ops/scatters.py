# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002 - operands have the names that torch gives them
"""Operators that write by index: what they write along may be cut, and every rank writes what is its own.

index_add     "+... {dim=v}, j, ... {dim=j} -> ... {dim=v}"          a cut source is summed
index_copy    "... {dim=v}, j!, ... {dim=j}! -> ... {dim=v}"         what is written last counts
scatter       "v d1, b0! d1, c0! d1 -> v d1"                         along dim 0
put_at        "d0 d1, k! , k! d1 -> d0 d1"                           x[k] = values

A rank gives its piece a spare row, has all that is for others written there, and drops it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.ops.pointwise import is_zero
from hyper_parallel.core.shard.ops.staged_reductions import is_cut
from hyper_parallel.core.shard.ops.views import positions
from hyper_parallel.core.shard.rule import Rule, move
from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform

platform = get_platform()
call = platform.operator

ALL = slice(None)
LONG = platform.str_to_dtype("int64")


def is_mask(item: Any) -> bool:
    """Whether an index is a mask: it is for as many dims as it has."""
    return isinstance(item, DTensor) and item.dtype in (
        platform.str_to_dtype("bool"),
        platform.str_to_dtype("uint8"),
    )


def _with_spare(
    here: ShardContext, factor: str, table: Any, dim: int, index: Any, from_end: bool
) -> tuple[Any, Any, Any]:
    """The piece with a spare row along a dim, the rows to write to, and whether they are this rank's.

    ``from_end``: an index below zero counts from the end; else it is an error, as one that is too large.
    """
    start, size, whole = here.offset(factor), here.size(factor), here.whole(factor)
    where = call("where")
    if from_end:
        index = where(index < 0, index + whole, index)
    mine = (index >= start) & (index < start + size)
    # A row that nobody has is beyond the spare one, so that it is an error here as it is on one device.
    rows = where(
        mine, index - start, where((index >= 0) & (index < whole), size, size + 1)
    )
    shape = [1 if i == dim else n for i, n in enumerate(table.shape)]
    spare = platform.zeros(shape, dtype=table.dtype, device=table.device)
    return platform.cat([table, spare], dim), rows, mine


# --- along one dim

SOURCES = ("source", "src", "value")  # what the operators call what they write


def write_rows(
    input: Any, dim: int, index: Any, source: Any, name: str, more: Sequence[Any]
) -> Any:
    """The operator of this name, with the further arguments as pairs."""
    return call(name)(input, dim, index, source, **dict(more))


def _by_owners(name: str) -> Callable[..., Any]:
    """The operator where the dim that is written along is cut."""

    def handler(input: Any, dim: int, index: Any, **more: Any) -> Any:
        (at,) = positions(dim, len(input.shape))
        options = tuple(
            (key, value)
            for key, value in more.items()
            if key not in SOURCES and value is not None
        )
        return DTensor.dispatch(
            write_rows, (input, at, index, _source(more), name, options), {}
        )

    return handler


def _source(arguments: dict[str, Any]) -> Any:
    return next(
        (arguments[key] for key in SOURCES if arguments.get(key) is not None), None
    )


def _rows(
    input: Any, dim: int, index: Any, source: Any, name: str, more: Sequence[Any]
) -> Any:
    return _WRITES[name](input, dim, index, source, "", dict(more).get("reduce"))


def _rows_of_shard(
    here: ShardContext,
    input: Any,
    dim: int,
    index: Any,
    source: Any,
    name: str,
    more: Sequence[Any],
) -> Any:
    if not here.is_cut("v"):
        return write_rows(input, dim, index, source, name, more)
    table, rows, mine = _with_spare(
        here, "v", input, dim, index, from_end=name == "index_fill"
    )
    if name != "index_fill" and platform.is_tensor(source):
        # What many write to the spare row may overflow, and zero times that is no gradient.
        if len(mine.shape) == 1:
            mine = mine.reshape(
                [-1 if i == dim else 1 for i in range(len(input.shape))]
            )
        else:
            source = source[
                tuple(slice(n) for n in mine.shape)
            ]  # no more of it is read
        source = source.masked_fill(~mine, 1)
    return platform.operator("narrow")(
        write_rows(table, dim, rows, source, name, more), dim, 0, here.size("v")
    )


operator(
    "write_rows", "input, dim, index, source, name, more", _rows, local=_rows_of_shard
)


def _indexed(text: str, *linear: tuple[int, ...]) -> Callable[..., RuleForCall]:
    """The rule of an operator whose index has one dim; ``V`` is the dim of the target, cut or whole."""

    def rule(
        input: Any, dim: int, index: Any, source: Any, mark: str, _: Any
    ) -> RuleForCall:
        groups = ((0,),) if is_zero(source) else linear
        found = Rule(
            text.replace("V", "{dim=v}" + mark), linear=groups, broadcast="none"
        )
        return RuleForCall(found, {"dim": dim}, [input, index, source])

    return rule


def _scattered(
    input: Any, dim: int, index: Any, source: Any, mark: str, reduce: str | None
) -> RuleForCall:
    """Dims in which all have the same size may be cut."""
    (at,) = positions(dim, len(input.shape))
    tensors = [input, index, *([source] if isinstance(source, DTensor) else [])]
    alike = [len({t.shape[i] for t in tensors}) == 1 for i in range(len(input.shape))]

    def name(number: int, i: int) -> str:
        if i == at:
            return f"v{mark}" if number == 0 else f"{'abc'[number]}{i}!"
        return f"d{i}" if alike[i] else f"{'abc'[number]}{i}!"

    texts = [
        " ".join(name(number, i) for i in range(len(input.shape)))
        for number in range(len(tensors))
    ]
    linear = ((0, 2),) if len(tensors) == 3 and reduce is None else ()
    return RuleForCall(
        Rule(f"{', '.join(texts)} -> {texts[0]}", linear=linear, broadcast="none"),
        operands=tensors,
    )


def _summed(
    input: Any, dim: int, index: Any, source: Any, mark: str, reduce: str | None
) -> RuleForCall:
    """A source that is cut along the dim is summed."""
    ruled = _scattered(input, dim, index, source, mark, reduce)
    (at,) = positions(dim, len(input.shape))
    if index.shape[at] != source.shape[at]:
        return ruled
    text = "+" + ruled.rule.text.replace(f"b{at}!", "j").replace(f"c{at}!", "j")
    return RuleForCall(
        Rule(text, linear=((2,),), broadcast="none"), operands=ruled.operands
    )


_WRITES: dict[str, Callable[..., RuleForCall]] = {
    "index_add": _indexed("+... V, j, ... {dim=j} -> ... V", (2,)),
    "index_copy": _indexed("... V, j!, ... {dim=j}! -> ... V", (0, 2)),
    "index_fill": _indexed("... V, j!, -> ... V", (0, 2)),
    "index_reduce": _indexed("... V, j!, ... {dim=j}! -> ... V"),
    "scatter": _scattered,
    "scatter_add": _summed,
    "scatter_reduce": _scattered,
}


def _writes(name: str) -> Callable[..., Any]:
    def rule(input: Any, dim: int, index: Any, **more: Any) -> Any:
        if not input.shape or not index.shape:
            return _of_one(name)
        if name.startswith("scatter") and len(index.shape) != len(input.shape):
            return None
        if is_cut(input, positions(dim, len(input.shape))):
            return _by_owners(name)
        return _WRITES[name](input, dim, index, _source(more), "!", more.get("reduce"))

    return rule


def _of_one(name: str) -> Callable[..., Any]:
    """A tensor or an index without dims, as one with a dim of size one."""

    def handler(input: Any, dim: int, index: Any, **more: Any) -> Any:
        more = {key: value for key, value in more.items() if value is not None}
        if isinstance(more.get("src"), (bool, int, float)):
            more["value"] = more.pop(
                "src"
            )  # a number has another name, but may stand in its place
        for key in ("source", "src"):
            if isinstance(more.get(key), DTensor):
                like = input.shape or (1,)
                more[key] = more[key].reshape(
                    [1 if i == dim % len(like) else n for i, n in enumerate(like)]
                )
        target = input if input.shape else input.reshape(1)
        return call(name)(target, dim, index.reshape(-1), **more).reshape(
            tuple(input.shape)
        )

    return handler


for _name, _parameters in {
    "index_add": "source, *, alpha=1",
    "index_copy": "source",
    "index_fill": "value",
    "index_reduce": "source, reduce, *, include_self=True",
    "scatter": "src=None, *, value=None, reduce=None",
    "scatter_add": "src",
    "scatter_reduce": "src, reduce, *, include_self=True",
}.items():
    operator(_name, f"input, dim, index, {_parameters}", _writes(_name))
operator(
    "select_scatter", "input, src, dim, index", move("... {dim}!, ... -> ... {dim}!")
)
operator(
    "slice_scatter",
    "input, src, dim=0, start=None, end=None, step=1",
    move("... {dim}!, ... {dim=part}! -> ... {dim}!"),
)

# --- along several dims


def put(
    input: Any,
    dims: Sequence[int],
    indices: Sequence[Any],
    values: Any,
    accumulate: bool = False,
) -> Any:
    """The tensor with values at these indices along these dims; ``accumulate``, of the first dims: added there."""
    function = put_own if is_cut(input, tuple(dims)) else put_at
    return DTensor.dispatch(
        function, (input, tuple(dims), list(indices), values, accumulate), {}
    )


def put_at_(
    input: Any,
    dims: Sequence[int],
    indices: Sequence[Any],
    values: Any,
    accumulate: bool = False,
) -> Any:
    """As ``put``, in place."""
    if accumulate:
        return input.index_put_(tuple(indices), values, True)
    at = dict(zip(dims, indices, strict=True))
    input[tuple(at.get(i, ALL) for i in range(len(input.shape)))] = values
    return input


def put_at(
    input: Any,
    dims: Sequence[int],
    indices: Sequence[Any],
    values: Any,
    accumulate: bool = False,
) -> Any:
    """As ``put``, of tensors whose indexed dims are whole."""
    if accumulate:
        return call("index_put")(input, tuple(indices), values, True)
    return put_at_(call("clone")(input), dims, indices, values)


def put_own(
    input: Any,
    dims: Sequence[int],
    indices: Sequence[Any],
    values: Any,
    accumulate: bool = False,
) -> Any:
    """As ``put``, of tensors whose indexed dims are cut."""
    return put_at(input, dims, indices, values, accumulate)


def _put(
    input: Any, dims: Sequence[int], indices: Sequence[Any], values: Any, mark: str
) -> RuleForCall:
    """All that the indices have is whole; the dims that they are not for are cut alike in the values."""
    names = [f"d{i}{mark if i in dims else ''}" for i in range(len(input.shape))]
    of_indices = [
        " ".join(f"k{n}x{i}!" for i in range(len(item.shape)))
        for n, item in enumerate(indices)
    ]
    region = with_indices(names, dims, [""] * max(len(item.shape) for item in indices))
    of_values: list[str] = []
    for i, size in enumerate(reversed(values.shape)):
        name = region[-1 - i] if i < len(region) else ""
        of_values.insert(
            0, name if name and size == input.shape[int(name[1:])] else f"w{i}!"
        )
    text = f"{', '.join([' '.join(names), *of_indices, ' '.join(of_values)])} -> {' '.join(names)}"
    rule = Rule(text, linear=((0, 1 + len(indices)),), broadcast="none")
    return RuleForCall(rule, operands=[input, *indices, values])


def with_indices(
    dims: Sequence[str], at: Sequence[int], put: Sequence[str]
) -> list[str]:
    """The dims of what is read: those of the indices are where the first was if they follow each other, else first."""
    kept = [name for i, name in enumerate(dims) if i not in at]
    follow = list(at) == list(range(at[0], at[0] + len(at)))
    start = at[0] if follow else 0
    return [*kept[:start], *put, *kept[start:]]


def _put_whole(
    input: Any, dims: Sequence[int], indices: Sequence[Any], values: Any, **_: Any
) -> RuleForCall:
    return _put(input, dims, indices, values, "!")


def _put_cut(
    input: Any, dims: Sequence[int], indices: Sequence[Any], values: Any, **_: Any
) -> RuleForCall:
    return _put(input, dims, indices, values, "")


def _put_of_shard(
    here: ShardContext,
    input: Any,
    dims: Sequence[int],
    indices: Sequence[Any],
    values: Any,
    accumulate: bool,
) -> Any:
    cut = [dim for dim in dims if here.is_cut(f"d{dim}")]
    piece, rows = input, dict(zip(dims, indices, strict=True))
    for dim in cut:
        piece, rows[dim], _ = _with_spare(
            here, f"d{dim}", piece, dim, rows[dim], from_end=True
        )
    found = put_at(piece, dims, list(rows.values()), values, accumulate)
    for dim in cut:
        found = platform.operator("narrow")(found, dim, 0, here.size(f"d{dim}"))
    return found


def _index_put(
    input: Any, indices: Sequence[Any], values: Any, accumulate: bool
) -> Any:
    if (
        len(indices) == 1
        and is_mask(indices[0])
        and not accumulate
        and not values.shape
    ):
        return _fill_where
    if (
        not indices
        or any(map(is_mask, indices))
        or any(item is None for item in indices)
    ):
        return None
    dims = range(len(indices))
    return (
        _index_put_own
        if is_cut(input, tuple(dims))
        else _put_whole(input, dims, indices, values)
    )


def _index_put_own(
    input: Any, indices: Sequence[Any], values: Any, accumulate: bool
) -> Any:
    return put(input, range(len(indices)), indices, values, accumulate)


def _fill_where(input: Any, indices: Sequence[Any], values: Any, **_: Any) -> Any:
    (mask,) = indices
    shape = tuple(mask.shape) + (1,) * (len(input.shape) - len(mask.shape))
    return input.masked_fill(mask.bool().reshape(shape), values)


def _put_flat(input: Any, index: Any, source: Any, accumulate: bool) -> Any:
    rows = index.reshape(-1)
    return call("index_put")(
        input.reshape(-1), (rows,), source.reshape(-1), accumulate
    ).reshape(tuple(input.shape))


operator("put_at", "input, dims, indices, values, accumulate=False", _put_whole)
operator(
    "put_own",
    "input, dims, indices, values, accumulate=False",
    _put_cut,
    local=_put_of_shard,
)
operator("index_put", "input, indices, values, accumulate=False", _index_put)
operator("put", "input, index, source, accumulate=False", handler=_put_flat)

# --- where a mask says


def _masked_scatter(source: Any, **_: Any) -> Any:
    return None if 0 in source.shape else _take_in_turn


def _take_in_turn(input: Any, mask: Any, source: Any) -> Any:
    """Each true element takes the next of the source: how many there are before it tells which."""
    shape = tuple(np.broadcast_shapes(tuple(input.shape), tuple(mask.shape)))
    mask = mask.expand(shape)
    order = mask.reshape(-1).to(LONG).cumsum(0) - 1
    rows = order.masked_fill(~mask.reshape(-1), 0)
    return call("where")(
        mask, source.reshape(-1).index_select(0, rows).reshape(shape), input
    )


operator("masked_scatter", "input, mask, source", _masked_scatter)


def _if_all(handler: Callable[..., Any]) -> Callable[..., Any]:
    return lambda indices, **_: (
        None if any(item is None for item in indices) else handler
    )


def _clamped(input: Any, indices: Sequence[Any]) -> tuple[Any, ...]:
    """Indices that a mask takes out may be any."""
    pairs = zip(indices, input.shape, strict=False)
    return tuple(call("clamp")(index, -size, size - 1) for index, size in pairs)


def _masked_index(input: Any, mask: Any, indices: Sequence[Any], fill: Any) -> Any:
    return input[_clamped(input, indices)].masked_fill(~mask, fill)


def _masked_put(input: Any, mask: Any, indices: Sequence[Any], values: Any) -> Any:
    return call("index_put")(
        input, _clamped(input, indices), values.masked_fill(~mask, 0), True
    )


operator("_unsafe_masked_index", "input, mask, indices, fill", _if_all(_masked_index))
operator(
    "_unsafe_masked_index_put_accumulate",
    "input, mask, indices, values",
    _if_all(_masked_put),
)
