# SPDX-License-Identifier: Apache-2.0
"""Random programs on distributed tensors do what plain torch does; faults that are planted are found and minimised."""

from contextlib import contextmanager

import pytest
import torch
from thorough import THOROUGH

from hyper_parallel.core.dtensor import collectives, dtensor
from hyper_parallel.testing import run_ranks
from tools import programs
from tools.program_grammar import draw_program
from tools.programs import BAD, Case, minimise, run_cases

FIRST = 1_000_000  # none of those on the page
COUNT = 2000 if THOROUGH else 120


def test_programs_are_right_or_refused():
    found = run_cases(range(FIRST, FIRST + COUNT))
    bad = {seed: outcome for seed, outcome in found.items() if outcome[0] in BAD}
    assert not bad, f"python -m tools.programs --seed {min(bad)}: {bad}"
    right = sum(kind == "right" for kind, _ in found.values())
    assert right > 0.7 * COUNT


def test_programs_are_the_same_for_everybody():
    lines = [draw_program(seed) for seed in range(20)]
    assert run_ranks(_drawn_again, 2) == [lines, lines]
    assert len({len(one) for one in lines}) > 3
    every = " ".join(line for seed in range(150) for line in draw_program(seed))
    for part in (
        "leaf(",
        "move(",
        "hook(",
        "_(",
        ".view(-1)",
        "] = ",
        "torch.cat",
        "F.linear",
        ".sum(",
    ):
        assert part in every


def _drawn_again():
    return [draw_program(seed) for seed in range(20)]


# --- controls: each fault makes a program wrong, or has the ranks disagree

STALE = Case(
    0,
    ["v1 = leaf(1, (4,), 0)", "v2 = v1 * 1.0", "v3 = v2[1:3]", "v2.add_(2.0)"],
    (2,),
    "gradients",
)
SECOND = Case(
    0,
    ["v1 = leaf(1, (4, 2), 0)", "v2 = v1.square().sum()"],
    (2,),
    "gradients of gradients",
)
MOVED = Case(0, ["v1 = leaf(1, (4, 2), 0)", "v2 = move(v1, 6)"], (2,), "gradients")
RIGHT = Case(0, ["v1 = leaf(1, (4,), 0)", "v2 = v1 * 1.0"], (2,), "accumulation")


@contextmanager
def stale_views():
    usual = dtensor.follow_base
    dtensor.follow_base = lambda tensor: None
    try:
        yield
    finally:
        dtensor.follow_base = usual


@contextmanager
def unsummed_second_order():
    usual = collectives.pending_sums
    _replace_pending_sums(lambda layout: ())
    try:
        yield
    finally:
        _replace_pending_sums(usual)


def _replace_pending_sums(function):
    collectives.pending_sums = function
    collectives._dual.cache_clear()
    collectives._backward_way.cache_clear()


@contextmanager
def one_rank_that_stays_out():
    usual = programs.OnMesh.move
    if torch.distributed.get_rank() == 1:
        programs.OnMesh.move = lambda calls, tensor, layout: tensor.clone()
    try:
        yield
    finally:
        programs.OnMesh.move = usual


FAULTS = {
    f.__name__: f for f in (stale_views, unsummed_second_order, one_rank_that_stays_out)
}


def judged_with(fault, cases):
    with FAULTS[fault]():
        return programs.judge_on_rank(cases)


@pytest.mark.parametrize(
    ("fault", "case", "outcome"),
    [
        ("stale_views", STALE, "wrong"),
        ("unsummed_second_order", SECOND, "wrong"),
        ("one_rank_that_stays_out", MOVED, "disagreement"),
    ],
    ids=list(FAULTS),
)
def test_a_planted_fault_is_found(fault, case, outcome):
    assert [
        kind for kind, _ in run_ranks(programs.judge_on_rank, 2, [RIGHT, case])[0]
    ] == ["right", "right"]
    found = run_ranks(judged_with, 2, fault, [RIGHT, case])
    assert {kind for kind, _ in (one[-1] for one in found)} == {outcome}
    assert found[0][0][0] == "right"


def test_a_failure_is_minimised(monkeypatch):
    def with_the_fault(cases):
        found = run_ranks(judged_with, 2, "stale_views", cases)
        return found[0]

    monkeypatch.setattr(programs, "judge_all", with_the_fault)
    padding = ["v7 = leaf(7, (2, 2), 0)", "v8 = v7.sin()", "hook(v8, 2.0)"]
    long = Case(
        0,
        [padding[0], *STALE.lines[:2], *padding[1:], *STALE.lines[2:]],
        (2,),
        "gradients",
    )
    shortest, told = minimise(long)
    assert shortest.lines == STALE.lines
    assert "expected" in told


def test_the_page_tells_what_was_found():
    outcomes = {
        0: ("right", ""),
        1: ("refused", "OperatorError: add_: the target is a copy [HP307]"),
        2: ("invalid", ""),
    }
    text = programs.page(outcomes)
    assert "| outcome of 2 programs | |" in text
    assert "| right | 1 |" in text
    assert "1 times: `add_: the target is a copy" in text
    published = programs.PAGE.read_text()
    for bad in (
        "**wrong value, no error**",
        "raised another error",
        "ranks disagree",
        "hung",
    ):
        assert f"| {bad} | 0 |" in published
