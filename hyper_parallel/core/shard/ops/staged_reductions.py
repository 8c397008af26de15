# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A001, A002 - operands have the names that torch gives them
"""Reductions in two stages: every rank reduces its shard, and what the ranks found is gathered and reduced again.

A norm of norms, a maximum of maxima: what is communicated is as small as the result, nothing is lost on the way, as a
nan is in a maximum between ranks, and the gradient is that of the framework's own operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.placement_types import Replicate, Shard
from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.ops.views import positions
from hyper_parallel.core.shard.rule import Rule
from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform

platform = get_platform()

Dims = tuple[int, ...]


def reduced_dims(input: Any, dim: Any) -> Dims:
    """The dims that a call reduces, counted from the front: all where it names none."""
    ndim = len(input.shape)
    everything = (
        dim is None or (not isinstance(dim, int) and len(dim) == 0) or ndim == 0
    )
    return tuple(range(ndim)) if everything else positions(dim, ndim)


def is_cut(input: Any, dims: Dims) -> bool:
    """Whether any of these dims lies on several ranks."""
    return any(input.layout.dim_axes[dim] for dim in dims)


def reducing(keepdim: bool, mark: str = "", operands: int = 1, results: int = 1) -> str:
    """The text of a rule that takes the dims in ``dim`` away, or leaves ones."""
    left, right = f"... {{dim}}{mark}", "... {dim=1}" if keepdim else "..."
    return f"{', '.join([left] * operands)} -> {', '.join([right] * results)}"


def whole(keepdim: bool, dim: Any, operands: int = 1, results: int = 1) -> RuleForCall:
    """The rule for operators that must see all of the dims that they reduce."""
    return RuleForCall(Rule(reducing(keepdim, "!", operands, results)), {"dim": dim})


def parts_of(input: DTensor, dims: Dims, part: Any) -> DTensor:
    """What each rank found in its shard, as much on every rank along these dims: side by side, gathered along them."""
    layout = input.layout
    found = [
        layout.get_dim_split_num(dim) * size for dim, size in enumerate(part.shape)
    ]
    shape = [
        found[dim] if dim in dims else size for dim, size in enumerate(input.shape)
    ]
    cuts = {axis for dim in dims for axis in layout.dim_axes[dim]}
    gathered = [
        Replicate() if axis in cuts else p for axis, p in enumerate(layout.placements)
    ]
    one_by_one = [
        Shard(p.dim) if axis in layout.irregular and axis in cuts else p
        for axis, p in enumerate(layout.placements)
    ]
    return DTensor(part, layout.with_placements(one_by_one), shape).redistribute(
        None, gathered
    )


def gather_together(input: DTensor, dims: Dims, *parts: Any) -> list[DTensor]:
    """Several findings of one shape and dtype, each as ``parts_of`` gathers it, in one message."""
    at, count, width = dims[0], len(parts), parts[0].shape[dims[0]]
    together = parts_of(input, dims, platform.cat(parts, at))
    local, shape = together.to_local(), list(together.shape)
    ranks = local.shape[at] // (count * width)
    before, after = tuple(local.shape[:at]), tuple(local.shape[at + 1 :])
    by_rank = local.reshape((*before, ranks, count, width, *after))
    shape[at] //= count
    found = []
    for number in range(count):
        index = (slice(None),) * (at + 1) + (number,)
        one = platform.operator("getitem")(by_rank, index).reshape(
            (*before, ranks * width, *after)
        )
        found.append(DTensor(one, together.layout, shape))
    return found


def gather_with_integers(
    input: DTensor, dims: Dims, values: Any, integers: Any, most: int
) -> list[DTensor]:
    """Values with an integer for each, of at most ``most``: in one message where one dtype holds both exactly."""
    dtype, kind = values.dtype, integers.dtype
    carrier = _carrier(str(dtype).rpartition(".")[2].lower(), most)
    if carrier is None:
        return [parts_of(input, dims, part) for part in (values, integers)]
    dtypes = dtype, kind
    given = [
        part if part.dtype == carrier else part.to(carrier)
        for part in (values, integers)
    ]
    found = gather_together(input, dims, *given)
    return [
        one if one.dtype == had else one.to(had)
        for one, had in zip(found, dtypes, strict=True)
    ]


def _carrier(dtype: str, most: int) -> Any:
    """The dtype that holds all values of another, and integers up to ``most``, without rounding; None if none does."""
    if dtype in ("float64", "double"):
        return platform.str_to_dtype("float64") if most <= 1 << 53 else None
    if dtype in ("float32", "float16", "bfloat16"):
        return platform.str_to_dtype("float32") if most <= 1 << 24 else None
    return (
        platform.str_to_dtype("int64")
        if dtype in ("bool", "uint8", "int8", "int16", "int32", "int64")
        else None
    )


def elementwise(function: Callable[[Any], Any], tensor: DTensor) -> DTensor:
    """A function of each element, of a tensor that waits for no reduction."""
    return DTensor(function(tensor.to_local()), tensor.layout, tensor.shape)


def nothing(here: ShardContext, *operands: Any, result: int = 0) -> Any:
    """An empty piece of a result, for operators that do not take empty tensors.

    All operands are in its graph: the sums that other ranks await in backward need this rank as well.
    """
    tensors = [
        x for x in operands if platform.is_tensor(x) and platform.is_floating_point(x)
    ]
    zeros = platform.zeros(
        here.shape(result), dtype=tensors[0].dtype, device=tensors[0].device
    )
    add = platform.operator("add")
    for x in tensors:
        zeros = add(zeros, platform.operator("sum")(x))
    return zeros


def wide(dtype: Any) -> Any:
    """The dtype in which to add up many numbers of this one."""
    return (
        dtype if "float64" in str(dtype).lower() else platform.str_to_dtype("float32")
    )


# --- the largest and the smallest


def extreme_in_stages(name: str, input: Any, dim: Any, keepdim: bool) -> Any:
    """amax or amin over dims that are cut."""
    input = input.reduce_partial()
    dims, shard = reduced_dims(input, dim), input.to_local()
    part = _extreme(name, shard, dims)
    if not platform.is_recorded(part):
        return platform.operator(name)(parts_of(input, dims, part), dims, keepdim)
    ties = platform.operator("sum")(shard == part, dims, True)
    most = math.prod(input.shape[dim] for dim in dims)
    values, ties = gather_with_integers(input, dims, part, ties, most)
    return DTensor.dispatch(shared_extreme, (values, ties, name, dims, keepdim), {})


def extremes_in_stages(input: Any, dim: Any, keepdim: bool) -> list[Any]:
    """amin and amax over dims that are cut."""
    input = input.reduce_partial()
    dims, shard = reduced_dims(input, dim), input.to_local()
    names = "amin", "amax"
    if platform.is_recorded(shard):
        return [extreme_in_stages(name, input, dims, keepdim) for name in names]
    found = gather_together(
        input, dims, *(_extreme(name, shard, dims) for name in names)
    )
    return [
        platform.operator(name)(one, dims, keepdim)
        for name, one in zip(names, found, strict=True)
    ]


def shared_extreme(values: Any, ties: Any, name: str, dim: Dims, keepdim: bool) -> Any:
    """The extreme of the ranks' extremes. All elements that tie share its gradient, wherever they lie."""
    best = platform.operator(name)(platform.detach(values), dim, True)
    won = values == best
    shares = (ties * won).to(wide(values.dtype))
    shares = (shares / platform.operator("sum")(shares, dim, True)).to(values.dtype)
    winners = values.masked_fill(~(won & values.isfinite()), 0)
    # Zero, but with the gradient: the value itself must not be rounded.
    share = platform.operator("sum")(
        shares * (winners - platform.detach(winners)), dim, keepdim
    )
    return share + platform.operator(name)(platform.detach(values), dim, keepdim)


def _shared(values: Any, ties: Any, name: str, dim: Dims, keepdim: bool) -> RuleForCall:  # noqa: ARG001 - operands
    return whole(keepdim, dim, operands=2)


def found_in_stages(name: str, input: Any, dim: int, keepdim: bool) -> Any:
    """max or min, with the place, over a dim that is cut."""
    input = input.reduce_partial()
    (at,), shard = positions(dim, len(input.shape)), input.to_local()
    start, size = input.layout.shard_of(input.shape)[at]
    if size:
        value, index = platform.operator(name)(shard, at, True)
        index = index + start
    else:
        value = _extreme(f"a{name}", shard, (at,))
        index = platform.zeros(
            value.shape, dtype=platform.str_to_dtype("int64"), device=value.device
        )
    values, indices = gather_with_integers(input, (at,), value, index, input.shape[at])
    return DTensor.dispatch(found_extreme, (values, indices, name, at, keepdim), {})


def found_extreme(values: Any, indices: Any, name: str, dim: int, keepdim: bool) -> Any:
    """The extreme of the ranks' extremes, and where it is in the whole."""
    found = platform.operator(name)(values, dim, True)
    pair = found[0], indices.gather(dim, found[1])
    return type(found)(pair if keepdim else [one.squeeze(dim) for one in pair])


def _found(
    values: Any,  # noqa: ARG001 - operand 0
    indices: Any,  # noqa: ARG001 - operand 1
    name: str,  # noqa: ARG001 - for the local function
    dim: int,
    keepdim: bool,
) -> RuleForCall:
    return whole(keepdim, dim, operands=2, results=2)


operator("shared_extreme", "values, ties, name, dim, keepdim", _shared)
operator("found_extreme", "values, indices, name, dim, keepdim", _found)


def _extreme(name: str, shard: Any, dims: Dims) -> Any:
    """amax or amin of a shard, of which an empty one has the least that can be."""
    if all(shard.shape[dim] for dim in dims):
        return platform.operator(name)(shard, dims, True)
    identity = _identity(
        str(shard.dtype).rpartition(".")[2].lower(), -1 if name == "amax" else 1
    )
    if platform.is_floating_point(shard):
        return (
            platform.operator("sum")(shard, dims, True) + identity
        )  # in the graph as on the other ranks
    shape = [1 if dim in dims else size for dim, size in enumerate(shard.shape)]
    return platform.full(shape, identity, dtype=shard.dtype, device=shard.device)


def _identity(dtype: str, sign: int) -> Any:
    if "float" in dtype:
        return sign * float("inf")
    if "bool" in dtype:
        return sign > 0
    return int(np.iinfo(dtype).min if sign < 0 else np.iinfo(dtype).max)


# --- sums of exponentials


def exponentials_in_stages(
    input: DTensor, dims: Dims
) -> tuple[DTensor, DTensor, DTensor]:
    """(the maximum, the sum of the exponentials below it, those exponentials) over dims that are cut.

    A rank tells its own maximum and the sum below that. Below a maximum that is not finite nothing is finite; zero
    stands for it then. The maximum is outside the graph: what is computed from all three does not depend on it.
    """
    shard = input.to_local()
    best, scaled, added = platform.call_where_empty(_exponentials, (shard, dims), {})
    bests, sums = gather_together(input, dims, best, added)
    top, total = DTensor.dispatch(joined_exponentials, (bests, sums, dims), {})
    factor = _factor(best, top.to_local())
    return top, total, DTensor(scaled * factor, input.layout, input.shape)


def _exponentials(shard: Any, dims: Dims) -> tuple[Any, Any, Any]:
    best = platform.detach(_extreme("amax", platform.detach(shard), dims))
    scaled = platform.operator("exp")(shard - finite(best))
    return best, scaled, platform.operator("sum")(scaled, dims, True)


def finite(values: Any) -> Any:
    """The values with zeros for those that are not finite."""
    return values.masked_fill(~values.isfinite(), 0)


def _factor(best: Any, top: Any) -> Any:
    """What makes exponentials below one maximum those below a larger one; one where either is not finite."""
    return platform.operator("exp")(
        (best - top).masked_fill(~(best.isfinite() & top.isfinite()), 0)
    )


def joined_exponentials(bests: Any, sums: Any, dim: Dims) -> tuple[Any, Any]:
    """The largest of the ranks' maxima and the sum of all exponentials below it."""
    top = platform.operator("amax")(bests, dim, True)
    return top, platform.operator("sum")(sums * _factor(bests, top), dim, True)


# --- moments


def moments_in_stages(input: DTensor, dims: Dims) -> tuple[DTensor, DTensor]:
    """(the sum of squared deviations from the mean, the mean) over dims that are cut, both with dims of one.

    A rank tells how many elements it has, their mean in two numbers, rounded and what that lacks, and the squares about
    it: so the difference of two means is not lost in their rounding, and the result is as exact as by two passes.
    """
    parts = platform.call_where_empty(_moments, (input.to_local(), dims), {})
    gathered = gather_together(input, dims, *parts)
    squares, mean = DTensor.dispatch(joined_moments, (*gathered, dims), {})
    return squares, mean


def _moments(shard: Any, dims: Dims) -> tuple[Any, Any, Any, Any]:
    count, total = math.prod(shard.shape[dim] for dim in dims), platform.operator("sum")
    # A constant: about any other number the squares of all ranks add up to the same.
    mean = total(platform.detach(shard), dims, True) / max(1, count)
    off = shard - mean
    rest = total(off, dims, True) / max(1, count)
    off = off - rest
    return platform.full_like(mean, count), mean, rest, total(off * off, dims, True)


def joined_moments(
    counts: Any, means: Any, rests: Any, squares: Any, dim: Dims
) -> tuple[Any, Any]:
    """The squares about the common mean, and that mean, of the ranks' own."""
    total = platform.operator("sum")
    shares = counts / total(counts, dim, True)
    center = total(means * shares, dim, True)
    off = (means - center) + rests
    rest = total(off * shares, dim, True)
    off = off - rest
    return total(squares + counts * off * off, dim, True), center + rest


def _joined(dim: Dims, **operands: Any) -> RuleForCall:
    return whole(True, dim, operands=len(operands), results=2)


operator("joined_exponentials", "bests, sums, dim", _joined)
operator("joined_moments", "counts, means, rests, squares, dim", _joined)
