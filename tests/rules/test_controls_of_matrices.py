# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002 - operands have the names that torch gives them
"""Controls: what is broken on purpose in the rules of order, matrices and differences is found."""

from unittest import mock

import pytest
from rules.cases import differences, linear_algebra, ordering
from rules.faults import is_found, itself, linear, unmarked
from rules.framework import torch, unruled_is_an_error
from rules.outcomes import found_here, known
from rules.test_dispatch import compare

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.ops import linear_algebra as matrices
from hyper_parallel.core.shard.ops import ordering as order
from hyper_parallel.core.shard.rule import Rule, einsum
from hyper_parallel.testing import run_ranks

FAMILIES = (differences, linear_algebra, ordering)
CASES = {
    case.name: case
    for family in FAMILIES
    for case in [*family.CASES, *family.COMPOSITES]
}

BROKEN = [  # the case, the operator, what is broken in it, why that is wrong
    ("sort", "sort", unmarked("sort"), "the whole mark is lost"),
    ("argsort", "argsort", unmarked("argsort"), "the whole mark is lost"),
    ("sort", "sort", linear("sort", (0,)), "not linear"),
    ("solve", "linalg_solve", linear("linalg_solve", (0,)), "not linear in the matrix"),
    ("solve", "linalg_solve", linear("linalg_solve", (0, 1)), "not linear in both"),
    (
        "solve for vectors",
        "linalg_solve",
        {"rule": Rule("... r! c!, ... r! -> ... r!", linear=((0,),))},
        "not linear",
    ),
    (
        "cross",
        "linalg_cross",
        linear("linalg_cross", (0, 1)),
        "linear in each, not in both",
    ),
    (
        "kron",
        "kron",
        {"rule": einsum("a b, c d -> (c a) (d b)")},
        "the inner one for the outer",
    ),
    ("trace", "trace", {"local": itself}, "the diagonal is not shifted"),
    (
        "vecdot",
        "linalg_vecdot",
        {"rule": Rule("... {dim}, ... {dim} -> ...", "avg")},
        "products are summed",
    ),
    (
        "cdist",
        "cdist",
        {"rule": Rule("... r d, ... s d -> ... r s")},
        "a sum of distances",
    ),
    (
        "trapezoid",
        "trapezoid",
        {"rule": Rule("... {dim} -> ...")},
        "what lies between two shards is lost",
    ),
    (
        "trapezoid of places",
        "trapezoid",
        linear("trapezoid", (0, 1)),
        "linear in each, not in both",
    ),
    ("renorm", "renorm", unmarked("renorm", "d0!"), "a norm of a shard"),
    (
        "diagonal_scatter",
        "diagonal_scatter",
        linear("diagonal_scatter", (0,)),
        "the source is written, not added",
    ),
]
HERE = found_here(BROKEN)


@pytest.mark.parametrize(
    ("name", "operator", "broken", "why"),
    HERE,
    ids=[f"{row[0]}: {row[3]}" for row in HERE],
)
def test_a_broken_rule_is_found(name, operator, broken, why):
    is_found(CASES[name], operator, broken)


# --- between real ranks


def best_of(values, indices, k, dim, largest, sorted):
    return values.topk(k, dim, largest, sorted)


def own_bounds(input):
    return input.to_local().min().item(), input.to_local().max().item()


def no_sum(input, *dims):
    return torch.sum(input, *dims) * 0


STAGES = [  # the case, the module, what takes the place of its function, why that is wrong
    (
        "topk of even pieces",
        order,
        "best_of",
        best_of,
        "places among what was gathered",
    ),
    ("histc", order, "_bounds", own_bounds, "bins of a shard"),
    ("cov", matrices, "_sum", no_sum, "there is no mean"),
]


def on_rank(number):
    """Whether the check finds the fault, which is the same on every rank."""
    name, module, function, replacement, _ = STAGES[number]
    base = Layout((4,), ("x",))
    with unruled_is_an_error(), mock.patch.object(module, function, replacement):
        try:
            for seed in range(6):
                compare(CASES[name], "even", base, seed)
        except AssertionError:
            return True
    return False


def test_a_broken_stage_is_found():
    for number, (name, *_, why) in enumerate(STAGES):
        if not known(name).runs:
            continue
        assert run_ranks(on_rank, 4, number) == [True] * 4, f"{name}: {why}"
