# SPDX-License-Identifier: Apache-2.0
"""The part of the sweep over torch's operators that has all of them in it, against what docs/operators.md says."""

import functools
import warnings
from contextlib import nullcontext, suppress

import numpy as np
import pytest
import torch
from layouts import split_for
from rules.cases import CASES, COMPOSITES
from rules.framework import has_operator
from rules.operators import SIZES, draw, flat, leaf, like
from rules.test_dispatch import some_layout
from thorough import THOROUGH

from hyper_parallel import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER
from hyper_parallel.core.shard.ops import OPERATORS
from hyper_parallel.testing import run_ranks
from tools import operators
from tools.operator_sweep import GROUP, Found, entries, sweep

TEXT = operators.PAGE.read_text()
PAGE = operators.outcomes_of(TEXT)
NAMES = list(PAGE)  # torch's database takes seconds to import, which only the ranks do


def names_of_the_database():
    return list(entries())


@functools.cache
def names_here():
    """The operators of the installed version of torch."""
    return run_ranks(names_of_the_database, 2, timeout=200)[
        0
    ]  # the first import of the database takes long


def sweep_without_mistakes(names):
    draws = {"placements": 24} if THOROUGH else {"placements": 3, "second_every": 2}
    found = sweep("ours", names, most=1, **draws)
    for name, one in found.items():
        assert not any(one.outcomes[bad] or one.second[bad] for bad in operators.BAD), (
            name,
            one.notes,
        )
    return found


@pytest.mark.parametrize(
    "names",
    [NAMES[i : i + GROUP] for i in range(0, len(NAMES), GROUP)],
    ids=lambda n: n[0],
)
def test_every_operator_of_torch_does_what_the_page_says(names):
    # The page is of one version of torch; another may have removed some of its operators.
    names = [name for name in names if name in names_here()]
    for name, found in sweep_without_mistakes(names).items():
        assert set(found.outcomes) <= PAGE[name], (
            f"{name}: {found.outcomes}; run make operators"
        )


def test_the_page_has_every_operator_of_its_version():
    if operators.version() == operators.version_of(TEXT):
        assert names_here() == NAMES
    else:  # a newer version adds and removes a few: what it adds is swept here, and what it removed has to be gone
        sweep_without_mistakes([name for name in names_here() if name not in NAMES])
        assert [
            name for name in NAMES if name not in names_here() and has_operator(name)
        ] == []
    assert len(set(NAMES) & set(names_here())) > 500


def test_the_page_has_nothing_wrong():
    assert "| **wrong value, no error** | 0 |" in TEXT
    assert "| raised another error | 0 |" in TEXT
    assert "| hung, or took its rank down | 0 |" in TEXT
    second = TEXT.partition("Gradients of gradients")[2]
    assert "| **wrong value, no error** | 0 |\n\n" in second
    assert "| raised another error | 0 |\n" in second


def called_by_the_cases():
    """The names of all operators that the cases lead to, with operands in layouts drawn at random."""
    seen = set()
    _OP_DISPATCHER.forget()
    _OP_DISPATCHER.on_decision = lambda decision: seen.add(decision.name.name)
    warnings.simplefilter("ignore")
    base = Layout((2,), ("x",))
    for case in [*CASES, *COMPOSITES]:
        for seed in range(3 if THOROUGH else 1):
            rng = np.random.default_rng(seed)
            arrays = draw(
                case,
                SIZES[
                    "uneven"
                    if "uneven" in (case.sizes or ("uneven",))
                    else case.sizes[0]
                ],
                rng,
            )
            tensors = []
            for array in flat(arrays):
                layout = some_layout(
                    base, array.ndim, rng, np.issubdtype(array.dtype, np.inexact)
                )
                shard = leaf(split_for(base.mesh.get_coordinate(), array, layout, rng))
                tensors.append(DTensor(shard, layout, array.shape))
            # Of what is not run elsewhere only the plan counts: a remainder of zero is an error.
            with (
                torch.no_grad(),
                nullcontext() if case.sizes else suppress(RuntimeError),
            ):
                case.call(*like(arrays, tensors))
    return seen


def test_every_rule_is_called_by_the_sweep_or_by_a_case():
    tail = TEXT.partition("## Operators of ours that the database does not have")[2]
    unseen = {name for name in OPERATORS if f"`{name}`" in tail}
    unseen -= run_ranks(called_by_the_cases, 2, timeout=200)[0]
    # Tests of their own: test_foreach.py, test_init.py; test_bad_input.py refuses, and other devices are not here.
    elsewhere = {"init", "set", "cuda", "npu", "xpu"}
    assert {
        name
        for name in unseen - elsewhere
        if not name.startswith(("_amp_foreach_", "_foreach_", "_fused_"))
    } == set()


def test_the_page_tells_what_the_sweep_found():
    found = Found()
    for outcome, count in (("sharded", 3), ("refused", 1)):
        found.outcomes[outcome] = count
    found.rules.append(("add", "..., ... -> ..."))
    for outcome, count in (("right", 2), ("refused", 1)):
        found.second[outcome] = count
    text = operators.page(
        {"add": found, "arange": Found(no_samples="no tensor arguments")}, {}
    )
    assert operators.outcomes_of(text) == {
        "add": {"sharded", "refused"},
        "arange": set(),
    }
    assert "| `add` | `..., ... -> ...` | 3 |  | 1 | 2 |" in text
    assert "of 1 operators that have them" in text
    assert "| right | 2 |" in text
    assert "`relu`" in text.partition("## Operators of ours")[2]


def test_a_wrong_second_order_is_found():
    [found] = run_ranks(without_sums_of_second_order, 2, timeout=100)[:1]
    assert found["wrong"] > 0


def without_sums_of_second_order():
    from hyper_parallel.core.dtensor import collectives
    from tools.operator_sweep import sweep_on_rank

    def replace(function):
        collectives.pending_sums = function
        collectives._dual.cache_clear()
        collectives._backward_way.cache_clear()

    usual = collectives.pending_sums
    replace(lambda layout: ())
    try:
        return sweep_on_rank("ours", ["mm"], 1)["mm"].second
    finally:
        replace(usual)


def test_a_wrong_operator_is_found():
    [found] = run_ranks(with_a_wrong_rule, 2, timeout=100)[:1]
    assert found["wrong"] > 0
    assert found["crashed"] == 0


def with_a_wrong_rule():
    from hyper_parallel.core.shard import operator, pointwise
    from tools.operator_sweep import sweep_on_rank

    usual = OPERATORS["softmax"]
    operator("softmax", "input, dim=None, dtype=None, _stacklevel=3", pointwise(1))
    try:
        return sweep_on_rank("ours", ["softmax"], 4)["softmax"].outcomes
    finally:
        OPERATORS["softmax"] = usual
        _OP_DISPATCHER.forget()
