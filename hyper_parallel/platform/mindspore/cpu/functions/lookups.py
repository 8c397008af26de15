# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A001, A002, A006 - operands have the names that the rules give them
"""Operators that read or write by index."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor

from hyper_parallel.platform.mindspore.cpu.empty_shards import kernels
from hyper_parallel.platform.mindspore.cpu.functions.shared import (
    mint,
    numbers,
    ops,
    refuse,
    rows,
    shaped,
)


def _getitem(input: Any, index: Any) -> Any:
    # A tensor that is told of its operators does it by itself.
    return (
        input[index] if hasattr(input, "_plain") else Tensor.__getitem__(input, index)
    )


def _setitem(input: Any, index: Any, value: Any) -> Any:
    if hasattr(input, "_plain"):
        input[index] = value
    else:
        Tensor.__setitem__(input, index, value)
    return input


# --- reads


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001 - of max_norm
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    refuse(
        "embedding",
        max_norm=max_norm,
        scale_grad_by_freq=scale_grad_by_freq,
        sparse=sparse,
    )
    found = ops.gather(weight, input, 0)
    if padding_idx is None:
        return found
    padding = padding_idx % weight.shape[0]
    return mint.where(
        mint.unsqueeze(input != padding, -1), found, ops.stop_gradient(found)
    )


def _gather(input: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    refuse("gather", sparse_grad=sparse_grad)
    return mint.gather(input, dim, index)


def _one_hot(input: Any, num_classes: int = -1) -> Any:
    num_classes = int(mint.max(input)) + 1 if num_classes == -1 else num_classes
    return ops.one_hot(input, num_classes).astype(mindspore.int64)


def _take(input: Any, index: Any) -> Any:
    """The elements at places among all."""
    size = input.size
    return rows(
        shaped(input, (-1,)),
        shaped(mint.where(index < 0, index + size, index), (-1,)),
        0,
    ).reshape(index.shape)


def _searchsorted(
    sorted_sequence: Any,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    refuse("searchsorted", sorter=sorter)
    last = right or side == "right"
    edges, values = mint.unsqueeze(sorted_sequence, -2), mint.unsqueeze(input, -1)
    below = edges <= values if last else edges < values
    return mint.sum(below.astype(mindspore.int64), -1).astype(
        mindspore.int32 if out_int32 else mindspore.int64
    )


def _bucketize(
    input: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False
) -> Any:
    return _searchsorted(boundaries, input, out_int32=out_int32, right=right)


def _isin(
    elements: Any,
    test_elements: Any,
    *,
    assume_unique: bool = False,  # noqa: ARG001
    invert: bool = False,
) -> Any:
    same = mint.unsqueeze(elements, -1) == shaped(test_elements, (-1,))
    found = mint.sum(same.astype(mindspore.int32), -1) > 0
    return mint.logical_not(found) if invert else found


# --- writes


def _written(input: Any, source: Any, places: Any, dim: int) -> Any:
    """The tensor with rows of a dim from another, at places that are known; the last of several counts."""
    taken = np.arange(input.shape[dim])
    taken[np.asarray(places, int)] = input.shape[dim] + np.arange(len(places))
    return rows(mint.cat((input, source.astype(input.dtype)), dim), taken, dim)


def _select_scatter(input: Any, src: Any, dim: int, index: int) -> Any:
    return _written(input, mint.unsqueeze(src, dim % len(input.shape)), [index], dim)


def _slice_scatter(
    input: Any,
    src: Any,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    return _written(input, src, range(input.shape[dim])[start:end:step], dim)


def _diagonal_scatter(
    input: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Any:
    ndim = len(input.shape)
    order = [d for d in range(ndim) if d not in (dim1 % ndim, dim2 % ndim)] + [
        dim1 % ndim,
        dim2 % ndim,
    ]
    last = mint.permute(input, tuple(order))
    high, wide = last.shape[-2:]
    places = np.arange(high * wide).reshape(high, wide).diagonal(offset)
    found = _written(shaped(last, (*last.shape[:-2], high * wide)), src, places, -1)
    return mint.permute(
        shaped(found, last.shape), tuple(int(d) for d in np.argsort(order))
    )


def _spread(index: Any, source: Any, dim: int) -> Any:
    """The index of every element of rows, which one index is for."""
    shape = [1] * len(source.shape)
    shape[dim] = -1
    return mint.broadcast_to(shaped(index, shape), tuple(source.shape))


def _scatter(
    input: Any,
    dim: int,
    index: Any,
    src: Any = None,
    *,
    value: Any = None,
    reduce: Any = None,
) -> Any:
    if reduce not in (None, "add"):
        raise NotImplementedError(
            f"scatter: MindSpore has 'add' as reduce, not {reduce!r}; use scatter_reduce"
        )
    src = value if src is None else src
    src = src if isinstance(src, Tensor) and src.shape else _filled(index, src, input)
    return _put(input, dim, index, src, reduce or "none")


def _filled(like: Any, value: Any, dtype_of: Any) -> Any:
    if isinstance(value, Tensor):
        return mint.broadcast_to(value.astype(dtype_of.dtype), tuple(like.shape))
    return ops.full(tuple(like.shape), value, dtype=dtype_of.dtype)


def _put(input: Any, dim: int, index: Any, src: Any, how: str) -> Any:
    for d, size in enumerate(index.shape):  # more than the index has does not count
        src = src if src.shape[d] == size else mint.narrow(src, d, 0, size)
    put = _added if how == "add" else _placed
    return kernels.run("scatter", put, (input, dim, index, src), {}, is_fine=False)


def _placed(input: Any, dim: int, index: Any, src: Any) -> Any:
    return ops.tensor_scatter_elements(input, index, src, dim)


def _added(input: Any, dim: int, index: Any, src: Any) -> Any:
    """By the places in the whole: tensor_scatter_elements loses some of what several threads add to one element."""
    steps = [math.prod(input.shape[d + 1 :]) for d in range(len(input.shape))]
    dim %= len(steps)
    others = np.indices([1 if d == dim else n for d, n in enumerate(index.shape)])
    base = sum(
        (
            at * step
            for d, (at, step) in enumerate(zip(others, steps, strict=True))
            if d != dim
        ),
        np.int64(0),
    )
    places = index.astype(mindspore.int64) * steps[dim] + Tensor(
        np.asarray(base, np.int64)
    )
    found = ops.tensor_scatter_add(
        shaped(input, (-1,)), shaped(places, (-1, 1)), shaped(src, (-1,))
    )
    return shaped(found, input.shape)


def _scatter_add(input: Any, dim: int, index: Any, src: Any) -> Any:
    return _put(input, dim, index, src, "add")


def _scatter_reduce(
    input: Any,
    dim: int,
    index: Any,
    src: Any,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    if reduce not in ("sum", "mean"):
        raise NotImplementedError(
            f"scatter_reduce: MindSpore has sum and mean on this device, not {reduce!r}"
        )
    ones = ops.ones_like(src)
    if not include_self:
        reached = _put(ops.zeros_like(input), dim, index, ones, "add") > 0
        input = input.masked_fill(reached, 0.0)
    total = _put(input, dim, index, src, "add")
    if reduce == "sum":
        return total
    counted = _put(
        ops.ones_like(input) if include_self else ops.zeros_like(input),
        dim,
        index,
        ones,
        "add",
    )
    return total / mint.maximum(counted, ops.ones_like(counted))


def _index_add(input: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    source = source if alpha == 1 else source * numbers(source, alpha)
    return _rows_put(input, dim, index, source, "add")


def _index_copy(input: Any, dim: int, index: Any, source: Any) -> Any:
    return _rows_put(input, dim, index, source, "none")


def _rows_put(input: Any, dim: int, index: Any, source: Any, how: str) -> Any:
    if not input.shape:  # counts as a row of one
        row = _rows_put(
            shaped(input, (1,)), 0, shaped(index, (1,)), shaped(source, (1,)), how
        )
        return shaped(row, ())
    return _put(input, dim, _spread(index, source, dim), source, how)


def _index_fill(input: Any, dim: int, index: Any, value: Any) -> Any:
    places = Tensor(np.arange(input.shape[dim])[:, None])
    reached = (
        mint.sum((places == shaped(index, (1, -1))).astype(mindspore.int32), 1) > 0
    )
    shape = [1] * len(input.shape)
    shape[dim] = -1
    return mint.where(shaped(reached, shape), _filled(input, value, input), input)


def _index_put(
    input: Any, indices: Sequence[Any], values: Any, accumulate: bool = False
) -> Any:
    if any(index is None or index.dtype == mindspore.bool_ for index in indices):
        if len(indices) == 1 and indices[0] is not None and not values.shape:
            mask = shaped(
                indices[0],
                (*indices[0].shape, *(1,) * (len(input.shape) - len(indices[0].shape))),
            )
            value = values.astype(input.dtype)
            return mint.where(mask, input + value if accumulate else value, input)
        raise NotImplementedError(
            "index_put: MindSpore takes indices of the first dims, or a mask for one number"
        )
    shape = np.broadcast_shapes(*(tuple(index.shape) for index in indices))
    wide = [
        mint.broadcast_to(index, shape).astype(mindspore.int64) for index in indices
    ]
    places = ops.stack(
        [
            mint.where(i < 0, i + size, i)
            for i, size in zip(wide, input.shape, strict=False)
        ],
        -1,
    )
    values = mint.broadcast_to(
        values.astype(input.dtype), (*shape, *input.shape[len(indices) :])
    )
    return (ops.tensor_scatter_add if accumulate else ops.tensor_scatter_update)(
        input, places, values
    )


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getitem": _getitem,
    "setitem": _setitem,
    "embedding": _embedding,
    "index_select": lambda input, dim, index: rows(input, index, dim),
    "gather": _gather,
    "one_hot": _one_hot,
    "take": _take,
    "searchsorted": _searchsorted,
    "bucketize": _bucketize,
    "isin": _isin,
    "select_scatter": _select_scatter,
    "slice_scatter": _slice_scatter,
    "diagonal_scatter": _diagonal_scatter,
    "scatter": _scatter,
    "scatter_add": _scatter_add,
    "scatter_add_": _scatter_add,  # into a new tensor: nothing is done in place
    "scatter_reduce": _scatter_reduce,
    "index_add": _index_add,
    "index_copy": _index_copy,
    "index_fill": _index_fill,
    "index_put": _index_put,
    "fill": lambda input, value: _filled(input, value, input),
}
