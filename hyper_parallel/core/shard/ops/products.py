# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002 - operands have the names that torch gives them
"""Products: sums over contracted dims, linear in every factor of the product.

linear  "... k, n k, +n -> ... n"          addmm   "+m n, m k, k n -> m n"          einsum   its own equation
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.shard.notation import from_equation
from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.rule import Rule, einsum

# Where a k is sharded the operand that is added joins the sum in parts, so beta times it is right as well.
TABLE = [
    ("linear", "input, weight, bias=None", "... k, n k, +n -> ... n"),
    ("mm", "input, mat2", "m k, k n -> m n"),
    ("bmm", "input, mat2", "b m k, b k n -> b m n"),
    ("mv", "input, vec", "m k, k -> m"),
    ("dot", "input, tensor", "k, k ->"),
    ("vdot", "input, other", "k, k ->"),
    ("outer ger", "input, vec2", "m, n -> m n"),
    ("addmm", "input, mat1, mat2, *, beta=1, alpha=1", "+m n, m k, k n -> m n"),
    ("addmv", "input, mat, vec, *, beta=1, alpha=1", "+m, m k, k -> m"),
    ("addr", "input, vec1, vec2, *, beta=1, alpha=1", "+m n, m, n -> m n"),
    (
        "addbmm",
        "input, batch1, batch2, *, beta=1, alpha=1",
        "+m n, b m k, b k n -> m n",
    ),
    (
        "baddbmm",
        "input, batch1, batch2, *, beta=1, alpha=1",
        "+b m n, b m k, b k n -> b m n",
    ),
    (
        "bilinear",
        "input1, input2, weight, bias=None",
        "... i!, ... j!, o i! j!, +o -> ... o",
    ),
]
for names, parameters, text in TABLE:
    operator(names, parameters, einsum(text))

# --- rules that depend on the numbers of dims

MATMUL = {
    (True, True): einsum("k, k ->"),
    (True, False): einsum("k, ... k n -> ... n"),
    (False, True): einsum("... m k, k -> ... m"),
    (False, False): einsum("... m k, ... k n -> ... m n"),
}


def _matmul(input: Any, other: Any) -> Rule:
    return MATMUL[len(input.shape) == 1, len(other.shape) == 1]


def _rmatmul(input: Any, other: Any) -> RuleForCall:
    return RuleForCall(_matmul(other, input), operands=[other, input])


def _named(letter: str, count: int) -> list[str]:
    return [f"{letter}{i}" for i in range(count)]


def _contraction(
    operands: Sequence[Sequence[str]], result: Sequence[str], broadcast: str = "none"
) -> Rule:
    return einsum(
        f"{', '.join(map(' '.join, operands))} -> {' '.join(result)}", broadcast
    )


def _inner(input: Any, other: Any) -> Rule:
    if not input.shape or not other.shape:
        return einsum("..., ... -> ...")
    left, right = _named("l", len(input.shape) - 1), _named("r", len(other.shape) - 1)
    return _contraction([[*left, "k"], [*right, "k"]], [*left, *right])


def _tensordot(a: Any, b: Any, dims: Any) -> Rule | None:
    left, right = _named("l", len(a.shape)), _named("r", len(b.shape))
    if isinstance(dims, int):
        dims = range(len(left) - dims, len(left)), range(dims)
    elif not isinstance(dims, (list, tuple)):
        return None  # a tensor, whose values are not known here
    for i, (mine, yours) in enumerate(
        zip(*((d,) if isinstance(d, int) else d for d in dims), strict=True)
    ):
        left[mine] = right[yours] = f"k{i}"
    kept = [name for name in (*left, *right) if not name.startswith("k")]
    return _contraction([left, right], kept, broadcast="all")


def _chain(input: Sequence[Any]) -> RuleForCall:
    """A product of matrices, of which the first and the last may be vectors."""
    last = len(input) - 1
    names = [[f"k{i}", f"k{i + 1}"] for i in range(last + 1)]
    if len(input[0].shape) == 1:
        names[0] = ["k1"]
    if len(input[last].shape) == 1:
        names[last] = [f"k{last}"]
    kept = [
        name
        for name in (names[0][0], names[last][-1])
        if name in ("k0", f"k{last + 1}")
    ]
    return RuleForCall(_contraction(names, kept), operands=list(input))


def _einsum(equation: str, operands: Sequence[Any]) -> RuleForCall:
    return RuleForCall(
        einsum(from_equation(equation), broadcast="all"), operands=list(operands)
    )


operator("matmul", "input, other", _matmul)
operator("rmatmul", "input, other", _rmatmul)
operator("inner", "input, other", _inner)
operator("tensordot", "a, b, dims=2", _tensordot)
operator("multi_dot chain_matmul", "*input", _chain)
operator("einsum", "equation, *operands", _einsum)
