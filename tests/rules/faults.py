# SPDX-License-Identifier: Apache-2.0
"""How a fault is planted in an operator's rule or local function, and how one knows that the check finds it."""

from dataclasses import replace
from unittest import mock

import pytest
from rules.operators import IS_TORCH, MESHES, check

from hyper_parallel.core.shard.ops.operator import OPERATORS, RuleForCall
from hyper_parallel.core.shard.rule import Rule

ALIKE = {"a": 4, "b": 4, "c": 4}  # no shape gives the fault away
FAULT_MESHES = (
    MESHES if IS_TORCH else ((2,), (4,))
)  # a shard of one row or of one group hides some faults


def is_found(case, operator, fault, *also):
    """Asserts that the check of a case passes, and that with the fault it does not.

    ``also``: what the operator itself may raise on shards that do not fit together, beside wrong numbers. MindSpore's
    have no rule for what they raise; there the fault is all that has changed.
    """
    check(case, ALIKE, meshes=FAULT_MESHES)
    with (
        mock.patch.dict(OPERATORS, {operator: replace(OPERATORS[operator], **fault)}),
        pytest.raises((AssertionError, *also) if IS_TORCH else Exception),
    ):
        check(case, ALIKE, meshes=FAULT_MESHES)


# --- faults


def takes(text, *names, **settings):
    """A rule for operands that are not the first parameters."""
    return lambda **arguments: RuleForCall(
        Rule(text, **settings), operands=[arguments[name] for name in names]
    )


def itself(here, **arguments):
    """The operator on the shard, as if that were the whole."""
    return here.function(**arguments)


def unmarked(name, *marks):
    """The operator's own rule without these marks, or without any."""
    rule = OPERATORS[name].rule

    def broken(**arguments):
        ruled = rule if isinstance(rule, Rule) else rule(**arguments)
        ruled = ruled if isinstance(ruled, RuleForCall) else RuleForCall(ruled)
        text = ruled.rule.text
        for marked in marks or ("!",):
            text = text.replace(marked, marked.strip("!+"))
        return replace(ruled, rule=replace(ruled.rule, text=text))

    return {"rule": broken}


def linear(name, *groups):
    """The operator's own rule, linear in other groups of operands."""
    rule = OPERATORS[name].rule

    def broken(**arguments):
        ruled = rule if isinstance(rule, Rule) else rule(**arguments)
        ruled = ruled if isinstance(ruled, RuleForCall) else RuleForCall(ruled)
        return replace(ruled, rule=replace(ruled.rule, linear=groups, carries=("sum",)))

    return {"rule": broken}


def local(call):
    return {"local": call}


def rewritten(name, old, new):
    """The operator's own rule with another text."""
    rule = OPERATORS[name].rule

    def broken(**arguments):
        ruled = rule(**arguments)
        assert old in ruled.rule.text
        return replace(
            ruled, rule=replace(ruled.rule, text=ruled.rule.text.replace(old, new))
        )

    return {"rule": broken}
