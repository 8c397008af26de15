# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A001, A002 - operands have the names that the rules give them
"""Differences between neighbours, areas below them, and distances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore

from hyper_parallel.platform.mindspore.cpu.functions.reductions import (
    FUNCTIONS as REDUCTIONS,
)
from hyper_parallel.platform.mindspore.cpu.functions.shared import (
    mint,
    numbers,
    ops,
    shaped,
)

vector_norm = REDUCTIONS["vector_norm"]


def _ends(input: Any, dim: int) -> tuple[Any, Any]:
    """All along a dim but the last, and all but the first."""
    size = max(input.shape[dim] - 1, 0)
    return mint.narrow(input, dim, 0, size), mint.narrow(
        input, dim, input.shape[dim] - size, size
    )


def _diff(
    input: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None
) -> Any:
    if n == 0:  # nothing is put beside it then
        return input
    parts = [part for part in (prepend, input, append) if part is not None]
    input = mint.cat(parts, dim) if len(parts) > 1 else input
    for _ in range(n):
        before, after = _ends(input, dim)
        input = (
            mint.logical_xor(after, before)
            if input.dtype == mindspore.bool_
            else after - before
        )
    return input


def _areas(y: Any, x: Any, dx: Any, dim: int) -> Any:
    before, after = _ends(y, dim)
    sums = (before + after) * numbers(y, 0.5)
    if x is None:
        return sums * numbers(y, dx)
    if len(x.shape) == 1:
        shape = [1] * len(y.shape)
        shape[dim] = -1
        x = shaped(x, shape)
    elif len(x.shape) < len(y.shape):
        x = shaped(x, (*(1,) * (len(y.shape) - len(x.shape)), *x.shape))
    return sums * _diff(x, dim=dim)


def _trapezoid(y: Any, x: Any = None, *, dx: Any = 1, dim: int = -1) -> Any:
    return mint.sum(_areas(y, x, dx, dim), dim)


def _cumulative_trapezoid(y: Any, x: Any = None, *, dx: Any = 1, dim: int = -1) -> Any:
    return ops.cumsum(_areas(y, x, dx, dim), dim)


def _cdist(input: Any, other: Any, p: float = 2.0, compute_mode: Any = None) -> Any:  # noqa: ARG001 - one is exact
    return vector_norm(mint.unsqueeze(input, -2) - mint.unsqueeze(other, -3), p, -1)


def _renorm(input: Any, p: float, dim: int, maxnorm: float) -> Any:
    others = tuple(d for d in range(len(input.shape)) if d != dim % len(input.shape))
    norms = vector_norm(input, p, others, True)
    shrunk = numbers(input, maxnorm) / (norms + numbers(input, 1e-7))
    return input * mint.where(
        norms > numbers(input, maxnorm), shrunk, ops.ones_like(norms)
    )


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "diff": _diff,
    "trapezoid": _trapezoid,
    "trapz": _trapezoid,
    "cumulative_trapezoid": _cumulative_trapezoid,
    "cdist": _cdist,
    "renorm": _renorm,
}
