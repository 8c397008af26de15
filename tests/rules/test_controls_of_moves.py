# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002, A006 - operands have the names that torch gives them
"""Controls: a rule or a local call of the moves, lookups and pointwise operators that is broken on purpose is found."""

import pytest
from rules.cases import indexing, joins, lookups, pointwise, scatters, views
from rules.faults import is_found, linear, local, unmarked
from rules.operators import IS_TORCH
from rules.outcomes import found_here

from hyper_parallel.core.shard.ops.operator import OPERATORS, RuleForCall
from hyper_parallel.core.shard.ops.views import moved, reordered
from hyper_parallel.core.shard.rule import Rule
from hyper_parallel.core.shard.rule import pointwise as elementwise

CASES = {
    case.name: case
    for family in (indexing, joins, lookups, pointwise, scatters, views)
    for case in family.CASES
}


EMBED = OPERATORS["embedding"].local


def unpadded(here, input, weight, **_):
    return EMBED(here, input, weight, None)


def whole_rows(input, index):
    return RuleForCall(
        Rule("... {dim=v}!, j -> ... {dim=j}", linear=((0, 1),)),
        operands=[input, index],
    )


BROKEN = [
    (
        "permute",
        "permute",
        {"rule": lambda **_: reordered((2, 1, 0))},
        "two dims taken for each other",
    ),
    (
        "view splits a dim",
        "view" if IS_TORCH else "reshape",  # which MindSpore's method is
        {"rule": lambda **_: moved(["(o a)", "b"], ["a", "o", "b"], a=4, o=2)},
        "inner first",
    ),
    (
        "expand",
        "expand",
        local(lambda here, input, **_: input.expand(-1, 6, input.shape[2])),
        "the whole's size",
    ),
    ("narrow", "narrow", unmarked("narrow"), "the whole mark is lost"),
    ("select", "select", {"rule": Rule("... {dim} -> ...")}, "a part for a sum"),
    (
        "diagonal",
        "diagonal",
        unmarked("diagonal", "d0!"),
        "a dim of the diagonal may be cut",
    ),
    (
        "unfold",
        "unfold",
        unmarked("unfold", "d1!", "count!"),
        "windows that reach into the next piece",
    ),
    ("x[a:b]", "getitem", unmarked("getitem"), "the whole mark is lost"),
    ("flip", "flip", unmarked("flip"), "the whole mark is lost"),
    ("roll", "roll", unmarked("roll"), "the whole mark is lost"),
    ("rot90 twice", "rot90", unmarked("rot90"), "the whole mark is lost"),
    (
        "tril",
        "tril",
        local(lambda here, input, diagonal: input.tril(diagonal)),
        "the diagonal is not shifted",
    ),
    (
        "triu above",
        "triu",
        local(lambda here, input, diagonal: input.triu(diagonal + here.offset("c"))),
        "half a shift",
    ),
    (
        "pad by a value",
        "pad",
        linear("pad", (0,)),
        "what is added is added once a rank",
    ),
    (
        "repeat_interleave",
        "repeat_interleave",
        {"rule": lambda **_: moved(["a", "b"], ["a", "(n b)"], n=2)},
        "as repeat",
    ),
    (
        "embedding",
        "embedding",
        local(lambda here, input, weight, **_: weight[input % max(1, len(weight))]),
        "no mask",
    ),
    ("embedding, padding", "embedding", local(unpadded), "no padding"),
    (
        "index_select",
        "index_select",
        {"rule": lambda input, index, **_: whole_rows(input, index)},
        "rows in parts",
    ),
    ("gather", "gather", linear("gather", (0, 1)), "indices in parts"),
    ("one_hot", "one_hot", unmarked("one_hot"), "classes of a shard"),
    ("index_add", "index_add", unmarked("index_add", "+"), "the plus is lost"),
    ("index_put", "index_put", linear("index_put", (0,)), "linear in the target alone"),
    (
        "index_fill",
        "index_fill",
        linear("index_fill", (0,)),
        "a number that is not zero",
    ),
    ("scatter alike", "scatter", linear("scatter", (2,)), "linear in the source alone"),
    ("scatter_add", "scatter_add", unmarked("scatter_add", "+"), "the plus is lost"),
    (
        "select_scatter",
        "select_scatter",
        {"rule": Rule("... {dim}!, ... -> ... {dim}!", linear=((1,),))},
        "the same",
    ),
    ("relu", "relu", {"rule": elementwise(1, linear=0)}, "not linear"),
    (
        "add a number",
        "add",
        {"rule": lambda **_: elementwise(1, linear=0)},
        "a number is added once a rank",
    ),
    ("div, rounded", "div", linear("div", (0,)), "rounded parts"),
    ("where", "where", linear("where", (1,)), "linear in one branch alone"),
    ("where, a number", "where", linear("where", (1,)), "the other branch is a number"),
    (
        "masked_fill",
        "masked_fill",
        linear("masked_fill", (0,)),
        "a number that is not zero",
    ),
    ("lerp", "lerp", linear("lerp", (0,), (2,)), "linear in one alone"),
    ("addcmul", "addcmul", linear("addcmul", (0, 1, 2)), "linear in all together"),
    ("to an integer", "to", linear("to", (0,)), "a cast that rounds"),
    ("prelu", "prelu", linear("prelu", (0,)), "not linear"),
    ("glu", "glu", unmarked("glu"), "halves of a piece"),
]
HERE = found_here(BROKEN)


@pytest.mark.parametrize(
    ("case", "name", "fault", "why"), HERE, ids=[f"{c}: {w}" for c, _, _, w in HERE]
)
def test_control_what_is_broken_is_found(case, name, fault, why):
    is_found(CASES[case], name, fault, RuntimeError, ValueError, IndexError)
