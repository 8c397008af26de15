# SPDX-License-Identifier: Apache-2.0
"""Every rule of the tables: every choice of every axis, against the plain operator, with ranks simulated."""

import numpy as np
import pytest
from rules.cases import CASES
from rules.operators import SIZES, check, draw

from hyper_parallel.testing import choices_of


@pytest.mark.parametrize(
    ("case", "sizes"), [pytest.param(case, sizes, id=f"{case.name}-{sizes}") for case in CASES for sizes in case.sizes]
)
def test_every_choice_gives_the_plain_results_and_gradients(case, sizes):
    assert check(case, SIZES[sizes]) > 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_choice_is_missing(case):
    choices = choices_of(case.call, *draw(case, SIZES["even"], np.random.default_rng(0)))
    if case.shards is not None:
        assert {choice.factor for choice in choices if choice.kind == "shard"} == set(case.shards.split())
    if case.carries is not None:
        assert [choice.kind for choice in choices].count("carry") == case.carries
    assert len(set(choices)) == len(choices)
