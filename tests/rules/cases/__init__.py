# SPDX-License-Identifier: Apache-2.0
"""Calls of users, family by family, for the tests of the operator tables."""

from rules.cases import joins, pointwise, products, views

FAMILIES = [joins, pointwise, products, views]
CASES = [case for family in FAMILIES for case in family.CASES]
COMPOSITES = [case for family in FAMILIES for case in getattr(family, "COMPOSITES", [])]  # no rule of their own
