# SPDX-License-Identifier: Apache-2.0
"""What the engine decides for an operator, without processes."""

import pytest

from hyper_parallel import Layout, Partial, Replicate, Shard
from hyper_parallel.core.shard.propagate import propagate
from hyper_parallel.core.shard.rule import einsum, move, pointwise, reduction

GRID = Layout((2, 4), ("dp", "tp"))
R, P, MAX = Replicate(), Partial(), Partial("max")
LINEAR = einsum("... k, n k, +n -> ... n")
ADD = pointwise(2, linear=[(0, 1)])
MUL = pointwise(2, linear=[0, 1])
SOFTMAX = pointwise("... {dim}! -> ... {dim}!")


def decide(rule, shapes, placements, attrs=None, mesh=GRID):
    layouts = [None if p is None else mesh(p) for p in placements]
    plan = propagate(rule.bind(shapes, attrs or {}), layouts)
    wanted = [
        None if layout is None else list(layout.placements) for layout in plan.operands
    ]
    return wanted, list(plan.results[0].placements), plan.routes


@pytest.mark.parametrize(
    ("rule", "shapes", "have", "wanted", "result", "routes"),
    [
        # Column-wise: the input's gradient is summed over tp, the weight's over dp. Nothing moves.
        (LINEAR, [(8, 16), (32, 16), (32,)], [[Shard(0), R], [R, Shard(0)], [R, Shard(0)]], None, [Shard(0), Shard(1)],
         ((1,), (0,), (0,))),
        # Row-wise: a sum is pending, and the bias joins it once.
        (LINEAR, [(8, 16), (32, 16), (32,)], [[Shard(0), Shard(1)], [R, Shard(1)], [R, R]],
         [[Shard(0), Shard(1)], [R, Shard(1)], [R, P]], [Shard(0), P], ((), (0,), (0,))),
        # A weight that every rank has is cut rather than the input gathered.
        (LINEAR, [(8, 16), (32, 16), None], [[R, Shard(1)], [R, R], None], [[R, Shard(1)], [R, Shard(1)], None], [R, P],
         ((), (), None)),
        # Nobody cuts what everyone has.
        (LINEAR, [(8, 16), (32, 16), (32,)], [[R, R], [R, R], [R, R]], None, [R, R], ((), (), ())),
        # A pending sum passes a product and an addition, and is reduced before anything else.
        (MUL, [(8, 8), (8, 8)], [[P, R], [R, R]], None, [P, R], ((), (0,))),
        (ADD, [(8, 8), (8, 8)], [[P, R], [R, R]], [[P, R], [P, R]], [P, R], ((), ())),
        (ADD, [(8, 8), (8, 8)], [[P, R], [P, R]], None, [P, R], ((), ())),
        (pointwise(1), [(8, 8)], [[P, Shard(0)]], [[R, Shard(0)]], [R, Shard(0)], ((),)),
        # ... to where another operand lies already.
        (pointwise(2), [(8, 8)] * 2, [[P, R], [Shard(1), R]], [[Shard(1), R]] * 2, [Shard(1), R], ((), ())),
        # Of two pending sums one is reduced: the product of sums is not the sum of products.
        (MUL, [(8, 8), (8, 8)], [[P, R], [P, R]], [[P, R], [R, R]], [P, R], ((), (0,))),
        # Broadcasting: what is not there cannot be cut, and its gradient is a sum.
        (ADD, [(8, 6), (6,)], [[Shard(0), R], [R, R]], None, [Shard(0), R], ((), (0,))),
        # Reductions: the kind that vanishes is pending.
        (reduction("sum", "... {dim} -> ..."), [(8, 8)], [[Shard(1), Shard(0)]], None, [P, Shard(0)], ((),)),
        (reduction("max", "... {dim} -> ..."), [(8, 8)], [[Shard(1), R]], None, [MAX, R], ((),)),
        (reduction("max", "... {dim} -> ..."), [(8, 8)], [[MAX, R]], None, [MAX, R], ((),)),
        # A whole factor is not gathered where an all-to-all does.
        (SOFTMAX, [(8, 8)], [[Shard(1), Shard(0)]], [[Shard(0), Shard(0)]], [Shard(0), Shard(0)], ((),)),
        (SOFTMAX, [(8,)], [[Shard(0), R]], [[R, R]], [R, R], ((),)),
        (move("... {a=x} {b=y} -> ... {a=y} {b=x}"), [(8, 8)], [[Shard(1), P]], None, [Shard(0), P], ((),)),
    ],
)  # fmt: skip
def test_decisions(rule, shapes, have, wanted, result, routes):
    attrs = {"dim": -1, "a": 0, "b": 1}
    found = decide(
        rule, shapes, have, {k: v for k, v in attrs.items() if f"{{{k}" in rule.text}
    )
    expected = [
        None if p is None else list(GRID(p).bind(len(s)).placements)
        for p, s in zip(wanted or have, shapes, strict=True)
    ]
    assert found == (expected, result, routes)


def test_the_order_in_which_axes_cut_a_dim_is_kept():
    layout = GRID(("tp", "dp"), "None")
    plan = propagate(pointwise(1).bind([(16, 3)]), [layout])
    assert plan.operands[0] is layout
    assert plan.results[0] is layout
    plan = propagate(ADD.bind([(16, 3), (16, 3)]), [layout, GRID("None", "None")])
    assert plan.operands[1] is layout


def test_cuts_that_do_not_fit_merged_dims_are_not_made():
    flatten = move("a b -> (a b)")
    line = Layout((4,), ("x",))
    assert propagate(flatten.bind([(8, 3)]), [line([Shard(0)])]).results[
        0
    ].placements == (Shard(0),)
    assert propagate(flatten.bind([(6, 3)]), [line([Shard(0)])]).results[
        0
    ].placements == (R,)  # 6 rows: 2, 2, 2, 0


def test_operands_on_different_meshes_are_refused():
    other = Layout((8,), ("x",))
    with pytest.raises(
        ValueError, match="rule '..., ... -> ...': the operands must lie on one mesh"
    ):
        propagate(ADD.bind([(8,), (8,)]), [GRID([R, R]), other([R])])
