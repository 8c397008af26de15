# SPDX-License-Identifier: Apache-2.0
"""A rule meets shapes: factors, sizes, results, what an axis may do, and what is refused."""

import pytest

from hyper_parallel.core.shard import (
    AxisUse,
    Rule,
    einsum,
    lookup,
    move,
    pointwise,
    reduction,
)

LINEAR = einsum("... k, n k, +n -> ... n")
GROUPED = Rule("b (h g) s d!, b h t! d!, b h t! e -> b (h g) s e")


def sizes(bound):
    return {factor.name: factor.size for factor in bound.factors}


def sharded(bound):
    return [choice.factor for choice in bound.choices() if choice.kind == "shard"]


def dims(bound, operand=0):
    return bound.operands[operand].dims


# --- factors and sizes


def test_every_dim_has_a_factor_and_every_factor_a_size():
    bound = LINEAR.bind([(4, 5, 8), (6, 8), (6,)])
    assert dims(bound) == (("...[-2]",), ("...[-1]",), ("k",))
    assert sizes(bound) == {"...[-2]": 4, "...[-1]": 5, "k": 8, "n": 6}
    assert [factor.name for factor in bound.factors if not factor.kept] == ["k"]
    assert bound.result_shapes == ((4, 5, 6),)


def test_the_rest_is_aligned_at_the_right_and_broadcasts():
    bound = pointwise(2).bind([(4, 1, 6), (5, 1)])
    assert dims(bound) == (("...[-3]",), (), ("...[-1]",))
    assert dims(bound, 1) == (("...[-2]",), ())
    assert bound.result_shapes == ((4, 5, 6),)
    assert sharded(bound) == ["...[-3]", "...[-1]", "...[-2]"]


def test_a_factor_that_is_one_everywhere_is_a_factor():
    bound = pointwise(2).bind([(1, 3), (1, 1)])
    assert sizes(bound) == {"...[-2]": 1, "...[-1]": 3}
    assert dims(bound, 1) == (("...[-2]",), ())


def test_size_zero_stretches_one():
    assert pointwise(2).bind([(0, 3), (1, 3)]).result_shapes == ((0, 3),)


@pytest.mark.parametrize(
    ("dim", "keepdim", "factors", "shape"),
    [
        (1, False, {"...[-2]": 4, "{dim}": 5, "...[-1]": 6}, (4, 6)),
        (-1, False, {"...[-2]": 4, "...[-1]": 5, "{dim}": 6}, (4, 5)),
        (-1, True, {"...[-2]": 4, "...[-1]": 5, "{dim}": 6}, (4, 5, 1)),
        ((2, 0), False, {"{dim}[1]": 4, "...[-1]": 5, "{dim}[0]": 6}, (5,)),
        ([-3, -1], True, {"{dim}[0]": 4, "...[-1]": 5, "{dim}[1]": 6}, (1, 5, 1)),
        ((1,), False, {"...[-2]": 4, "{dim}": 5, "...[-1]": 6}, (4, 6)),
        (None, False, {"{dim}[0]": 4, "{dim}[1]": 5, "{dim}[2]": 6}, ()),
        (None, True, {"{dim}[0]": 4, "{dim}[1]": 5, "{dim}[2]": 6}, (1, 1, 1)),
        ((), True, {"...[-3]": 4, "...[-2]": 5, "...[-1]": 6}, (4, 5, 6)),
    ],
)
def test_an_attribute_gives_positions(dim, keepdim, factors, shape):
    rule = reduction(
        "sum", "... {dim} -> ... {dim=1}" if keepdim else "... {dim} -> ..."
    )
    bound = rule.bind([(4, 5, 6)], {"dim": dim})
    assert sizes(bound) == factors
    assert bound.result_shapes == (shape,)


def test_a_tensor_without_dims_may_be_asked_for_its_first():
    for dim in (0, -1, None):
        assert reduction("sum", "... {dim} -> ... {dim=1}").bind(
            [()], {"dim": dim}
        ).result_shapes == ((),)


def test_positions_of_a_result_count_in_the_result():
    unsqueeze, stack = move("... -> ... {dim=1}"), move("[...] -> ... {dim}!")
    assert unsqueeze.bind([(4, 5)], {"dim": -1}).result_shapes == ((4, 5, 1),)
    assert unsqueeze.bind([(4, 5)], {"dim": -3}).result_shapes == ((1, 4, 5),)
    assert unsqueeze.bind([()], {"dim": 0}).result_shapes == ((1,),)
    assert stack.bind([[(4, 5)] * 3], {"dim": 1}).result_shapes == ((4, 3, 5),)


def test_a_size_that_no_operand_tells_is_an_attribute():
    assert Rule("... -> ... c!").bind([(4,)], {"c": 7}).result_shapes == ((4, 7),)
    expand = move("... {dim=1} -> ... {dim=n}")
    assert expand.bind([(1, 5, 1)], {"dim": (0, 2), "n": (3, 4)}).result_shapes == (
        (3, 5, 4),
    )


def test_lists_are_joined_and_taken_apart():
    cat = move("[... {dim}!] -> ... {dim}!").bind(
        [[(4, 2), (4, 1), (4, 3)]], {"dim": -1}
    )
    assert cat.result_shapes == ((4, 6),)
    assert [tensor.dims for tensor in cat.operands[0]] == [
        (("...[-1]",), ("{dim}",))
    ] * 3
    split = move("... {dim}! -> [... {dim=part}!]").bind(
        [(6, 4)], {"dim": 0, "part": [5, 1]}
    )
    assert split.result_shapes == (((5, 4), (1, 4)),)
    assert move("... {dim}! -> [...]").bind([(3, 4)], {"dim": 0}).result_shapes == (
        ((4,), (4,), (4,)),
    )
    assert cat.choices()[1].operands == ((AxisUse(0),) * 3,)
    assert split.choices()[1].results == ((AxisUse(1),) * 2,)


def test_absent_operands_stay_absent():
    bound = LINEAR.bind([(4, 8), (6, 8), None])
    assert bound.operands[2] is None
    assert all(
        choice.operands[2] is None is choice.grads_out[2] for choice in bound.choices()
    )


def test_an_added_operand_may_be_smaller_than_its_sum():
    addmm = einsum("+m n, m k, k n -> m n")
    for shape, expected in [
        ((6,), (("n",),)),
        ((1, 6), ((), ("n",))),
        ((4, 1), (("m",), ())),
        ((), ()),
    ]:
        assert dims(addmm.bind([shape, (4, 8), (8, 6)])) == expected


# --- merged dims


def test_only_the_outermost_of_merged_dims_may_be_sharded():
    bound = GROUPED.bind([(2, 8, 5, 3), (2, 4, 7, 3), (2, 4, 7, 6)])
    assert dims(bound)[1] == ("h", "g")
    assert sizes(bound)["g"] == 2
    assert sharded(bound) == ["b", "h", "s", "e"]
    assert sharded(move("(a b) c -> a (b c)").bind([(6, 5)], {"a": 2})) == ["a"]


def test_a_size_of_one_makes_room_for_the_next_outermost():
    bound = GROUPED.bind([(2, 8, 5, 3), (2, 1, 7, 3), (2, 1, 7, 6)])
    assert dims(bound)[1] == ("g",)
    assert sharded(bound) == ["b", "g", "s", "e"]


def test_a_cut_fits_where_it_is_the_same_in_every_tensor():
    bound = move("(a b) -> a b").bind([(6,)], {"b": 2})
    assert [bound.fits("a", n) for n in (1, 2, 3, 4, 6)] == [
        True,
        False,
        True,
        True,
        False,
    ]
    six = move("(a b) -> a b").bind([(12,)], {"b": 2})
    assert (six.fits("a", 2), six.fits("a", 2, 2), six.fits("a", 2, 3)) == (
        True,
        False,
        True,
    )
    assert LINEAR.bind([(4, 7), (6, 7), None]).fits("k", 2)


def test_an_average_fits_equal_parts_only():
    bound = reduction("avg", "... {dim} -> ...").bind([(6, 5)], {"dim": 0})
    assert (
        bound.fits("{dim}", 2),
        bound.fits("{dim}", 4),
        bound.fits("...[-1]", 2),
    ) == (True, False, True)


# --- what an axis may do


def test_the_choices_of_a_line():
    assert [
        str(choice) for choice in LINEAR.bind([(4, 8), (6, 8), (6,)]).choices()
    ] == [
        "unused: R, R, R -> R; gradient R -> R, R, R",
        "shard ...[-1]: S(0), R, R -> S(0); gradient S(0) -> S(0), P(sum), P(sum)",
        "shard k: S(1), S(1), P(sum) -> P(sum); gradient R -> S(1), S(1), R",
        "shard n: R, S(0), S(0) -> S(1); gradient S(1) -> P(sum), S(0), S(0)",
        "carry: P(sum), R, P(sum) -> P(sum); gradient R -> R, P(sum), R",
        "carry: R, P(sum), P(sum) -> P(sum); gradient R -> P(sum), R, R",
        "carry: P(avg), R, P(avg) -> P(avg); gradient R -> R, P(sum), R",
        "carry: R, P(avg), P(avg) -> P(avg); gradient R -> P(sum), R, R",
    ]


@pytest.mark.parametrize(
    ("rule", "shapes", "attrs", "expected"),
    [
        (
            lookup("..., v@ d -> ... d"),
            [(4,), (9, 6)],
            {},
            "shard v: R, S(0) -> P(sum); gradient R -> P(sum), S(0)",
        ),
        (
            reduction("max", "... {dim} -> ..."),
            [(4, 6)],
            {"dim": 1},
            "shard {dim}: S(1) -> P(max); gradient R -> S(1)",
        ),
        (
            reduction("mean", "... {dim} -> ..."),
            [(4,)],
            {"dim": 0},
            "shard {dim}: S(0) -> P(sum); gradient R -> S(0)",
        ),
        (
            reduction("prod", "... {dim} -> ..."),
            [(4,)],
            {"dim": 0},
            "carry: P(prod) -> P(prod); gradient R -> R",
        ),
        (
            pointwise(2, linear=0),
            [(4,), (4,)],
            {},
            "carry: P(sum), R -> P(sum); gradient R -> R, P(sum)",
        ),
        (
            pointwise(2, linear=[(0, 1)]),
            [(4,), (4,)],
            {},
            "carry: P(sum), P(sum) -> P(sum); gradient R -> R, R",
        ),
        (
            move("[...] -> ... {dim}!"),
            [[(4,)] * 2],
            {"dim": 0},
            "carry: [P(min), P(min)] -> P(min); gradient R -> [R, R]",
        ),
        (
            Rule("n c!, n ->"),
            [(4, 3), (4,)],
            {},
            "shard n: S(0), S(0) -> P(sum); gradient R -> S(0), S(0)",
        ),
    ],
)
def test_the_choices_have(rule, shapes, attrs, expected):
    assert expected in [str(choice) for choice in rule.bind(shapes, attrs).choices()]


def test_what_may_not_be_sharded():
    assert sharded(einsum("i i -> i").bind([(4, 4)])) == []  # a diagonal
    assert sharded(Rule("a b -> a b, a").bind([(4, 5)])) == [
        "a"
    ]  # is the second result a sum over b, or the same?
    assert (
        sharded(Rule("... {dim}! -> ... {dim}!").bind([(4, 5)], {"dim": (0, 1)})) == []
    )


def test_a_mark_holds_wherever_its_factor_is():
    assert sharded(Rule("... n, n!, n -> ... n").bind([(4, 8), None, (8,)])) == [
        "...[-1]"
    ]


def test_a_factor_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="rule 'a -> a': no factor 'b'; there are a"):
        pointwise("a -> a").bind([(4,)]).fits("b", 2)


def test_a_group_of_which_only_the_added_operand_is_there_carries_nothing():
    rule = Rule("+n, n -> n", linear=((1,),))
    assert [choice.kind for choice in rule.bind([(4,), None]).choices()] == [
        "unused",
        "shard",
    ]


def test_rules_and_what_they_are_bound_to_are_values():
    assert einsum("m k,k n->m n") == einsum("m k, k n -> m n")
    bound = [einsum("m k, k n -> m n").bind([(4, 8), (8, 6)]) for _ in range(2)]
    assert len(set(bound)) == 1
    assert len({*bound[0].choices(), *bound[1].choices()}) == len(bound[0].choices())
    assert str(pointwise(2)) == "..., ... -> ..."


# --- what is refused


@pytest.mark.parametrize(
    ("rule", "shapes", "attrs", "problem"),
    [
        (
            einsum("m k, k n -> m n"),
            [(4, 8), (7, 6)],
            {},
            "factor k has size 8 in operand 0 'm k' but 7 in operand 1 'k n'",
        ),
        (
            einsum("m k, k n -> m n"),
            [(4, 8), (1, 6)],
            {},
            "factor k has size 8 in operand 0 'm k' but 1 in",
        ),
        (
            pointwise(2),
            [(4, 8), (7,)],
            {},
            "factor ...[-1] has size 8 in operand 0 '...' but 7 in operand 1 '...'",
        ),
        (
            LINEAR,
            [(4, 8), (6, 8), (5,)],
            {},
            "factor n has size 6 in operand 1 'n k' but 5 in operand 2 '+n'",
        ),
        (
            LINEAR,
            [(4, 8), (6, 8)],
            {},
            "expected 3 operands (None for an absent one), got 2",
        ),
        (
            LINEAR,
            [(), (6, 8), None],
            {},
            "operand 0 '... k': expected 1 dims or more, got 0",
        ),
        (
            LINEAR,
            [(4, 8), (6, 8, 1), None],
            {},
            "operand 1 'n k': expected 2 dims, got 3",
        ),
        (
            LINEAR,
            [(4, 8), (6, 8), (2, 6)],
            {},
            "operand 2 '+n': expected 1 dims, got 2",
        ),
        (
            pointwise(1),
            [[(4,), (5,)]],
            {},
            "operand 0 '...': expected a shape, got [(4,), (5,)]",
        ),
        (
            move("[...] -> ..."),
            [(4, 5)],
            {},
            "operand 0 '[...]': expected the shapes of one or more tensors, got (4, 5)",
        ),
        (
            move("[...] -> ..."),
            [[]],
            {},
            "expected the shapes of one or more tensors, got []",
        ),
        (
            Rule("... {dim} -> ..."),
            [(4,)],
            {},
            "attribute 'dim' is missing (it gives a dim); got []",
        ),
        (
            Rule("... {dim} -> ..."),
            [(4,)],
            {"dim": 1},
            "dim=1 is not a dim of a tensor with 1 dims",
        ),
        (
            Rule("... {dim} -> ..."),
            [(4, 5)],
            {"dim": (1, -1)},
            "dim=-1 points to a dim that is taken already",
        ),
        (
            move("... {dim=1} -> ..."),
            [(4, 5)],
            {"dim": 0},
            "'=1' must point to dims of size 1, got shape (4, 5)",
        ),
        (
            move("... -> ... {dim=1}"),
            [(4, 5)],
            {"dim": None},
            "no operand says how many dims that is",
        ),
        (
            Rule("... -> ... c!"),
            [(4,)],
            {"dim": 1},
            "attribute 'c' is missing (it is a factor's size); got ['dim']",
        ),
        (
            Rule("... -> ... {dim}!"),
            [(4,)],
            {"dim": 0},
            "factor {dim} is in no operand; name it in the rule",
        ),
        (
            move("[... {dim}!] -> ... {dim}!"),
            [[(4, 5), (1, 5)]],
            {"dim": 1},
            "factor ...[-1] has size 4 in",
        ),
        (
            Rule("+... n, ... n -> ... n", broadcast="none"),
            [(1, 5), (4, 5)],
            {},
            "has size 1 in operand 0 '+... n'",
        ),
        (
            Rule("+m n, n -> m n", broadcast="none"),
            [(5,), (5,)],
            {},
            "operand 0 '+m n': expected 2 dims, got 1",
        ),
        (Rule("a b -> [a b]"), [(4, 5)], {}, "how many tensors does '[a b]' have?"),
        (
            GROUPED,
            [(2, 7, 5, 3), (2, 4, 7, 3), (2, 4, 7, 6)],
            {},
            "(h g) of size 7 with {'h': 4} leaves ['g'] open",
        ),
        (
            move("(a b) -> a b"),
            [(6,)],
            {},
            "(a b) of size 6 with {} leaves ['a', 'b'] open; give attributes",
        ),
        (
            move("(a b) -> a b"),
            [(6,)],
            {"a": 2, "b": 2},
            "(a b) has size 6, expected [2, 2]",
        ),
        (
            lookup("... {dim=v}@, ... {dim=j} -> ... {dim=j}"),
            [(4, 5), (1, 3)],
            {"dim": 1},
            "size 4 in operand 0",
        ),
        (
            lookup("... {dim=v}@, ... {dim=j} -> ... {dim=j}"),
            [(4, 5), (3,)],
            {"dim": -1},
            "must stand for 1 dims",
        ),
    ],
)
def test_shapes_that_do_not_match_are_refused(rule, shapes, attrs, problem):
    with pytest.raises(ValueError) as caught:
        rule.bind(shapes, attrs)
    assert str(caught.value).startswith(f"rule '{rule.text}': ")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (
            lambda: Rule("a -> a", reduce="mean"),
            "reduce must be one of sum, avg, max, min, prod, got 'mean'",
        ),
        (
            lambda: Rule("a -> a", carries=("any",)),
            "carries must be one of sum, avg, max, min, prod, got 'any'",
        ),
        (
            lambda: Rule("a -> a", broadcast="some"),
            "broadcast must be one of none, rest, all, got 'some'",
        ),
        (lambda: pointwise(2, linear=2), "linear must be one of 0, 1, got 2"),
        (lambda: pointwise("a, b -> a"), "pointwise: b is in no result"),
        (
            lambda: move("a b -> a"),
            "move: b is in no result; say how it is reduced, or mark it '!'",
        ),
        (
            lambda: Rule("v@ -> v"),
            "factor v is looked up ('@'), so it must be in one operand and in no result",
        ),
        (lambda: Rule("v@, v -> "), "factor v is looked up"),
        (lambda: Rule("v@ d -> d", reduce="max"), "so reduce must be sum"),
        (lambda: lookup("a -> a"), "lookup: no factor is marked '@'"),
        (
            lambda: Rule("m k, +k -> m"),
            "operand 1 '+k' is added, so its factors must be in a result; k is not",
        ),
        (
            lambda: Rule("m k, +m -> m", reduce="max"),
            "operand 1 '+m' is added, so reduce must be sum, got 'max'",
        ),
    ],
)
def test_rules_that_make_no_sense_are_refused(make, problem):
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value).startswith("rule '")
    assert problem in str(caught.value)
