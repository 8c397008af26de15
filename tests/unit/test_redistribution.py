# SPDX-License-Identifier: Apache-2.0
"""Plans without processes: the right steps, never worse than an exhaustive search, the same printed."""

import itertools

import pytest
from hypothesis import given, settings
from layouts import layouts_on, meshes

from hyper_parallel.core.dtensor import redistribution
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Partial, Replicate, Shard
from hyper_parallel.core.dtensor.redistribution import plan

LINE = Layout((4,), ("x",))
GRID = Layout((2, 4), ("dp", "tp"))
R, P, MAX = Replicate(), Partial(), Partial("max")


def kinds(source, target, shape=(1024, 1024)):
    return [step.kind for step in plan(source, target, shape).steps]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ([R], [R], []),
        ([R], [Shard(0)], ["slice"]),
        ([Shard(0)], [R], ["all_gather"]),
        ([Shard(0)], [Shard(1)], ["all_to_all"]),
        ([P], [R], ["all_reduce"]),
        ([P], [Shard(1)], ["reduce_scatter"]),
        ([MAX], [R], ["all_reduce"]),
        ([R], [P], ["part"]),
        ([Shard(0)], [P], ["all_gather", "part"]),
        ([P], [MAX], ["all_reduce", "part"]),
        ([P], [P], []),
        ([Shard(-1)], [Shard(1)], []),
    ],
)
def test_one_axis_takes_the_collective_that_a_person_would(source, target, expected):
    assert kinds(LINE(source), LINE(target)) == expected


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (GRID("dp", "tp"), GRID("dp", "None"), ["all_gather"]),
        (GRID("dp", "None"), GRID("dp", "tp"), ["slice"]),
        (GRID(("dp", "tp"), "None"), GRID("dp", "None"), ["all_gather"]),
        (GRID("dp", "None"), GRID(("dp", "tp"), "None"), ["slice"]),
        (GRID(("dp", "tp"), "None"), GRID("dp", "tp"), ["all_to_all"]),
        (
            GRID("tp", "None"),
            GRID(("dp", "tp"), "None"),
            ["exchange"],
        ),  # nobody gathers to cut the outer axis
        (GRID(("dp", "tp"), "None"), GRID(("tp", "dp"), "None"), ["exchange"]),
        (GRID("dp", "tp"), GRID("tp", "dp"), ["exchange"]),
        (GRID("None", "None"), GRID("dp", "tp"), ["slice", "slice"]),
        (GRID("None", "None"), GRID(("tp", "dp"), "None"), ["slice", "slice"]),
        (
            GRID([P, P]),
            GRID([Shard(0), Shard(0)]),
            ["reduce_scatter", "reduce_scatter"],
        ),
        (GRID([P, Shard(0)]), GRID([R, Shard(0)]), ["all_reduce"]),
    ],
)
def test_two_axes(source, target, expected):
    assert kinds(source, target) == expected


def test_a_sum_and_a_maximum_are_never_pending_at_once():
    assert kinds(GRID([R, P]), GRID([MAX, R]), (8, 8)) == ["all_reduce", "part"]


def test_an_exchange_moves_only_what_is_lacking():
    steps = plan(GRID("tp", "None"), GRID(("dp", "tp"), "None"), (1024, 1024), 4)
    # A rank has a quarter and will have an eighth; where it has none of that, it receives all of it.
    assert steps.nbytes == 1024 * 1024 * 4 // 8


def test_bytes_of_the_collectives():
    nbytes = 1024 * 1024 * 4
    for source, target, expected in (
        ([Shard(0)], [R], nbytes // 4 * 3),
        ([Shard(0)], [Shard(1)], nbytes // 4 // 4 * 3),
        ([P], [R], 2 * nbytes // 4 * 3),
        ([P], [Shard(0)], nbytes // 4 * 3),
        ([R], [Shard(0)], 0),
    ):
        assert plan(LINE(source), LINE(target), (1024, 1024), 4).nbytes == expected


def test_the_plan_is_printed():
    text = plan(GRID([P, Shard(0)]), GRID([Shard(1), R]), (8, 8), 4).explain()
    assert text.splitlines()[0] == (
        "(8, 8) on Layout(dp=2, tp=4) [P, S(0)] -> [S(1), R]: 2 steps, 128 bytes a rank"
    )
    assert "reduce_scatter sum to dim 1" in text
    assert "all_gather dim 0" in text


def test_layouts_on_different_meshes_are_refused():
    with pytest.raises(ValueError, match="are on different meshes"):
        plan(LINE("x"), GRID("dp"), (8,))


def cheapest(source, target, shape, itemsize):
    """The cost of the best plan, by relaxing every edge between all layouts until nothing improves."""
    bound = redistribution._Bound(source.mesh_shape, tuple(shape), itemsize)
    start, goal = (
        redistribution._state(layout.bind(len(shape))) for layout in (source, target)
    )
    costs, frontier = {start: 0}, [start]
    while frontier:
        state = frontier.pop()
        for step in redistribution._steps(bound, state, goal):
            after = redistribution._after(state, step)
            cost = costs[state] + redistribution._cost(step)
            if cost < costs.get(after, cost + 1):
                costs[after] = cost
                frontier.append(after)
    return costs[goal]


@settings(max_examples=60, deadline=None)
@given(meshes(8).flatmap(lambda mesh: layouts_on(mesh, count=2, longest=3)))
def test_no_plan_is_worse_than_the_best_of_all(drawn):
    source, target, shape = drawn
    found = plan(source, target, shape, 4)
    assert found.cost == cheapest(source, target, shape, 4)
    layouts = [found.source, *found.layouts]
    assert layouts[-1] is found.target
    assert all(a is not b for a, b in itertools.pairwise(layouts))
