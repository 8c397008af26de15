# SPDX-License-Identifier: Apache-2.0
"""docs/mindspore-operators.md has every case, and what it leaves out is still to be left out.

What it says of the others is tried by all other tests of rules, which read it there.
"""

from rules.outcomes import ABSENT, ARGUMENTS, EVERY, KERNEL, known, listed, outcome, row

from hyper_parallel.platform import get_platform
from hyper_parallel.testing import close_ranks, run_ranks

LEFT_OUT = [
    case for case in EVERY if known(case.name).kind in (KERNEL, ABSENT, ARGUMENTS)
]


def rows_on_a_rank():
    """How half of what is left out goes: none of it gets as far as to ask the other rank."""
    return [
        row(case, outcome(case)) for case in LEFT_OUT[get_platform().get_rank() :: 2]
    ]


def test_the_page_has_every_case_and_leaves_out_what_does_not_go():
    assert list(listed()) == [case.name for case in EVERY]
    close_ranks()  # the page is about new processes, in which nothing has run before
    found = run_ranks(rows_on_a_rank, 2, timeout=300)
    differ = [
        now
        for rank in range(2)
        for now, case in zip(found[rank], LEFT_OUT[rank::2], strict=True)
        if now != row(case, known(case.name))
    ]
    assert not differ, (
        "run HYPER_PARALLEL_PLATFORM=mindspore python -m tools.mindspore_operators"
    )
