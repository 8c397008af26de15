# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002, A006 - operands have the names that torch gives them
"""The same elements in another shape, order or part: no element is computed, so any Partial passes.

view(2, 3, 8) of (6, 8)      "(a b) c -> a b c"      only the outermost of merged dims may be cut
view(8, 6) of (4, 12)        "(a b) c -> (a d) e"    of what two groups share, the outermost factor

What a shard must become is its piece of the result, so the local calls ask for that shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.arguments import OperatorError
from hyper_parallel.core.shard.ops.aliasing import contiguous_shard, reshape_shard
from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.ops.slices import is_small_part, take_small_part
from hyper_parallel.core.shard.rule import Rule, move
from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import REDUCE_OPS

platform = get_platform()

Shape = Sequence[int]


def moved(left: Sequence[str], right: Sequence[str], **sizes: int) -> RuleForCall:
    """The rule for one tensor whose dims are these factors before and after; a whole factor may come or go."""
    text = f"{' '.join(left)} -> {' '.join(right)}"
    return RuleForCall(
        Rule(text, linear=((0,),), carries=REDUCE_OPS, broadcast="none"), sizes
    )


def positions(dims: Any, ndim: int) -> tuple[int, ...]:
    """Dims counted from the front; an int is one of them, and a tensor without dims has a dim 0."""
    found = (dims,) if isinstance(dims, int) else tuple(dims)
    for dim in found:
        if not -max(ndim, 1) <= dim < max(ndim, 1):
            raise IndexError(f"dim {dim} is not a dim of a tensor with {ndim} dims")
    return tuple(dim % max(ndim, 1) for dim in found)


def ints(values: Any) -> tuple[int, ...]:
    """What was given as ints or as one sequence of them."""
    return (values,) if isinstance(values, int) else tuple(map(int, values))


# --- other shapes


def reshaped(old: Shape, new: Shape) -> RuleForCall:
    """The elements of a tensor of one shape, in the same order, in another shape."""
    if math.prod(old) != math.prod(new):
        raise RuntimeError(
            f"shape {list(new)} is invalid for a tensor of shape {list(old)}"
        )
    left: list[str] = []
    right: list[str] = []
    sizes: dict[str, int] = {}
    while len(left) < len(old) or len(right) < len(new):
        i, j = len(left), len(right)
        if i < len(old) and j < len(new) and old[i] == new[j]:
            left.append(f"d{i}")
            right.append(f"d{i}")
        elif j == len(new) or (i < len(old) and old[i] == 1):
            left.append(f"i{i}!")
        elif i == len(old) or new[j] == 1:
            right.append(f"o{j}!")
            sizes[f"o{j}"] = new[j]
        else:
            more_left, more_right = _match_group(old, i, new, j, sizes)
            left += more_left
            right += more_right
    return moved(left, right, **sizes)


def _match_group(
    old: Shape, i: int, new: Shape, j: int, sizes: dict[str, int]
) -> tuple[list[str], list[str]]:
    """The factors of the next dims on both sides that hold the same elements; adds their sizes."""
    before, after = _group(old[i:], new[j:])
    # Of nothing there may be different amounts on both sides; then they have nothing in common.
    is_same = math.prod(before) == math.prod(after) > 0
    shared = math.gcd(old[i], new[j]) if is_same else 1
    sizes[f"f{i}"] = shared
    inputs = [f"i{i + k}" for k in range(len(before))]
    outputs = [f"o{j + k}" for k in range(len(after))]
    left = _grouped(before, shared, f"f{i}", inputs, sizes)
    return left, _grouped(after, shared, f"f{i}", outputs, sizes)


def _group(old: Shape, new: Shape) -> tuple[Shape, Shape]:
    """The first dims of either shape that have as many elements; all, where there are none such."""
    i = j = 1
    while (before := math.prod(old[:i])) != (after := math.prod(new[:j])) and (
        i < len(old) or j < len(new)
    ):
        if i < len(old) and (before < after or j == len(new)):
            i += 1
        else:
            j += 1
    return old[:i], new[:j]


def _grouped(
    dims: Shape, shared: int, outer: str, names: Sequence[str], sizes: dict[str, int]
) -> list[str]:
    """The factors of a group's dims: the first has the shared factor outermost, the others cannot be cut."""
    sizes.update(zip(names, dims, strict=True))
    whole = [f"{name}!" for name in names]
    if shared == 1:
        return whole
    sizes[names[0]] = dims[0] // shared
    return [outer if dims[0] == shared else f"({outer} {names[0]})", *whole[1:]]


def resolved(shape: Any, count: int) -> tuple[int, ...]:
    """The shape with its -1, if there is one, taken from the number of elements."""
    sizes = ints(shape)
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and (sizes.count(-1) > 1 or not known or count % known):
        raise RuntimeError(
            f"shape {list(sizes)} is invalid for a tensor of {count} elements"
        )
    return tuple(count // known if size == -1 else size for size in sizes)


def _view(input: Any, shape: Any = (), dtype: Any = None) -> Any:
    if (asked := _dtype(shape, dtype)) is not None:
        return _reinterpreted(input, asked)
    return reshaped(tuple(input.shape), resolved(shape, math.prod(input.shape)))


def _dtype(shape: Any, dtype: Any) -> Any:
    """The dtype, where view() was asked for one and not for a shape."""
    return next(
        (
            one
            for one in (*shape, dtype)
            if one is not None and not isinstance(one, int)
        ),
        None,
    )


def _reinterpreted(input: Any, dtype: Any) -> Any:
    """Other numbers from the same bytes: nothing is linear."""
    ours, theirs = platform.get_element_size(input), dtype.itemsize
    if ours == theirs:
        return Rule("... -> ...")
    return RuleForCall(
        Rule("... i! -> ... o!"), {"o": input.shape[-1] * ours // theirs}
    )


def _view_of_shard(
    here: ShardContext, input: Any, shape: Any = (), dtype: Any = None
) -> Any:
    asked = _dtype(shape, dtype)
    if asked is None:
        return input.view(here.shape())
    # An empty shard may have strides that torch does not accept here.
    return (
        input.view(asked)
        if input.numel()
        else input.new_empty(here.shape(), dtype=asked)
    )


def _reshape(input: Any, shape: Any) -> RuleForCall:
    return reshaped(tuple(input.shape), resolved(shape, math.prod(input.shape)))


def _ravel(input: Any) -> RuleForCall:
    return reshaped(tuple(input.shape), (math.prod(input.shape),))


def _ravel_shard(here: ShardContext, input: Any) -> Any:
    return contiguous_shard(here.operand_shape(0), input).reshape(here.shape())


def _flatten(input: Any, start_dim: int, end_dim: int) -> RuleForCall:
    shape = tuple(input.shape)
    start, end = positions((start_dim, end_dim), len(shape))
    if start > end:
        raise RuntimeError(
            "flatten() has invalid args: start_dim cannot come after end_dim"
        )
    return reshaped(
        shape, (*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :])
    )


def _flatten_shard(here: ShardContext, input: Any, start_dim: int, end_dim: int) -> Any:
    return _to_flat(here, input, start_dim, end_dim)(input)


def _to_flat(
    here: ShardContext, input: Any, start_dim: int, end_dim: int
) -> Callable[..., Any]:
    """A single dim is flat already: the tensor itself, as torch gives it, with its hooks."""
    ndim = len(input.shape)
    if ndim and positions(start_dim, ndim) == positions(end_dim, ndim):
        return lambda input, *_, **__: input
    return reshape_shard(here)


def _unflatten(input: Any, dim: int, sizes: Any) -> RuleForCall:
    shape = tuple(input.shape)
    (at,) = positions(dim, len(shape))
    return reshaped(shape, (*shape[:at], *resolved(sizes, shape[at]), *shape[at + 1 :]))


def _squeeze(input: Any, dim: Any) -> RuleForCall:
    shape = tuple(input.shape)
    named = range(len(shape)) if dim is None else positions(dim, len(shape))
    return reshaped(
        shape, [size for i, size in enumerate(shape) if size != 1 or i not in named]
    )


def _unsqueeze(input: Any, dim: int) -> RuleForCall:
    shape = tuple(input.shape)
    (at,) = positions(dim, len(shape) + 1)
    return reshaped(shape, (*shape[:at], 1, *shape[at:]))


def _as_view(here: ShardContext, input: Any, **_: Any) -> Any:
    return input.view(here.shape())


def _as_shape(here: ShardContext, input: Any, **_: Any) -> Any:
    return reshape_shard(here)(input)


def _to_view(
    here: ShardContext, shape: Any = (), dtype: Any = None, **_: Any
) -> Callable[..., Any] | None:
    size = here.shape()
    return None if _dtype(shape, dtype) else lambda input, *_, **__: input.view(size)


def _to_shape(here: ShardContext, **_: Any) -> Callable[..., Any]:
    return reshape_shard(here)


operator(
    "view",
    "input, *shape, dtype=None",
    _view,
    local=_view_of_shard,
    ready=_to_view,
    view=True,
    order_free=True,
)
operator(
    "reshape",
    "input, *shape",
    _reshape,
    local=_as_shape,
    ready=_to_shape,
    view="maybe",
    order_free=True,
)
operator("ravel", "input", _ravel, local=_ravel_shard, view="maybe", order_free=True)
operator(
    "flatten",
    "input, start_dim=0, end_dim=-1",
    _flatten,
    local=_flatten_shard,
    ready=_to_flat,
    view="maybe",
    order_free=True,
)
operator(
    "unflatten",
    "input, dim, sizes",
    _unflatten,
    local=_as_view,
    ready=_to_view,
    view=True,
    order_free=True,
)
operator(
    "squeeze",
    "input, dim=None",
    _squeeze,
    local=_as_view,
    ready=_to_view,
    view=True,
    order_free=True,
)
operator(
    "unsqueeze",
    "input, dim",
    _unsqueeze,
    local=_as_view,
    ready=_to_view,
    view=True,
    order_free=True,
)
# Of the other tensor only the shape counts.
operator(
    "view_as",
    "input, other",
    handler=lambda input, other: input.view(tuple(other.shape)),
    any_layout=True,
)
operator(
    "reshape_as",
    "input, other",
    handler=lambda input, other: input.reshape(tuple(other.shape)),
    any_layout=True,
)
operator(
    "expand_as",
    "input, other",
    handler=lambda input, other: input.expand(tuple(other.shape)),
    any_layout=True,
)


def _at_least(count: int) -> Callable[..., Any]:
    def grown(tensor: Any) -> Any:
        shape = tuple(tensor.shape)
        if len(shape) >= count:
            return tensor
        before = int(len(shape) == 1) if count == 3 else count - len(shape)
        return tensor.view((1,) * before + shape + (1,) * (count - len(shape) - before))

    def handler(input: Any) -> Any:
        found = tuple(map(grown, input))
        return found[0] if len(found) == 1 and isinstance(input, tuple) else found

    return handler


for _count in (1, 2, 3):
    operator(f"atleast_{_count}d", "*input", handler=_at_least(_count), any_layout=True)

# --- another order


def reordered(order: Sequence[int]) -> RuleForCall:
    """Dim i of the result is dim ``order[i]``."""
    names = [f"d{i}" for i in range(len(order))]
    return moved(names, [names[i] for i in order])


def _permute(input: Any, dims: Any) -> RuleForCall:
    order = positions(dims, len(input.shape))
    if sorted(order) != list(range(len(input.shape))):
        raise RuntimeError(
            f"permute: {dims} are not all dims of a tensor with {len(input.shape)} dims"
        )
    return reordered(order)


def _swapped(dim0: int, dim1: int) -> Callable[..., RuleForCall]:
    return lambda input: _transpose(input, dim0, dim1)


def _transpose(input: Any, dim0: int, dim1: int) -> RuleForCall:
    order = list(range(len(input.shape)))
    if order:
        one, other = positions((dim0, dim1), len(order))
        order[one], order[other] = order[other], order[one]
    return reordered(order)


def _movedim(input: Any, source: Any, destination: Any) -> RuleForCall:
    ndim = len(input.shape)
    taken, put = positions(source, ndim), positions(destination, ndim)
    if not len(set(taken)) == len(taken) == len(put) == len(set(put)):
        raise RuntimeError(
            f"movedim: source {source} and destination {destination} must name as many different dims"
        )
    placed = dict(zip(put, taken, strict=True))
    others = iter([i for i in range(ndim) if i not in taken])
    return reordered([placed[i] if i in placed else next(others) for i in range(ndim)])


operator("permute", "input, *dims", _permute, view=True)
operator("transpose", "input, dim0, dim1", _transpose, view=True)
operator("movedim", "input, source, destination", _movedim, view=True)
operator(
    "T", "input", lambda input: reordered(range(len(input.shape))[::-1]), view=True
)
operator("t H", "input", _swapped(0, -1), view=True)
operator("mT mH", "input", _swapped(-2, -1), view=True)

# --- repeated without a copy


def _expand(input: Any, size: Any, **_: Any) -> RuleForCall:
    shape, wanted = tuple(input.shape), ints(size)
    new = len(wanted) - len(shape)
    left, right = [f"d{i}" for i in range(len(shape))], []
    sizes: dict[str, int] = {}
    for i, asked in enumerate(wanted):
        if i >= new and asked in (-1, shape[i - new]):
            right.append(left[i - new])
            continue
        if new < 0 or asked < 0 or (i >= new and shape[i - new] != 1):
            raise RuntimeError(
                f"expand: a tensor of shape {list(shape)} cannot become {list(wanted)}"
            )
        right.append(f"n{i}")
        sizes[f"n{i}"] = asked
        if i >= new:
            left[i - new] = f"i{i}!"
    return moved(left, right, **sizes)


def _expand_shard(here: ShardContext, input: Any, **_: Any) -> Any:
    return platform.operator("expand")(input, here.shape())


def _broadcast_tensors(input: Sequence[Any]) -> tuple[Any, ...]:
    shapes = [tuple(one.shape) for one in input]
    ndim = max(map(len, shapes))
    aligned = [(1,) * (ndim - len(shape)) + shape for shape in shapes]
    common = [
        next((size for size in sizes if size != 1), 1)
        for sizes in zip(*aligned, strict=True)
    ]
    return tuple(
        one if tuple(one.shape) == tuple(common) else one.expand(common)
        for one in input
    )


def _meshgrid(input: Sequence[Any], indexing: str | None) -> tuple[Any, ...]:
    sizes = [math.prod(one.shape) for one in input]
    order = list(range(len(sizes)))
    if indexing == "xy" and len(sizes) > 1:
        order[:2] = 1, 0
    shapes = [[size if i == k else 1 for i in order] for k, size in enumerate(sizes)]
    return tuple(
        one.view(shape).expand([sizes[i] for i in order])
        for one, shape in zip(input, shapes, strict=True)
    )


operator(
    "expand",
    "input, *size, implicit=False",
    _expand,
    local=_expand_shard,
    view=True,
    order_free=True,
)
operator(
    "broadcast_to",
    "input, size",
    _expand,
    local=_expand_shard,
    view=True,
    order_free=True,
)
operator("broadcast_tensors", "*input", handler=_broadcast_tensors)
operator("meshgrid", "*input, indexing=None", handler=_meshgrid)

# --- a part


def _narrow(input: Any, dim: int, start: Any, length: int) -> Any:
    if not isinstance(start, int):  # a tensor, whose value may be another one next time
        return lambda input, dim, start, length: input.narrow(dim, int(start), length)
    (at,) = positions(dim, len(input.shape))
    if length == input.shape[at]:
        return move("... -> ...")
    if is_small_part(input, _narrowed(input, dim, start, length)):
        return lambda **given: take_small_part(given["input"], _narrowed(**given))
    return RuleForCall(move("... {dim}! -> ... {dim=out}!"), {"out": length})


def _narrowed(input: Any, dim: int, start: int, length: int) -> list[Any]:
    """The index that takes the same."""
    (at,), size = positions(dim, len(input.shape)), input.shape[dim]
    begin = start % size if -size <= start < 0 else start
    if not 0 <= begin <= begin + length <= size:
        raise IndexError(
            f"narrow: start {start} and length {length} are out of range for a dim of size {size}"
        )
    return [
        slice(begin, begin + length) if i == at else slice(None)
        for i in range(len(input.shape))
    ]


def _select(input: Any, dim: int, index: Any) -> Any:
    if (
        not input.shape
        or not isinstance(index, int)
        or not is_small_part(input, _selected(input, dim, index))
    ):
        return move("... {dim}! -> ...")
    return lambda **given: take_small_part(given["input"], _selected(**given))


def _selected(input: Any, dim: int, index: int) -> list[Any]:
    (at,) = positions(dim, len(input.shape))
    return [index if i == at else slice(None) for i in range(len(input.shape))]


def _narrow_shard(
    here: ShardContext, input: Any, dim: int, start: int, length: int
) -> Any:
    return here.function(input, dim, start, min(length, here.shape()[dim]))


def _unfold(input: Any, dimension: int, size: int, step: int) -> Any:
    if not input.shape:
        return moved([], ["count!"], count=size)
    (at,) = positions(dimension, len(input.shape))
    names = [f"d{i}" for i in range(len(input.shape))]
    left = [f"{name}!" if i == at else name for i, name in enumerate(names)]
    right = ["count!" if i == at else name for i, name in enumerate(names)]
    return moved(
        left, [*right, "size!"], count=(input.shape[at] - size) // step + 1, size=size
    )


def diagonal_size(rows: int, columns: int, offset: int) -> int:
    """The number of elements of a diagonal."""
    return max(
        0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns)
    )


def _diagonal(input: Any, offset: int, dim1: int, dim2: int) -> RuleForCall:
    one, other = positions((dim1, dim2), len(input.shape))
    names = [f"d{i}" for i in range(len(input.shape))]
    kept = [name for i, name in enumerate(names) if i not in (one, other)]
    left = [name if name in kept else f"{name}!" for name in names]
    return moved(
        left,
        [*kept, "out!"],
        out=diagonal_size(input.shape[one], input.shape[other], offset),
    )


def _in_one_memory(func: Any, *_: Any) -> None:
    raise coded(
        OperatorError,
        "HP311",
        f"{platform.op_name_of(func).name}: it is about one memory in which all elements lie, and those of a "
        "distributed tensor lie in many; use reshape, permute, expand, unfold or an index",
    )


operator(
    "narrow",
    "input, dim, start, length",
    _narrow,
    local=_narrow_shard,
    view=True,
    order_free=True,
)
operator("select", "input, dim, index", _select, view=True)
operator("unfold", "input, dimension, size, step", _unfold, view=True)
operator("diagonal", "input, offset=0, dim1=0, dim2=1", _diagonal, view=True)
operator(
    "linalg_diagonal", "input, *, offset=0, dim1=-2, dim2=-1", _diagonal, view=True
)
operator(
    "as_strided as_strided_copy as_strided_scatter resize resize_as set",
    "input, *rest",
    direct=_in_one_memory,
)

# --- all of it


def _contiguous(input: Any, memory_format: Any) -> Any:
    """The tensor itself where it is contiguous already, as a plain tensor does it."""
    if memory_format is None:
        local = contiguous_shard(tuple(input._shape), input._local)
    else:
        local = input._local.contiguous(memory_format=memory_format)
    return (
        input if local is input._local else DTensor(local, input._layout, input._shape)
    )


def _to_dense(input: Any, dtype: Any, **_: Any) -> Any:
    """The tensor itself, which is never sparse."""
    return input if dtype is None else input.to(dtype)


operator(
    "contiguous", "input, *, memory_format=None", handler=_contiguous, any_layout=True
)
operator("to_dense", "input, dtype=None, *, masked_grad=None", handler=_to_dense)
operator("clone", "input, *, memory_format=None", move("... -> ..."))
