# SPDX-License-Identifier: Apache-2.0
"""Calls of users, family by family, for the tests of the operator tables."""

from rules.cases import (
    attention,
    creation,
    indexing,
    joins,
    lookups,
    losses,
    norms,
    pointwise,
    products,
    random,
    reductions,
    views,
)

FAMILIES = [
    attention,
    creation,
    indexing,
    joins,
    lookups,
    losses,
    norms,
    pointwise,
    products,
    random,
    reductions,
    views,
]
CASES = [case for family in FAMILIES for case in family.CASES]
COMPOSITES = [case for family in FAMILIES for case in getattr(family, "COMPOSITES", [])]  # no rule of their own
