# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002 - operands have the names that the rules give them
"""What the functions of several families need, above all MindSpore's own functions, right for empty tensors too."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor

from hyper_parallel.platform.mindspore.cpu.empty_shards import kernels

Array = Any  # numpy's

# Their kernels have nothing to do where there are no elements.
_FINE = frozenset(
    """
    abs broadcast_to cat exp isnan log log1p logical_not permute pow reshape rsqrt sign sqrt squeeze stop_gradient
    transpose unsqueeze where
    """.split()  # noqa: SIM905 - a list of so many would take a page
)


class _Room:
    """A module of MindSpore's functions."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        usual = getattr(self._module, name)

        @functools.wraps(usual)
        def run(*args: Any, **kwargs: Any) -> Any:
            return kernels.run(name, usual, args, kwargs, is_fine=name in _FINE)

        setattr(self, name, run)
        return run


mint, ops = _Room(mindspore.mint), _Room(mindspore.ops)


def dims_of(input: Any, dim: Any) -> tuple[int, ...]:
    """The dims that are meant, none of them negative; all where none is named."""
    ndim = max(len(input.shape), 1)
    if isinstance(dim, int):
        dim = (dim,)
    return tuple(d % ndim for d in dim) if dim else tuple(range(len(input.shape)))


def rows(input: Any, index: Any, dim: int) -> Any:
    """The rows of a dim at places that are known to be in it: an array of any shape, or a tensor of one dim."""
    index = (
        Tensor(np.asarray(index, np.int32))
        if not isinstance(index, Tensor)
        else index.astype(mindspore.int32)
    )
    return ops.gather(input, index, dim % len(input.shape))


def along(input: Any, dim: int, matrix: Array) -> Any:
    """A linear map along one dim: ``matrix`` has a row for every element of the result."""
    last = mint.transpose(input, dim, -1)
    return mint.transpose(
        matmul(last, Tensor(np.ascontiguousarray(matrix.T)).astype(input.dtype)),
        dim,
        -1,
    )


def matmul(input: Any, other: Any) -> Any:
    """The product of matrices, of batches of them, or with vectors.

    Of two dims, or of one batch for both: the gradients of mint's have other shapes, or fail, for batches of one matrix
    and for those of which one has more dims than the other.
    """
    if len(input.shape) <= 2 and len(other.shape) <= 2:
        return mint.matmul(input, other)
    if len(input.shape) == 1:
        return mint.squeeze(matmul(mint.unsqueeze(input, 0), other), -2)
    if len(other.shape) == 1:
        return mint.squeeze(matmul(input, mint.unsqueeze(other, -1)), -1)
    (high, among), wide = input.shape[-2:], other.shape[-1]
    if len(other.shape) == 2:
        rows_of_all = mint.matmul(
            shaped(input, (math.prod(input.shape[:-1]), among)), other
        )
        return shaped(rows_of_all, (*input.shape[:-1], wide))
    batch = np.broadcast_shapes(tuple(input.shape[:-2]), tuple(other.shape[:-2]))
    count = () if math.prod(batch) == 1 else (math.prod(batch),)
    left = shaped(_in_batch(input, batch), (*count, high, among))
    right = shaped(_in_batch(other, batch), (*count, *other.shape[-2:]))
    return shaped(mint.matmul(left, right), (*batch, high, wide))


def _in_batch(matrices: Any, batch: tuple[int, ...]) -> Any:
    shape = (*batch, *matrices.shape[-2:])
    return (
        matrices
        if tuple(matrices.shape) == shape
        else mint.broadcast_to(matrices, shape)
    )


def numbers(like: Any, values: Any) -> Any:
    """Numbers as a tensor of the dtype of another: a bare one would count as a float32."""
    return Tensor(np.asarray(values)).astype(like.dtype)


def as_many(value: Any, count: int) -> tuple[int, ...]:
    """One number for each of so many dims."""
    many = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return many * count if len(many) == 1 else many


def refuse(name: str, **given: Any) -> None:
    """Raises where an argument is given that MindSpore has nothing for."""
    wrong = [
        f"{key}={value!r}" for key, value in given.items() if value not in (None, False)
    ]
    if wrong:
        raise NotImplementedError(
            f"{name}: MindSpore has nothing for {', '.join(wrong)} on this device; leave it out"
        )


def shaped(input: Any, shape: Sequence[int]) -> Any:
    """The elements in another shape."""
    return mint.reshape(input, tuple(shape))
