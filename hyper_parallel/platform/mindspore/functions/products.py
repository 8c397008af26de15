# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002, A006, PLW0108 - operands have the names that the rules give them
"""Products of matrices and vectors, all of them by ``matmul``, which has a kernel on every device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.platform.mindspore.functions.shared import mint, numbers, ops, shaped


def _dot(input: Any, tensor: Any) -> Any:
    return mint.sum(input * tensor)


def _outer(input: Any, vec2: Any) -> Any:
    return mint.unsqueeze(input, 1) * vec2


def _added(product: Any, input: Any, beta: Any, alpha: Any) -> Any:
    """``beta * input + alpha * product``; where beta is zero, whatever the input holds does not count."""
    scaled = product if alpha == 1 else product * numbers(product, alpha)
    if beta == 0:
        return scaled
    return scaled + (input if beta == 1 else input * numbers(input, beta))


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _added(mint.matmul(mat1, mat2), input, beta, alpha)


def _addmv(input: Any, mat: Any, vec: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _added(mint.matmul(mat, vec), input, beta, alpha)


def _addr(input: Any, vec1: Any, vec2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _added(_outer(vec1, vec2), input, beta, alpha)


def _addbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _added(mint.sum(mint.matmul(batch1, batch2), 0), input, beta, alpha)


def _baddbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _added(mint.matmul(batch1, batch2), input, beta, alpha)


def _inner(input: Any, other: Any) -> Any:
    if not input.shape or not other.shape:
        return input * other
    return _tensordot(input, other, ([-1], [-1]))


def _tensordot(a: Any, b: Any, dims: Any = 2) -> Any:
    if isinstance(dims, int):
        dims = (range(len(a.shape) - dims, len(a.shape)), range(dims))
    left, right = ([d % len(x.shape) for d in ds] for x, ds in zip((a, b), dims, strict=True))
    wide = tuple(b.shape[j] if a.shape[i] == 1 else a.shape[i] for i, j in zip(left, right, strict=True))
    kept = [[d for d in range(len(x.shape)) if d not in ds] for x, ds in ((a, left), (b, right))]
    sizes = [[x.shape[d] for d in ds] for x, ds in zip((a, b), kept, strict=True)]
    count = math.prod(wide)
    first = mint.broadcast_to(mint.permute(a, (*kept[0], *left)), (*sizes[0], *wide))
    second = mint.broadcast_to(mint.permute(b, (*right, *kept[1])), (*wide, *sizes[1]))
    product = mint.matmul(shaped(first, (math.prod(sizes[0]), count)), shaped(second, (count, math.prod(sizes[1]))))
    return shaped(product, (*sizes[0], *sizes[1]))


def _bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    outputs, one, two = weight.shape
    batch = tuple(input1.shape[:-1])
    pairs = shaped(mint.unsqueeze(input1, -1) * mint.unsqueeze(input2, -2), (*batch, one * two))
    found = mint.matmul(pairs, mint.transpose(shaped(weight, (outputs, one * two)), 0, 1))
    return found if bias is None else found + bias


def _multi_dot(*input: Any) -> Any:
    matrices = input[0] if len(input) == 1 and isinstance(input[0], (list, tuple)) else input
    return functools.reduce(mint.matmul, matrices)


# --- einsum


def _einsum(equation: str, *operands: Any) -> Any:
    """Two operands at a time, each pair by one product of matrices."""
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    inputs, output = _labels(equation, [len(x.shape) for x in tensors])
    terms = [_diagonals(x, label) for x, label in zip(tensors, inputs, strict=True)]
    sizes: dict[str, int] = {}
    for x, label in terms:
        for name, size in zip(label, x.shape, strict=True):
            sizes[name] = sizes.get(name, size) if size == 1 else size
    terms = [(mint.broadcast_to(x, tuple(sizes[name] for name in label)), label) for x, label in terms]
    found, label = terms[0]
    for i, (other, its) in enumerate(terms[1:], 2):
        needed = {*output, *(name for _, more in terms[i:] for name in more)}
        found, label = _contracted(found, label, other, its, needed, sizes)
    dropped = tuple(d for d, name in enumerate(label) if name not in output)
    found = mint.sum(found, dropped) if dropped else found
    left = [name for name in label if name in output]
    return mint.permute(found, tuple(left.index(name) for name in output)) if left else found


def _labels(equation: str, ndims: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """A name for every dim of every operand and of the result; those of an ellipsis are numbers from the end."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")

    def named(text: str, dots: int) -> list[str]:
        before, ellipsis, after = text.partition("...")
        return [*before, *(str(n) for n in range(dots if ellipsis else 0, 0, -1)), *after]

    spread = [ndim - len(text.replace("...", "")) for text, ndim in zip(texts, ndims, strict=True)]
    inputs = [named(text, dots) for text, dots in zip(texts, spread, strict=True)]
    if arrow:
        return inputs, named(right, max(spread))
    once = sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1)
    return inputs, named("..." * ("..." in left) + "".join(once), max(spread))


def _diagonals(x: Any, label: list[str]) -> tuple[Any, list[str]]:
    """The operand with every name once."""
    while len(set(label)) < len(label):
        name = next(one for one in label if label.count(one) > 1)
        first = label.index(name)
        second = label.index(name, first + 1)
        x = ops.diagonal(x, 0, first, second)  # which puts it last
        label = [one for d, one in enumerate(label) if d not in (first, second)] + [name]
    return x, label


def _contracted(
    x: Any, its: list[str], y: Any, others: list[str], needed: set[str], sizes: dict[str, int]
) -> tuple[Any, list[str]]:
    """The product of two operands, summed over what both have and nobody needs."""
    batch = [name for name in its if name in others and name in needed]
    summed = [name for name in its if name in others and name not in needed]
    mine = [name for name in its if name not in others]
    theirs = [name for name in others if name not in its]

    def matrix(tensor: Any, label: list[str], *groups: list[str]) -> Any:
        order = tuple(label.index(name) for group in (batch, *groups) for name in group)
        shape = [sizes[name] for name in batch] + [math.prod(sizes[n] for n in group) for group in groups]
        return shaped(mint.permute(tensor, order) if order else tensor, shape)

    found = mint.matmul(matrix(x, its, mine, summed), matrix(y, others, summed, theirs))
    label = [*batch, *mine, *theirs]
    return shaped(found, [sizes[name] for name in label]), label


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "mm": lambda input, mat2: mint.matmul(input, mat2),
    "bmm": lambda input, mat2: mint.matmul(input, mat2),
    "mv": lambda input, vec: mint.matmul(input, vec),
    "dot": lambda input, tensor: _dot(input, tensor),
    "vdot": lambda input, other: _dot(input.conj() if input.is_complex() else input, other),
    "outer": _outer,
    "ger": _outer,
    "addmm": _addmm,
    "addmv": _addmv,
    "addr": _addr,
    "addbmm": _addbmm,
    "baddbmm": _baddbmm,
    "inner": _inner,
    "tensordot": _tensordot,
    "bilinear": _bilinear,
    "multi_dot": _multi_dot,
    "chain_matmul": _multi_dot,
    "einsum": _einsum,
    "inverse": lambda input: ops.inverse(input),
    "linalg_vecdot": lambda x, y, *, dim=-1: mint.sum((x.conj() if x.is_complex() else x) * y, dim),
}
