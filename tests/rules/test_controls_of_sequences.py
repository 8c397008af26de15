# SPDX-License-Identifier: Apache-2.0
"""Controls for what writes by index, for recurrence and for sequences: what is broken on purpose is found."""

from unittest import mock

import pytest
from rules.cases import CASES, COMPOSITES
from rules.faults import itself, takes
from rules.framework import unruled_is_an_error
from rules.outcomes import known
from rules.test_writes import R, compare_cut

from hyper_parallel.core.shard.ops import scatters
from hyper_parallel.testing import run_ranks

ALL = {case.name: case for case in [*CASES, *COMPOSITES]}


CELL = ("input", "hx", "w_ih", "w_hh")
BAG = ("input", "weight", "offsets", "per_sample_weights")
CTC = ("log_probs", "targets", "input_lengths", "target_lengths")
BROKEN = [  # tried by test_controls: the case, the operator, what is broken in it, why that is wrong
    (
        "index_copy",
        "index_copy",
        {
            "rule": takes(
                "v! r, j!, j! r -> v! r", "input", "index", "source", linear=((2,),)
            )
        },
        "linear in the source alone",
    ),
    (
        "gru_cell",
        "gru_cell",
        {"rule": takes("b i, b h!, g! i, g! h! -> b h!", *CELL)},
        "a sum of states",
    ),
    (
        "ctc_loss, mean",
        "ctc_loss",
        {"local": itself},
        "a local mean for a share of the global one",
    ),
    (
        "ctc_loss, sum",
        "ctc_loss",
        {"rule": takes("t! b c!, b s!, b, b ->", *CTC, reduce="avg")},
        "a wrong reduction",
    ),
    ("embedding_bag", "embedding_bag", {"local": itself}, "the rows of others"),
    (
        "embedding_bag, max",
        "embedding_bag",
        {"rule": takes("b n!, v@ d, k!, b n! -> b d", *BAG)},
        "a sum of maxima",
    ),
    (
        "embedding_bag",
        "embedding_bag",
        {"rule": takes("b n, v! d, k!, b n -> b d", *BAG)},
        "a sum of means",
    ),
]

# --- between real ranks: what has no rule of its own

spare = scatters._with_spare


def all_are_mine(here, factor, table, dim, index, from_end):
    """What is for others goes to the first row."""
    table, rows, mine = spare(here, factor, table, dim, index, from_end)
    return table, rows.masked_fill(~mine, 0), mine


NAMES = ["index_add to rows", "scatter_reduce, amax", "index_put, added", "index_copy"]


def on_rank(name):
    """Whether the check finds the fault, which is the same on every rank."""
    with (
        unruled_is_an_error(),
        mock.patch.object(scatters, "_with_spare", all_are_mine),
    ):
        try:
            compare_cut(ALL[name], "uneven", 0, [R])
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("name", [name for name in NAMES if known(name).runs])
def test_that_others_rows_are_written_to_is_found(name):
    assert run_ranks(on_rank, 4, name) == [True] * 4
