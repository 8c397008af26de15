# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A001, A002 - operands have the names that torch gives them
"""Order and counts: what is put in order is whole, and counts of the shards add up.

sort   "... {dim}! -> ... {dim}!, ... {dim}!"       topk   "... {dim}! -> ... {dim=k}!, ... {dim=k}!"
histc  "... -> bins!"                               topk of a cut dim: the best of each rank's best, as of logits
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.geometry import nested_span
from hyper_parallel.core.shard.arguments import replicated
from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.ops.staged_reductions import gather_with_integers, is_cut
from hyper_parallel.core.shard.ops.views import positions
from hyper_parallel.core.shard.rule import Rule
from hyper_parallel.platform import get_platform

platform = get_platform()
call = platform.operator

ALONG = "... {dim}! -> ... {dim}!"

operator(
    "sort",
    "input, dim=-1, descending=False, *, stable=None",
    Rule(f"{ALONG}, ... {{dim}}!"),
)
operator("argsort", "input, dim=-1, descending=False, *, stable=False", Rule(ALONG))
operator("msort", "input", lambda **_: RuleForCall(Rule(ALONG), {"dim": 0}))

# --- the k largest or smallest

BEST = "... {dim=k}!, ... {dim=k}!"


def _topk(input: Any, k: int, dim: int, **_: Any) -> Any:
    (at,) = positions(dim, len(input.shape))
    if input.shape and is_cut(input, (at,)) and 0 < k <= min(_pieces(input, at)):
        return _best_in_stages  # every rank has so many
    return Rule(f"... {{dim}}! -> {BEST}")


def _pieces(input: Any, dim: int) -> list[int]:
    """The sizes of the pieces into which a dim is divided."""
    counts = [input.layout.mesh_shape[axis] for axis in input.layout.dim_axes[dim]]
    places = itertools.product(*map(range, counts))
    chunks = (list(zip(counts, place, strict=True)) for place in places)
    return [nested_span(input.shape[dim], chunk)[1] for chunk in chunks]


def _best_in_stages(input: Any, k: int, dim: int, largest: bool, sorted: bool) -> Any:
    """What each rank has of the best, gathered, and the best of it: so little is communicated of so many classes."""
    input = input.reduce_partial()
    (at,) = positions(dim, len(input.shape))
    start, _ = input.layout.shard_of(input.shape)[at]
    best, index = call("topk")(input.to_local(), k, at, largest, False)
    values, indices = gather_with_integers(
        input, (at,), best, index + start, input.shape[at]
    )
    return DTensor.dispatch(best_of, (values, indices, k, at, largest, sorted), {})


def best_of(
    values: Any, indices: Any, k: int, dim: int, largest: bool, sorted: bool
) -> Any:
    """The k best of these values, and the indices that belong to them."""
    found = values.topk(k, dim, largest, sorted)
    return type(found)((found[0], indices.gather(dim, found[1])))


operator("topk", "input, k, dim=-1, largest=True, sorted=True", _topk)
operator(
    "best_of",
    "values, indices, k, dim, largest, sorted",
    Rule(f"... {{dim}}!, ... {{dim}}! -> {BEST}"),
)

# --- counts


class Histogram(NamedTuple):
    """What histogram gives."""

    hist: Any
    bin_edges: Any


def _histc(input: Any, bins: int, min: Any, max: Any) -> Any:
    """Where no bounds are given they are those of the whole, and not of a shard."""
    if min == max:
        min, max = _bounds(input)
        if min == max:
            min, max = min - 1, max + 1
    return DTensor.dispatch(counts_between, (input, bins, min, max), {})


def _bounds(input: Any) -> tuple[Any, Any]:
    """The smallest and the largest element; zeros of nothing."""
    if 0 in input.shape:
        return 0, 0
    with platform.no_grad():
        found = call("aminmax")(input)
    return found[0].item(), found[1].item()


def counts_between(input: Any, bins: int, min: Any, max: Any) -> Any:
    """How many elements lie in each of these bins of one width."""
    return call("histc")(input, bins, min, max)


def _bincount(input: Any, weights: Any, minlength: int) -> Any:
    least, most = _bounds(input)
    if least < 0:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    if not input.shape[0]:
        return DTensor.dispatch(counts_below, (input, None, minlength), {})
    return DTensor.dispatch(
        counts_below, (input, weights, max(minlength, most + 1)), {}
    )


def counts_below(input: Any, weights: Any, size: int) -> Any:
    """How often each integer below ``size`` occurs, or the sum of its weights."""
    found = call("bincount")(input, weights, size)
    if weights is None or input.shape[0]:
        return found
    kept = weights.dtype == platform.str_to_dtype(
        "float32"
    )  # of nothing torch gives integers
    return found.to(weights.dtype if kept else platform.str_to_dtype("float64"))


def _histogram(input: Any, bins: Any, range: Any, weight: Any, density: bool) -> Any:
    """The edges of the bins are the same on every rank."""
    if isinstance(bins, DTensor):
        edges = platform.detach(bins.reduce_partial())
    else:
        range = range or ((0.0, 1.0) if 0 in input.shape else _bounds(input))
        nothing = platform.zeros(0, dtype=input.dtype, device=input.device)
        edges = replicated(call("histogram")(nothing, bins, range=range)[1], input)
    counts = DTensor.dispatch(counts_in_bins, (input, weight, bins, range), {})
    if density:
        counts = counts.reduce_partial()
        counts = counts / (call("sum")(counts) * call("diff")(edges))
    return Histogram(counts, edges)


def counts_in_bins(input: Any, weight: Any, bins: Any, range: Any) -> Any:
    """How many elements, or what sum of their weights, each bin has."""
    given = {} if range is None else {"range": range}
    return call("histogram")(input, bins, weight=weight, **given)[0]


def _counts_in_bins(input: Any, weight: Any, bins: Any, **_: Any) -> RuleForCall:
    if isinstance(bins, DTensor):
        return RuleForCall(
            Rule("..., ..., edges! -> bins!"),
            {"bins": bins.shape[0] - 1},
            [input, weight, bins],
        )
    return RuleForCall(Rule("..., ... -> bins!"), operands=[input, weight])


operator("histc", "input, bins=100, min=0, max=0", handler=_histc)
operator("bincount", "input, weights=None, minlength=0", handler=_bincount)
operator(
    "histogram",
    "input, bins=100, *, range=None, weight=None, density=False",
    handler=_histogram,
)
operator("counts_between", "input, bins, min, max", Rule("... -> bins!"))
operator("counts_below", "input, weights, size", Rule("n, n -> size!", linear=((1,),)))
operator("counts_in_bins", "input, weight, bins, range", _counts_in_bins)
