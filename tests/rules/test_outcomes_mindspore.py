# SPDX-License-Identifier: Apache-2.0
"""docs/mindspore-operators.md has every case, and says how it goes on MindSpore: what the tests leave out is true."""

from rules.outcomes import DEADLY, EVERY, UNHELD, known, listed, outcome, row

from hyper_parallel.testing import run_ranks

ALIVE = [case for case in EVERY if known(case.name).kind != DEADLY]


def outcomes_on_a_rank():
    return [outcome(case, known(case.name).sizes or None) for case in ALIVE]


def is_as_told(case, now):
    """What does not hold is told of by the tests; here it is enough that it runs."""
    told = known(case.name)
    return now.runs if told.kind == UNHELD else row(case, now) == row(case, told)


def test_the_page_has_every_case_and_says_how_it_goes():
    assert list(listed()) == [case.name for case in EVERY]
    found = run_ranks(outcomes_on_a_rank, 2, timeout=300)[0]
    differ = [row(case, now) for case, now in zip(ALIVE, found, strict=True) if not is_as_told(case, now)]
    assert not differ, "run HYPER_PARALLEL_PLATFORM=mindspore python -m tools.mindspore_operators"
