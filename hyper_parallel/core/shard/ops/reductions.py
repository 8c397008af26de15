# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A001, A002 - operands have the names that torch gives them
"""Reductions: a sum leaves a pending sum, and what is not a sum is taken of the shards and then of what they gave.

sum    "... {dim} -> ..."        mean    the same: a local mean for its share of the global count
amax   "... {dim}! -> ..."       and in two stages where dim is cut; so do norms, logsumexp, var, all and any
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.ops.staged_reductions import (
    elementwise,
    exponentials_in_stages,
    extreme_in_stages,
    extremes_in_stages,
    finite,
    found_in_stages,
    is_cut,
    moments_in_stages,
    nothing,
    parts_of,
    reduced_dims,
    reducing,
    whole,
    wide,
)
from hyper_parallel.core.shard.rule import Rule, pointwise, reduction
from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform

platform = get_platform()

REDUCE = "input, dim=None, keepdim=False"
INF = float("inf")


class MinMax(NamedTuple):
    """What aminmax gives."""

    min: Any
    max: Any


def _every(dim: Any) -> Any:
    """The dims as a rule's text refers to them; None is all."""
    return None if dim is None or (not isinstance(dim, int) and len(dim) == 0) else dim


# --- sums and what is put together as they are


def _adds_up(input: Any, dtype: Any) -> bool:
    """Whether the parts of a pending sum may be cast to this dtype: not where that drops what is behind the point."""
    if dtype is not None and platform.dtype_kind(dtype) in ("bool", "int", "uint"):
        return False
    return bool(platform.is_floating_point(input.to_local()))


def _sum_like(kind: str) -> Callable[..., RuleForCall]:
    def rule(
        input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None
    ) -> RuleForCall:
        is_bool = dtype is not None and platform.dtype_kind(dtype) == "bool"
        is_complex = platform.dtype_kind(input.dtype) == "complex"
        if is_bool or (kind == "prod" and is_complex):
            return whole(
                keepdim, _every(dim)
            )  # what no collective adds up or multiplies
        made = reduction(kind, reducing(keepdim))
        return RuleForCall(
            made if _adds_up(input, dtype) else replace(made, linear=()),
            {"dim": _every(dim)},
        )

    return rule


def _not_linear(
    input: Any,  # noqa: ARG001 - operand 0
    dim: Any = None,
    keepdim: bool = False,
    **_: Any,
) -> RuleForCall:
    return RuleForCall(Rule(reducing(keepdim)), {"dim": _every(dim)})


def _mean(here: ShardContext, input: Any, dim: Any, keepdim: bool, dtype: Any) -> Any:
    """The local mean for its share of the global count: it does not overflow where a sum would."""
    if here.share == 0:
        return platform.operator("sum")(input, dim, keepdim, dtype=dtype)
    found = here.function(input, dim, keepdim, dtype=dtype)
    return found if here.share == 1 else found * here.share


operator("sum", f"{REDUCE}, *, dtype=None", _sum_like("sum"))
operator("prod", f"{REDUCE}, *, dtype=None", _sum_like("prod"))
operator(
    "mean", f"{REDUCE}, *, dtype=None", _sum_like("mean"), local=_mean, order_free=True
)
operator("nansum", f"{REDUCE}, *, dtype=None", _not_linear)
operator("count_nonzero", "input, dim=None", _not_linear)

# --- whole, and in two stages where a reduced dim is cut


def _staged(handler: Callable[..., Any], results: int = 1) -> Callable[..., Any]:
    def rule(input: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Any:
        return (
            handler
            if is_cut(input, reduced_dims(input, dim))
            else whole(keepdim, _every(dim), results=results)
        )

    return rule


def _logical(name: str) -> Callable[..., Any]:
    def handler(input: Any, dim: Any, keepdim: bool) -> Any:
        input = input.reduce_partial()
        dims = reduced_dims(input, dim)
        function = platform.operator(name)
        return function(
            parts_of(input, dims, function(input.to_local(), dims, keepdim=True)),
            dims,
            keepdim=keepdim,
        )

    def rule(input: Any, dim: Any, keepdim: bool) -> Any:
        return (
            pointwise(1) if dim in ((), []) else _staged(handler)(input, dim, keepdim)
        )  # here () means: none

    return rule


def _logsumexp(input: Any, dim: Any, keepdim: bool) -> Any:
    dims = reduced_dims(input, dim)
    values = input.reduce_partial().to(
        wide(input.dtype)
    )  # so many may be added that half precision overflows
    top, total, _ = exponentials_in_stages(values, dims)
    found = elementwise(lambda x: x.log(), total) + elementwise(finite, top)
    found = (
        found if keepdim else platform.operator("sum")(found, dims)
    )  # over dims of one
    return (
        found.to(input.dtype) if platform.is_floating_point(input.to_local()) else found
    )


def _aminmax(input: Any, dim: Any, keepdim: bool) -> MinMax:
    return MinMax(*extremes_in_stages(input, dim, keepdim))


def _nanmean(input: Any, dim: Any, keepdim: bool, dtype: Any) -> Any:
    present = platform.operator("sum")(
        elementwise(lambda x: ~x.isnan(), input.reduce_partial()), dim, keepdim
    )
    return (
        platform.operator("nansum")(input, dim, keepdim, dtype=dtype)
        / present.reduce_partial()
    )


for name in ("amax", "amin"):
    operator(name, REDUCE, _staged(partial(extreme_in_stages, name)), any_layout=True)
for name in ("all", "any"):
    operator(name, REDUCE, _logical(name))
operator("logsumexp", REDUCE, _staged(_logsumexp))
operator(
    "aminmax",
    f"input, *, {REDUCE.removeprefix('input, ')}",
    _staged(_aminmax, results=2),
)
operator("nanmean", f"{REDUCE}, *, dtype=None", _staged(_nanmean))

# --- the largest and the smallest with their places


def _extreme(name: str) -> Callable[..., Any]:
    """max and min: of all elements, along a dim with the places, or of two tensors."""

    def of_all(input: Any, **_: Any) -> Any:
        return extreme_in_stages(f"a{name}", input, None, keepdim=False)

    def along(input: Any, dim: Any, keepdim: bool, **_: Any) -> Any:
        return found_in_stages(name, input, dim, keepdim)

    def rule(input: Any, dim: Any, keepdim: bool, other: Any) -> Any:
        other = dim if isinstance(dim, DTensor) else other
        if other is not None:
            return RuleForCall(pointwise(2), operands=[input, other])
        return (
            _staged(of_all)(input)
            if dim is None
            else _staged(along, results=2)(input, dim, keepdim)
        )

    return rule


def _place(name: str) -> Callable[..., Any]:
    def handler(input: Any, dim: Any, keepdim: bool) -> Any:
        with platform.no_grad():
            return found_in_stages(name, input, dim, keepdim)[1]

    def rule(input: Any, dim: Any, keepdim: bool) -> Any:
        # Of all elements: the order in the whole is not that of the shards.
        return (
            whole(keepdim, None)
            if dim is None
            else _staged(handler)(input, dim, keepdim)
        )

    return rule


def _with_places(input: Any, dim: Any, keepdim: bool, **_: Any) -> RuleForCall:  # noqa: ARG001 - an operand
    return whole(keepdim, dim, results=1 if dim is None else 2)


def _quantile(input: Any, q: Any, dim: Any, keepdim: bool, **_: Any) -> RuleForCall:
    several = isinstance(q, DTensor) and len(q.shape)
    kept = "... {dim=1}" if keepdim else "..."
    text = f"... {{dim}}!, q! -> q {kept}" if several else f"... {{dim}}!, -> {kept}"
    dims = tuple(
        at - len(input.shape) for at in reduced_dims(input, dim)
    )  # from the end: the result may have one more
    return RuleForCall(Rule(text), {"dim": dims}, [input, q])


def _quantile_of_shard(
    here: ShardContext, input: Any, q: Any, dim: Any, keepdim: bool, interpolation: str
) -> Any:
    if 0 in here.shape():
        return nothing(here, input, q)
    return here.function(input, q, dim, keepdim, interpolation=interpolation)


for name in ("max", "min"):
    operator(name, f"{REDUCE}, other=None", _extreme(name))
    operator(f"arg{name}", REDUCE, _place(name))
operator("median nanmedian", REDUCE, _with_places)
operator("mode", "input, dim=-1, keepdim=False", _with_places)
operator("kthvalue", "input, k, dim=-1, keepdim=False", _with_places)
QUANTILE = "input, q, dim=None, keepdim=False, *, interpolation='linear'"
operator("quantile nanquantile", QUANTILE, _quantile, local=_quantile_of_shard)

# --- deviations from the mean


def _deviation(name: str) -> Callable[..., Any]:
    """var, std, and each with the mean."""
    is_std, with_mean = name.startswith("std"), name.endswith("_mean")

    def handler(
        input: Any, dim: Any, unbiased: Any, keepdim: bool, correction: Any
    ) -> Any:
        dim, taken_off = _corrected(dim, unbiased, correction)
        dims, dtype = reduced_dims(input, dim), input.dtype
        input = input.reduce_partial().to(wide(dtype))
        squares, mean = moments_in_stages(input, dims)
        freedom = max(0.0, math.prod(input.shape[dim] for dim in dims) - taken_off)
        found = squares / freedom
        results = [elementwise(_root, found) if is_std else found, mean][
            : 1 + with_mean
        ]
        results = (
            results
            if keepdim
            else [platform.operator("sum")(one, dims) for one in results]
        )  # of dims of one
        results = [one.to(dtype) for one in results]
        return tuple(results) if with_mean else results[0]

    def rule(
        input: Any, dim: Any, unbiased: Any, keepdim: bool, correction: Any
    ) -> Any:
        dim, _ = _corrected(dim, unbiased, correction)
        if platform.dtype_kind(input.dtype) == "complex":
            return whole(keepdim, _every(dim), results=1 + with_mean)
        return _staged(handler, results=1 + with_mean)(input, dim, keepdim)

    return rule


def _root(variance: Any) -> Any:
    """The square root, with a gradient of zero where all is alike, as torch has it."""
    alike = variance == 0
    return variance.masked_fill(alike, 1).sqrt().masked_fill(alike, 0)


def _deviation_of_shard(
    here: ShardContext,
    input: Any,
    dim: Any,
    unbiased: Any,
    keepdim: bool,
    correction: Any,
) -> Any:
    dim, correction = _corrected(dim, unbiased, correction)
    if 0 not in here.shape():
        return here.function(input, dim, correction=correction, keepdim=keepdim)
    found = tuple(nothing(here, input, result=i) for i in range(len(here.plan.results)))
    return found if len(found) > 1 else found[0]


def _corrected(dim: Any, unbiased: Any, correction: Any) -> tuple[Any, float]:
    """The dims and what is taken off the count, from the two ways of saying it."""
    if isinstance(dim, bool):  # var(False): the only positional argument says whether
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None else int(unbiased)
    return dim, correction


for name in ("var", "std", "var_mean", "std_mean"):
    parameters = "input, dim=None, unbiased=None, keepdim=False, *, correction=None"
    operator(name, parameters, _deviation(name), local=_deviation_of_shard)

# --- norms


def _norm_in_stages(input: Any, ord: Any, dim: Any, keepdim: bool, dtype: Any) -> Any:
    """The norm of the ranks' norms. An empty shard adds nothing."""
    input = (input if dtype is None else input.to(dtype)).reduce_partial()
    dims, norm, shard = (
        reduced_dims(input, dim),
        platform.operator("vector_norm"),
        input.to_local(),
    )
    if abs(ord) == INF:
        return extreme_in_stages(
            "amax" if ord > 0 else "amin", elementwise(abs, input), dims, keepdim
        )
    if ord < 0 and not all(shard.shape[dim] for dim in dims):
        part = norm(shard, 2, dims, True) + INF
    else:
        part = norm(shard, ord, dims, True)
    parts = parts_of(input, dims, part)
    return (
        norm(parts, ord, dims, keepdim)
        if ord
        else platform.operator("sum")(parts, dims, keepdim)
    )


def _norm(input: Any, dim: Any, keepdim: bool, dtype: Any, **order: Any) -> Any:
    (ord,) = order.values()
    return _norm_in_stages(
        input, 2 if ord in (None, "fro") else ord, dim, keepdim, dtype
    )


def _norm_rule(of_matrices: bool = False) -> Callable[..., Any]:
    def rule(input: Any, dim: Any, keepdim: bool, dtype: Any, **order: Any) -> Any:  # noqa: ARG001 - as it is called
        (ord,) = order.values()
        several = of_matrices and len(reduced_dims(input, dim)) > 1
        if ord not in (None, "fro") and (
            several or isinstance(ord, str)
        ):  # of rows, columns or singular values
            return whole(keepdim, _every(dim))
        return _staged(_norm)(input, dim, keepdim)

    return rule


operator(
    "vector_norm",
    "input, ord=2, dim=None, keepdim=False, *, dtype=None",
    _norm_rule(),
    any_layout=True,
)
operator(
    "norm",
    "input, p='fro', dim=None, keepdim=False, dtype=None",
    _norm_rule(),
    any_layout=True,
)
operator(
    "linalg_norm",
    "input, ord=None, dim=None, keepdim=False, *, dtype=None",
    _norm_rule(of_matrices=True),
)
operator(
    "matrix_norm",
    "input, ord='fro', dim=(-2, -1), keepdim=False, *, dtype=None",
    _norm_rule(of_matrices=True),
)


def _dist(input: Any, other: Any, p: Any) -> Any:
    return platform.operator("vector_norm")(input - other, p)


operator("dist", "input, other, p=2", handler=_dist)

# --- from one element to the next

ALONG = "... {dim}! -> ... {dim}!"


def _cumsum(input: Any, dtype: Any, **_: Any) -> Rule:
    return Rule(ALONG, linear=((0,),) if _adds_up(input, dtype) else ())


operator("cumsum", "input, dim, *, dtype=None", _cumsum)
operator("cumprod", "input, dim, *, dtype=None", Rule(ALONG))
operator("logcumsumexp", "input, dim", Rule(ALONG))
operator("cummax cummin", "input, dim", Rule(f"{ALONG}, ... {{dim}}!"))
