# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A001, A002 - operands have the names that torch gives them
"""Reductions in two stages: every rank reduces its shard, and what the ranks found is gathered and reduced again.

A norm of norms, a maximum of maxima: what is communicated is as small as the result, nothing is lost on the way, as a
nan is in a maximum between ranks, and the gradient is that of the framework's own operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.placement_types import Replicate, Shard
from hyper_parallel.core.shard.here import Here
from hyper_parallel.core.shard.ops.operator import Ruled, operator
from hyper_parallel.core.shard.ops.views import positions
from hyper_parallel.core.shard.rule import Rule
from hyper_parallel.platform import get_platform

platform = get_platform()

Dims = tuple[int, ...]


def reduced_dims(input: Any, dim: Any) -> Dims:
    """The dims that a call reduces, counted from the front: all where it names none."""
    ndim = len(input.shape)
    everything = dim is None or (not isinstance(dim, int) and len(dim) == 0) or ndim == 0
    return tuple(range(ndim)) if everything else positions(dim, ndim)


def is_cut(input: Any, dims: Dims) -> bool:
    """Whether any of these dims lies on several ranks."""
    return any(input.layout.dim_axes[dim] for dim in dims)


def reducing(keepdim: bool, mark: str = "", operands: int = 1, results: int = 1) -> str:
    """The text of a rule that takes the dims in ``dim`` away, or leaves ones."""
    left, right = f"... {{dim}}{mark}", "... {dim=1}" if keepdim else "..."
    return f"{', '.join([left] * operands)} -> {', '.join([right] * results)}"


def whole(keepdim: bool, dim: Any, operands: int = 1, results: int = 1) -> Ruled:
    """The rule for operators that must see all of the dims that they reduce."""
    return Ruled(Rule(reducing(keepdim, "!", operands, results)), {"dim": dim})


def parts_of(input: DTensor, dims: Dims, part: Any) -> DTensor:
    """What each rank found in its shard, as much on every rank along these dims: side by side, gathered along them."""
    layout = input.layout
    found = [layout.get_dim_split_num(dim) * size for dim, size in enumerate(part.shape)]
    shape = [found[dim] if dim in dims else size for dim, size in enumerate(input.shape)]
    cuts = {axis for dim in dims for axis in layout.dim_axes[dim]}
    gathered = [Replicate() if axis in cuts else p for axis, p in enumerate(layout.placements)]
    one_by_one = [
        Shard(p.dim) if axis in layout.fused and axis in cuts else p for axis, p in enumerate(layout.placements)
    ]
    return DTensor(part, layout.with_placements(one_by_one), shape).redistribute(None, gathered)


def elementwise(function: Callable[[Any], Any], tensor: DTensor) -> DTensor:
    """A function of each element, of a tensor that waits for no reduction."""
    return DTensor(function(tensor.to_local()), tensor.layout, tensor.shape)


def nothing(here: Here, *operands: Any, result: int = 0) -> Any:
    """An empty piece of a result, for operators that do not take empty tensors.

    All operands are in its graph: the sums that other ranks await in backward need this rank as well.
    """
    tensors = [x for x in operands if platform.is_tensor(x) and platform.is_floating_point(x)]
    zeros = platform.zeros(here.shape(result), dtype=tensors[0].dtype, device=tensors[0].device)
    add = platform.operator("add")
    for x in tensors:
        zeros = add(zeros, platform.operator("sum")(x))
    return zeros


def wide(dtype: Any) -> Any:
    """The dtype in which to add up many numbers of this one."""
    return dtype if "float64" in str(dtype).lower() else platform.str_to_dtype("float32")


# --- the largest and the smallest


def extreme_in_stages(name: str, input: Any, dim: Any, keepdim: bool) -> Any:
    """amax or amin over dims that are cut."""
    input = input.reduce_partial()
    dims, shard = reduced_dims(input, dim), input.to_local()
    part = _extreme(name, shard, dims)
    values = parts_of(input, dims, part)
    if not platform.is_recorded(part):
        return platform.operator(name)(values, dims, keepdim)
    ties = parts_of(input, dims, platform.operator("sum")(shard == part, dims, True))
    return DTensor.dispatch(shared_extreme, (values, ties, name, dims, keepdim), {})


def shared_extreme(values: Any, ties: Any, name: str, dim: Dims, keepdim: bool) -> Any:
    """The extreme of the ranks' extremes. All elements that tie share its gradient, wherever they lie."""
    best = platform.operator(name)(platform.detach(values), dim, True)
    won = values == best
    shares = (ties * won).to(wide(values.dtype))
    shares = (shares / platform.operator("sum")(shares, dim, True)).to(values.dtype)
    winners = values.masked_fill(~(won & values.isfinite()), 0)
    # Zero, but with the gradient: the value itself must not be rounded.
    share = platform.operator("sum")(shares * (winners - platform.detach(winners)), dim, keepdim)
    return share + platform.operator(name)(platform.detach(values), dim, keepdim)


def _shared(values: Any, ties: Any, name: str, dim: Dims, keepdim: bool) -> Ruled:  # noqa: ARG001 - operands
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
        index = platform.zeros(value.shape, dtype=platform.str_to_dtype("int64"), device=value.device)
    values, indices = (parts_of(input, (at,), part) for part in (value, index))
    return DTensor.dispatch(found_extreme, (values, indices, name, at, keepdim), {})


def found_extreme(values: Any, indices: Any, name: str, dim: int, keepdim: bool) -> Any:
    """The extreme of the ranks' extremes, and where it is in the whole."""
    found = platform.operator(name)(values, dim, True)
    pair = found[0], indices.gather(dim, found[1])
    return type(found)(pair if keepdim else [one.squeeze(dim) for one in pair])


def _found(values: Any, indices: Any, name: str, dim: int, keepdim: bool) -> Ruled:  # noqa: ARG001 - operands
    return whole(keepdim, dim, operands=2, results=2)


operator("shared_extreme", "values, ties, name, dim, keepdim", _shared)
operator("found_extreme", "values, indices, name, dim, keepdim", _found)


def _extreme(name: str, shard: Any, dims: Dims) -> Any:
    """amax or amin of a shard, of which an empty one has the least that can be."""
    if all(shard.shape[dim] for dim in dims):
        return platform.operator(name)(shard, dims, True)
    identity = _identity(str(shard.dtype).rpartition(".")[2].lower(), -1 if name == "amax" else 1)
    if platform.is_floating_point(shard):
        return platform.operator("sum")(shard, dims, True) + identity  # in the graph as on the other ranks
    shape = [1 if dim in dims else size for dim, size in enumerate(shard.shape)]
    return platform.full(shape, identity, dtype=shard.dtype, device=shard.device)


def _identity(dtype: str, sign: int) -> Any:
    if "float" in dtype:
        return sign * float("inf")
    if "bool" in dtype:
        return sign > 0
    return int(np.iinfo(dtype).min if sign < 0 else np.iinfo(dtype).max)
