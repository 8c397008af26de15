# SPDX-License-Identifier: Apache-2.0
"""Writes by index, and tables read by them, with the first operand cut along each of its dims: the ranks' own rows."""

from unittest import mock

import pytest
from rules import test_dispatch
from rules.cases import indexing, scatters, sequences
from rules.framework import unruled_is_an_error
from rules.outcomes import that_run
from rules.test_dispatch import sizes_of
from thorough import compare_few_collectives

from hyper_parallel import Replicate, Shard
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.testing import run_ranks

R, S0 = Replicate(), Shard(0)
FAMILIES = [scatters, sequences, indexing]
CASES = {
    case.name: case
    for family in FAMILIES
    for case in [*family.CASES, *family.COMPOSITES]
}


def compare_cut(case, sizes, dim, others):
    """The call with the first operand cut along a dim, or its last one, and the others as they are said to lie."""
    first = iter([True])

    def layout(base, ndim, rng, floating):
        if next(first, False):
            return base(
                [Shard(min(dim, ndim - 1)) if ndim else R] * base.mesh.ndim
            ).bind(ndim)
        return base([p if ndim else R for p in others] * base.mesh.ndim).bind(ndim)

    with mock.patch.object(test_dispatch, "some_layout", layout):
        test_dispatch.compare(case, sizes, Layout((4,), ("x",)), 0)


def on_rank(names):
    count = 0
    with unruled_is_an_error(), compare_few_collectives():
        for case in map(CASES.get, names):
            ndim = len(case.shapes.split()[0])
            for sizes in sizes_of(case):
                for dim in range(ndim):
                    for others in ([R], [S0]):
                        compare_cut(case, sizes, dim, others)
                        count += 1
    return count


NAMES = [case.name for case in that_run(CASES.values())]


@pytest.mark.parametrize(
    "names", [NAMES[i : i + 24] for i in range(0, len(NAMES), 24)], ids=lambda n: n[0]
)
def test_a_target_or_a_table_that_is_cut(names):
    found = run_ranks(on_rank, 4, names, timeout=300)
    assert len(set(found)) == 1
    assert found[0] >= sum(len(sizes_of(CASES[name])) for name in names)
