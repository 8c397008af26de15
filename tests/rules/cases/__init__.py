# SPDX-License-Identifier: Apache-2.0
"""Calls of users, family by family, for the tests of the operator tables."""

from rules.cases import (
    aliases,
    attention,
    convolution,
    creation,
    differences,
    indexing,
    joins,
    linear_algebra,
    lookups,
    losses,
    native_norms,
    norms,
    ordering,
    pointwise,
    products,
    random,
    recurrence,
    reductions,
    scatters,
    sequences,
    signals,
    views,
    windows,
)

FAMILIES = [
    aliases,
    attention,
    convolution,
    creation,
    differences,
    indexing,
    joins,
    linear_algebra,
    lookups,
    losses,
    native_norms,
    norms,
    ordering,
    pointwise,
    products,
    random,
    recurrence,
    reductions,
    scatters,
    sequences,
    signals,
    views,
    windows,
]
CASES = [case for family in FAMILIES for case in family.CASES]
COMPOSITES = [
    case for family in FAMILIES for case in getattr(family, "COMPOSITES", [])
]  # no rule of their own
