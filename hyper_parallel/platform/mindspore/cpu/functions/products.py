# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A001, A002, A006, PLW0108 - operands have the names that the rules give them
"""Products of matrices and vectors, all of them by ``matmul``, which has a kernel on every device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hyper_parallel.platform.mindspore.cpu.functions.shared import (
    dims_of,
    matmul,
    mint,
    numbers,
    ops,
    refuse,
    rows,
    shaped,
)


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
    return _added(matmul(mat1, mat2), input, beta, alpha)


def _addmv(input: Any, mat: Any, vec: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _added(matmul(mat, vec), input, beta, alpha)


def _addr(input: Any, vec1: Any, vec2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return _added(_outer(vec1, vec2), input, beta, alpha)


def _addbmm(
    input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    return _added(mint.sum(matmul(batch1, batch2), 0), input, beta, alpha)


def _baddbmm(
    input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    return _added(matmul(batch1, batch2), input, beta, alpha)


def _inner(input: Any, other: Any) -> Any:
    if not input.shape or not other.shape:
        return input * other
    return _tensordot(input, other, ([-1], [-1]))


def _tensordot(a: Any, b: Any, dims: Any = 2) -> Any:
    if isinstance(dims, int):
        dims = (range(len(a.shape) - dims, len(a.shape)), range(dims))
    left, right = (
        [d % len(x.shape) for d in ds] for x, ds in zip((a, b), dims, strict=True)
    )
    wide = tuple(
        b.shape[j] if a.shape[i] == 1 else a.shape[i]
        for i, j in zip(left, right, strict=True)
    )
    kept = [
        [d for d in range(len(x.shape)) if d not in ds]
        for x, ds in ((a, left), (b, right))
    ]
    sizes = [[x.shape[d] for d in ds] for x, ds in zip((a, b), kept, strict=True)]
    count = math.prod(wide)
    first = mint.broadcast_to(mint.permute(a, (*kept[0], *left)), (*sizes[0], *wide))
    second = mint.broadcast_to(mint.permute(b, (*right, *kept[1])), (*wide, *sizes[1]))
    product = matmul(
        shaped(first, (math.prod(sizes[0]), count)),
        shaped(second, (count, math.prod(sizes[1]))),
    )
    return shaped(product, (*sizes[0], *sizes[1]))


def _bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    outputs, one, two = weight.shape
    batch = tuple(input1.shape[:-1])
    pairs = shaped(
        mint.unsqueeze(input1, -1) * mint.unsqueeze(input2, -2), (*batch, one * two)
    )
    found = matmul(pairs, mint.transpose(shaped(weight, (outputs, one * two)), 0, 1))
    return found if bias is None else found + bias


def _multi_dot(*input: Any) -> Any:
    matrices = (
        input[0] if len(input) == 1 and isinstance(input[0], (list, tuple)) else input
    )
    return functools.reduce(matmul, matrices)


def _cross(input: Any, other: Any, dim: int | None = None) -> Any:
    """Operands of one shape: mint's reads beside those that are stretched."""
    shape = np.broadcast_shapes(tuple(input.shape), tuple(other.shape))
    input, other = (
        x if tuple(x.shape) == shape else mint.broadcast_to(x, shape)
        for x in (input, other)
    )
    (dim,) = dims_of(input, shape.index(3) if dim is None else dim)
    ahead, behind = [1, 2, 0], [2, 0, 1]
    return rows(input, ahead, dim) * rows(other, behind, dim) - rows(
        input, behind, dim
    ) * rows(other, ahead, dim)


# --- of one matrix


def _cholesky_solve(input: Any, input2: Any, upper: bool = False) -> Any:
    """Backward of ops.cholesky_solve rounds to float32."""
    return matmul(_cholesky_inverse(input2, upper), input)


def _cholesky_inverse(input: Any, upper: bool = False) -> Any:
    """The inverse of the matrix of which this is the factor; the gradient is that of a factor without zeros."""
    factor = input + ops.stop_gradient(
        (mint.triu(input) if upper else ops.tril(input)) - input
    )
    turned = mint.transpose(factor, -1, -2)
    return _inverse(matmul(turned, factor) if upper else matmul(factor, turned))


def _inverse(input: Any) -> Any:
    return (
        ops.inverse(input) if input.shape[-1] > 1 else mint.reciprocal(input)
    )  # the kernel wants two rows


def _logdet(input: Any) -> Any:
    alone = input.shape[-1] == 1  # the kernel wants two rows
    return mint.log(shaped(input, input.shape[:-2]) if alone else ops.det(input))


def _matrix_power(A: Any, n: int) -> Any:  # noqa: N803
    """By products: the kernel rounds to float32."""
    if n < 0:
        return _matrix_power(_inverse(A), -n)
    if n == 0:
        return mint.broadcast_to(numbers(A, np.eye(A.shape[-1])), tuple(A.shape))
    return functools.reduce(matmul, [A] * n)


def _vander(x: Any, *, N: int | None = None) -> Any:  # noqa: N803 - as the rule has it
    powers = np.arange(x.shape[-1] if N is None else N)
    return mint.pow(mint.unsqueeze(x, -1), numbers(x, powers))


def _vander_of_one(x: Any, N: int | None = None, increasing: bool = False) -> Any:  # noqa: N803
    found = _vander(x, N=N)
    return found if increasing else mint.flip(found, (1,))


def _pinv(
    input: Any,
    rcond: Any = None,
    hermitian: bool = False,
    *,
    atol: Any = None,
    rtol: Any = None,
) -> Any:
    return ops.pinv(
        input, atol=atol, rtol=rcond if rtol is None else rtol, hermitian=hermitian
    )


def _svd(input: Any, some: bool = True, compute_uv: bool = True) -> Any:
    """ops.svd has the values first."""
    values, left, right = ops.svd(input, not (some and compute_uv))
    if compute_uv:
        return left, values, right
    return ops.zeros_like(left), values, ops.zeros_like(right)


def _linalg_svd(
    A: Any,  # noqa: N803
    full_matrices: bool = True,
    *,
    driver: str | None = None,
) -> Any:
    refuse("linalg_svd", driver=driver)
    values, left, right = ops.svd(A, full_matrices)
    turned = mint.transpose(right, -1, -2)
    return left, values, ops.conj(turned) if turned.is_complex() else turned


# --- einsum


def _einsum(equation: str, *operands: Any) -> Any:
    """Two operands at a time, each pair by one product of matrices."""
    tensors = (
        operands[0]
        if len(operands) == 1 and isinstance(operands[0], (list, tuple))
        else operands
    )
    inputs, output = _labels(equation, [len(x.shape) for x in tensors])
    terms, sizes = _broadcast_terms(tensors, inputs)
    found, label = terms[0]
    for i, (other, its) in enumerate(terms[1:], 2):
        needed = {*output, *(name for _, more in terms[i:] for name in more)}
        found, label = _contracted(found, label, other, its, needed, sizes)
    return _reduce_to(found, label, output)


def _broadcast_terms(
    tensors: Sequence[Any], inputs: Sequence[list[str]]
) -> tuple[list[tuple[Any, list[str]]], dict[str, int]]:
    """The operands with their labels, broadcast to the sizes of the labels; and these sizes."""
    terms = [_diagonals(x, label) for x, label in zip(tensors, inputs, strict=True)]
    sizes: dict[str, int] = {}
    for x, label in terms:
        for name, size in zip(label, x.shape, strict=True):
            sizes[name] = sizes.get(name, size) if size == 1 else size
    broadcast = []
    for x, label in terms:
        shape = tuple(sizes[name] for name in label)
        broadcast.append((mint.broadcast_to(x, shape), label))
    return broadcast, sizes


def _reduce_to(x: Any, label: list[str], output: Sequence[str]) -> Any:
    """Sums the dims that the output lacks, and puts the others in its order."""
    dropped = tuple(d for d, name in enumerate(label) if name not in output)
    if dropped:
        x = mint.sum(x, dropped)
    left = [name for name in label if name in output]
    if not left:
        return x
    return mint.permute(x, tuple(left.index(name) for name in output))


def _labels(equation: str, ndims: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """A name for every dim of every operand and of the result; those of an ellipsis are numbers from the end."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")

    def named(text: str, dots: int) -> list[str]:
        before, ellipsis, after = text.partition("...")
        return [
            *before,
            *(str(n) for n in range(dots if ellipsis else 0, 0, -1)),
            *after,
        ]

    spread = [
        ndim - len(text.replace("...", ""))
        for text, ndim in zip(texts, ndims, strict=True)
    ]
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
        label = [one for d, one in enumerate(label) if d not in (first, second)] + [
            name
        ]
    return x, label


def _contracted(
    x: Any,
    its: list[str],
    y: Any,
    others: list[str],
    needed: set[str],
    sizes: dict[str, int],
) -> tuple[Any, list[str]]:
    """The product of two operands, summed over what both have and nobody needs."""
    batch = [name for name in its if name in others and name in needed]
    summed = [name for name in its if name in others and name not in needed]
    mine = [name for name in its if name not in others]
    theirs = [name for name in others if name not in its]
    left = _as_matrices(x, its, batch, (mine, summed), sizes)
    right = _as_matrices(y, others, batch, (summed, theirs), sizes)
    label = [*batch, *mine, *theirs]
    return shaped(matmul(left, right), [sizes[name] for name in label]), label


def _as_matrices(
    x: Any,
    label: list[str],
    batch: list[str],
    groups: tuple[list[str], list[str]],
    sizes: dict[str, int],
) -> Any:
    """A batch of matrices, whose rows and columns are these two groups of dims."""
    rows, columns = groups
    order = tuple(label.index(name) for name in (*batch, *rows, *columns))
    shape = [sizes[name] for name in batch]
    for group in groups:
        shape.append(math.prod(sizes[name] for name in group))
    return shaped(mint.permute(x, order) if order else x, shape)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "matmul": matmul,
    "mm": lambda input, mat2: matmul(input, mat2),
    "bmm": lambda input, mat2: matmul(input, mat2),
    "mv": lambda input, vec: matmul(input, vec),
    "dot": lambda input, tensor: _dot(input, tensor),
    "vdot": lambda input, other: _dot(
        input.conj() if input.is_complex() else input, other
    ),
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
    "cross": _cross,
    "linalg_cross": lambda input, other, *, dim=-1: _cross(input, other, dim),
    "inverse": _inverse,
    "logdet": _logdet,
    "matrix_power": lambda input, n: _matrix_power(input, n),
    "linalg_inv": lambda A: _inverse(A),  # noqa: N803 - as the rule has it
    "cholesky_solve": _cholesky_solve,
    "cholesky_inverse": _cholesky_inverse,
    "svd": _svd,
    "linalg_svd": _linalg_svd,
    "linalg_svdvals": lambda A, *, driver=None: _linalg_svd(A, False, driver=driver)[1],  # noqa: N803
    "linalg_eig": lambda input: ops.eig(input),
    "linalg_eigvals": lambda input: ops.eigvals(input),
    "linalg_matrix_power": _matrix_power,
    "linalg_pinv": _pinv,
    "linalg_qr": lambda A, mode="reduced": ops.qr(A, mode),  # noqa: N803
    "linalg_vander": _vander,
    "vander": _vander_of_one,
    "linalg_vecdot": lambda x, y, *, dim=-1: mint.sum(
        (x.conj() if x.is_complex() else x) * y, dim
    ),
}
