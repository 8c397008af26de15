# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A001, A002, A006 - operands have the names that the rules give them
"""Reductions, norms of vectors, and what runs or sorts along a dim."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor

from hyper_parallel.platform.mindspore.cpu.functions.shared import (
    dims_of,
    mint,
    numbers,
    ops,
    rows,
    shaped,
)


def _sum_like(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction that may have several dims, or none, which means all of them."""

    def run(
        input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> Any:
        dims = dims_of(input, dim)
        return (
            reduce(input, dims, keepdim, dtype=dtype)
            if dims
            else reduce(input, dtype=dtype)
        )

    return run


def _prod(
    input: Any, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    return (
        mint.prod(input, dtype=dtype)
        if dim is None
        else mint.prod(input, dim, keepdim, dtype=dtype)
    )


def _extreme(reduce: Callable[..., Any]) -> Callable[..., Any]:
    def run(input: Any, dim: Any = (), keepdim: bool = False) -> Any:
        if input.dtype == mindspore.bool_:
            return run(input.astype(mindspore.int32), dim, keepdim).astype(
                mindspore.bool_
            )
        return reduce(input, dims_of(input, dim), keepdim) if input.shape else input

    return run


def _aminmax(input: Any, *, dim: Any = None, keepdim: bool = False) -> Any:
    return tuple(
        _extreme(reduce)(input, dim, keepdim) for reduce in (mint.amin, mint.amax)
    )


def _truth(is_all: bool) -> Callable[..., Any]:
    def run(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is not None and not isinstance(dim, int) and not len(dim):
            return input != 0 if input.dtype != mindspore.bool_ else input
        wrong = (input == 0) if is_all else (input != 0)
        counted = (
            mint.sum(wrong.astype(mindspore.int32), dims_of(input, dim), keepdim)
            if input.shape
            else wrong
        )
        return counted == 0 if is_all else counted != 0

    return run


def _softmax(input: Any, dim: int, dtype: Any = None) -> Any:
    input = input if dtype is None else input.astype(dtype)
    return (
        ops.softmax(input, axis=dim)
        if input.shape
        else shaped(ops.softmax(shaped(input, (1,)), axis=0), ())
    )


def _log_softmax(input: Any, dim: int, dtype: Any = None) -> Any:
    input = input if dtype is None else input.astype(dtype)
    if input.dtype != mindspore.float64:
        return ops.log_softmax(input, axis=dim)
    off = input - ops.stop_gradient(
        mint.amax(input, dim, keepdim=True)
    )  # its kernel rounds to float32
    return off - mint.log(mint.sum(mint.exp(off), dim, keepdim=True))


def _logsumexp(input: Any, dim: Any, keepdim: bool = False) -> Any:
    return ops.logsumexp(input, dims_of(input, dim), keepdim)


def _nanmean(
    input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    there = mint.logical_not(mint.isnan(input))
    input = input if dtype is None else input.astype(dtype)
    dims = dims_of(input, dim)
    values = mint.where(there, input, ops.zeros((), input.dtype))
    return mint.sum(values, dims, keepdim) / mint.sum(
        there.astype(input.dtype), dims, keepdim
    )


def _count_nonzero(input: Any, dim: Any = None) -> Any:
    return mint.sum((input != 0).astype(mindspore.int64), dims_of(input, dim))


# --- variance


def _spread(input: Any, dim: Any, correction: Any, keepdim: bool) -> tuple[Any, Any]:
    dims = dims_of(input, dim)
    count = math.prod(input.shape[d] for d in dims)
    mean = mint.mean(input, dims, keepdim=True)
    off = input - mean
    variance = mint.sum(off * off, dims, keepdim) / numbers(
        input, max(count - correction, 0)
    )
    return variance, mean if keepdim else mint.sum(mean, dims)


def _variance(*, root: bool = False, with_mean: bool = False) -> Callable[..., Any]:
    def run(
        input: Any,
        dim: Any = None,
        unbiased: Any = None,
        keepdim: bool = False,
        *,
        correction: float | None = None,
    ) -> Any:
        if isinstance(dim, bool):  # the one argument may be this
            dim, unbiased = None, dim
        if correction is None:
            correction = 1 if unbiased is None else int(unbiased)
        variance, mean = _spread(input, dim, correction, keepdim)
        found = mint.sqrt(variance) if root else variance
        return (found, mean) if with_mean else found

    return run


# --- norms


def _vector_norm(
    input: Any,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Any:
    input = input if dtype is None else input.astype(dtype)
    dims, size = dims_of(input, dim), mint.abs(input)
    if not input.shape:
        return size
    if ord in (math.inf, -math.inf):
        return (mint.amax if ord > 0 else mint.amin)(size, dims, keepdim)
    if ord == 0:
        return mint.sum((input != 0).astype(input.dtype), dims, keepdim)
    if ord == 1:
        return mint.sum(size, dims, keepdim)
    if ord == 2:
        return _root(mint.sum(input * input, dims, keepdim))
    return mint.pow(
        mint.sum(mint.pow(size, numbers(input, ord)), dims, keepdim),
        numbers(input, 1 / ord),
    )


def _root(squares: Any) -> Any:
    """The square root, with a gradient of zero where it is zero."""
    zero = squares == 0
    safe = mint.where(zero, ops.ones((), squares.dtype), squares)
    return mint.where(zero, ops.zeros((), squares.dtype), mint.sqrt(safe))


def _matrix_norm(
    input: Any,
    ord: Any = "fro",
    dim: Any = (-2, -1),
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Any:
    if ord == "fro":
        return _vector_norm(input, 2, dim, keepdim, dtype=dtype)
    rows, columns = dims_of(input, tuple(dim))
    if ord not in ("nuc", 1, -1, 2, -2, math.inf, -math.inf):
        raise ValueError(
            f"matrix_norm: expected 'fro', 'nuc', 1, 2 or inf, or one of them negative, as ord, got {ord!r}"
        )
    if ord in ("nuc", 2, -2):
        return _by_singular_values(
            input if dtype is None else input.astype(dtype), ord, rows, columns, keepdim
        )
    summed, searched = (rows, columns) if abs(ord) == 1 else (columns, rows)
    sums = _vector_norm(input, 1, summed, True, dtype=dtype)
    found = _vector_norm(sums, math.inf if ord > 0 else -math.inf, searched, True)
    return found if keepdim else mint.sum(found, (rows, columns))


def _by_singular_values(
    input: Any, ord: Any, rows: int, columns: int, keepdim: bool
) -> Any:
    others = [d for d in range(len(input.shape)) if d not in (rows, columns)]
    values = ops.svd(mint.permute(input, (*others, rows, columns)), compute_uv=False)
    found = (
        mint.sum(values, -1)
        if ord == "nuc"
        else _extreme(mint.amax if ord == 2 else mint.amin)(values, -1)
    )
    return (
        shaped(
            found, [1 if d in (rows, columns) else n for d, n in enumerate(input.shape)]
        )
        if keepdim
        else found
    )


def _cond(input: Any, p: Any = None) -> Any:
    if p in (None, 2, -2):
        values = ops.svd(input, compute_uv=False)
        large, small = (
            _extreme(reduce)(values, -1) for reduce in (mint.amax, mint.amin)
        )
        return small / large if p == -2 else large / small
    return _matrix_norm(input, p) * _matrix_norm(ops.inverse(input), p)


def _norm(
    input: Any,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    dtype: Any = None,
) -> Any:
    if p == "nuc":
        return _matrix_norm(
            input, p, (-2, -1) if dim is None else dim, keepdim, dtype=dtype
        )
    return _vector_norm(
        input, 2 if p in (None, "fro") else p, dim, keepdim, dtype=dtype
    )


def _linalg_norm(
    input: Any,
    ord: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Any:
    is_matrix = (
        not isinstance(dim, int) and len(input.shape if dim is None else dim) == 2
    )
    if ord is None or not is_matrix:
        return _vector_norm(input, 2 if ord is None else ord, dim, keepdim, dtype=dtype)
    return _matrix_norm(
        input, ord, (0, 1) if dim is None else dim, keepdim, dtype=dtype
    )


def _dist(input: Any, other: Any, p: float = 2) -> Any:
    return _vector_norm(input - other, p)


# --- order


def _argument(find: Callable[..., Any]) -> Callable[..., Any]:
    def run(input: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            found = find(shaped(input, (-1,)), 0, False).astype(mindspore.int64)
            return shaped(found, (1,) * len(input.shape) if keepdim else ())
        return find(input, dim, keepdim).astype(mindspore.int64)

    return run


def _sort(
    input: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> Any:
    if not input.shape:
        return input, ops.zeros((), mindspore.int32)
    if not stable and input.dtype == mindspore.float64:
        return ops.topk(
            input, input.shape[dim], dim, descending
        )  # the kernel of sort rounds to float32
    if not stable:
        return ops.sort(input, dim, descending)
    order = _stable_order(ops.stop_gradient(input), dim % len(input.shape), descending)
    return mint.gather(input, dim, order), order.astype(mindspore.int32)


def _stable_order(input: Any, dim: int, descending: bool) -> Any:
    """Where what is sorted comes from: MindSpore does not say which of equals is first, so that no two may be equal."""
    size, none = input.shape[dim], None
    if (
        input.is_floating_point()
    ):  # what is no number lies beyond all numbers, and its kernel does not know
        none = mint.isnan(input)
        input = mint.where(none, numbers(input, math.inf), input)
    values, order = _sort(input, dim, descending)
    differs = mint.narrow(values, dim, 0, size - 1) != mint.narrow(
        values, dim, 1, size - 1
    )
    first = ops.zeros(
        tuple(1 if d == dim else n for d, n in enumerate(input.shape)), mindspore.int64
    )
    level = mint.cat((first, ops.cumsum(differs.astype(mindspore.int64), dim)), dim)
    levels = ops.tensor_scatter_elements(
        ops.zeros_like(level), order.astype(mindspore.int64), level, dim
    )
    if none is not None:
        levels = levels * 2 + (mint.logical_not(none) if descending else none).astype(
            mindspore.int64
        )
    places = shaped(
        Tensor(np.arange(size)),
        [-1 if d == dim else 1 for d in range(len(input.shape))],
    )
    return ops.sort(levels * size + places, dim)[1].astype(mindspore.int64)


def _kthvalue(input: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    if not input.shape:
        return input, ops.zeros((), mindspore.int64)
    values, order = _sort(input, dim)
    found = [
        mint.narrow(one, dim, k - 1, 1)
        for one in (values, order.astype(mindspore.int64))
    ]
    return tuple(found if keepdim else (mint.squeeze(one, dim) for one in found))


def _topk(
    input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    if not input.shape:
        return input, ops.zeros((), mindspore.int32)
    if k == 0:
        none = tuple(
            slice(0, 0 if d == dim % len(input.shape) else None)
            for d in range(len(input.shape))
        )
        return input[none], ops.zeros(tuple(input[none].shape), mindspore.int32)
    return ops.topk(input, k, dim, largest, sorted)


_BETWEEN: dict[str, Callable[[float], float]] = {
    "lower": np.floor,
    "higher": np.ceil,
    "nearest": np.round,
}


def _quantile(
    input: Any,
    q: Any,
    dim: Any = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> Any:
    """Between those of the sorted elements that are next to it."""
    _check_interpolation(interpolation)
    dims = dims_of(input, dim)
    kept = [1 if d in dims else n for d, n in enumerate(input.shape)]
    last = shaped(input, (-1,)) if dim is None else mint.transpose(input, dim, -1)
    values, largest = _sort(last)[0], last.shape[-1] - 1
    lacking = mint.sum(mint.isnan(last).astype(mindspore.int32), -1, keepdim=True) > 0
    share = np.asarray(q.asnumpy() if isinstance(q, Tensor) else q, np.float64)
    shape = kept if keepdim else [n for d, n in enumerate(input.shape) if d not in dims]
    found = []
    for place in map(_BETWEEN.get(interpolation, float), share.reshape(-1) * largest):
        quantile = _interpolate(values, place, interpolation)
        quantile = mint.where(lacking, numbers(input, math.nan), quantile)
        if dim is not None:
            quantile = mint.transpose(quantile, dim, -1)
        found.append(shaped(quantile, shape))
    return shaped(ops.stack(found, 0), (*share.shape, *shape))


def _check_interpolation(interpolation: str) -> None:
    known = ("linear", "midpoint", *_BETWEEN)
    if interpolation not in known:
        raise ValueError(
            f"quantile: expected one of {', '.join(known)} as interpolation, got {interpolation!r}"
        )


def _interpolate(values: Any, place: float, interpolation: str) -> Any:
    """The value at a place between two of the sorted elements, along the last dim."""
    below = rows(values, [np.floor(place)], -1)
    above = rows(values, [np.ceil(place)], -1)
    ahead = place % 1
    if not ahead:
        return below
    if interpolation == "midpoint":
        ahead = 0.5
    return below + (above - below) * numbers(values, ahead)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sum": _sum_like(mint.sum),
    "mean": _sum_like(mint.mean),
    "prod": _prod,
    "nanmean": _nanmean,
    "count_nonzero": _count_nonzero,
    "amax": _extreme(mint.amax),
    "amin": _extreme(mint.amin),
    "aminmax": _aminmax,
    "all": _truth(is_all=True),
    "any": _truth(is_all=False),
    "argmax": _argument(ops.argmax),
    "argmin": _argument(ops.argmin),
    "softmax": _softmax,
    "softmin": lambda input, dim, dtype=None: _softmax(-input, dim, dtype),
    "log_softmax": _log_softmax,
    "logsumexp": _logsumexp,
    "var": _variance(),
    "std": _variance(root=True),
    "var_mean": _variance(with_mean=True),
    "std_mean": _variance(root=True, with_mean=True),
    "vector_norm": _vector_norm,
    "matrix_norm": _matrix_norm,
    "norm": _norm,
    "dist": _dist,
    "linalg_norm": _linalg_norm,
    "cumsum": lambda input, dim, *, dtype=None: ops.cumsum(input, dim, dtype),
    "sort": _sort,
    "argsort": lambda input, dim=-1, descending=False, *, stable=False: _sort(
        input, dim, descending, stable=stable
    )[1],
    "msort": lambda input: _sort(input, 0)[0],
    "topk": _topk,
    "kthvalue": _kthvalue,
    "quantile": _quantile,
    "linalg_cond": _cond,
}
