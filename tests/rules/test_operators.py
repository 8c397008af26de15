# SPDX-License-Identifier: Apache-2.0
"""Every rule of the tables: every choice of every axis, against the plain operator, with ranks simulated."""

import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from rules.cases import CASES
from rules.cases.removed import LEFT_OUT
from rules.framework import IS_TORCH, torch
from rules.operators import MESHES, SIZES, check, draw, flat, leaf, like
from rules.outcomes import RULE, drawn, known, taken, that_run
from thorough import THOROUGH

from hyper_parallel.testing import choices_of

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"


def is_taken(case, sizes):
    """Whether PyTorch itself takes operands of these sizes; some want more than one element, or a multiple."""
    operands = draw(case, SIZES[sizes], np.random.default_rng(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            case.call(*like(operands, [leaf(array) for array in flat(operands)]))
        except (RuntimeError, ValueError, IndexError, UserWarning):
            return False
    return True


def sizes_of(case):
    """Uneven and empty shards, or even ones where nothing else goes; none for what is random."""
    if not case.sizes:
        return []
    if not IS_TORCH:  # where uneven ones leave some rank nothing as well
        return (
            taken(case)
            if THOROUGH
            else sorted(taken(case), key=["uneven", "empty", "even"].index)[:1]
        )
    named = [sizes for sizes in case.sizes if sizes != "even"] or ["even"]
    return (
        named if "empty" in named or not is_taken(case, "empty") else [*named, "empty"]
    )


ONE_AXIS = tuple(mesh for mesh in MESHES if len(mesh) == 1)
RULED = that_run(CASES, RULE)
CHECKED = [(case, sizes) for case in RULED for sizes in sizes_of(case)]


@pytest.mark.parametrize(
    ("case", "sizes"),
    [pytest.param(case, sizes, id=f"{case.name}-{sizes}") for case, sizes in CHECKED],
)
def test_every_choice_gives_the_plain_results_and_gradients(case, sizes):
    how = known(case.name)
    # Second order with one of the sizes and two axes with another, with others for other cases.
    all_sizes = sizes_of(case)
    chosen = all_sizes[len(case.name) % len(all_sizes)]
    is_alone = THOROUGH or len(all_sizes) == 1
    compared = check(
        case,
        SIZES[sizes],
        how.dtype,
        meshes=MESHES if is_alone or sizes != chosen else ONE_AXIS,
        gradients=how.gradients,
        second_order=is_alone or sizes == chosen,
    )
    assert compared > 0


@pytest.mark.parametrize("case", RULED, ids=lambda case: case.name)
def test_no_choice_is_missing(case):
    sizes = "even" if IS_TORCH else known(case.name).sizes[0]
    choices = choices_of(case.call, *drawn(case, sizes, np.random.default_rng(0)))
    if case.shards is not None:
        assert {choice.factor for choice in choices if choice.kind == "shard"} == set(
            case.shards.split()
        )
    if case.carries is not None:
        assert [choice.kind for choice in choices].count("carry") == case.carries
    assert len(set(choices)) == len(choices)


def test_only_cases_of_removed_operators_are_left_out():
    pinned = re.search(r"^torch==(.*)$", CONSTRAINTS.read_text(), re.MULTILINE)[1]
    if not IS_TORCH or torch.__version__.partition("+")[0] == pinned:
        assert LEFT_OUT == []
    for case in LEFT_OUT:
        operands = draw(case, SIZES["even"], np.random.default_rng(0))
        with pytest.raises(RuntimeError, match="is now removed"):
            case.call(*like(operands, [leaf(array) for array in flat(operands)]))
