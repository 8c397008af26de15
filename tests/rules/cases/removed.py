# SPDX-License-Identifier: Apache-2.0
"""Cases of operators that newer versions of torch have removed: they are run where the installed version has them."""

from rules.framework import has_operator

LEFT_OUT = []  # the cases that are not run with this version


def unless_removed(operator, case):
    """The case in a list, which is empty where torch has no such operator."""
    if has_operator(operator):
        return [case]
    LEFT_OUT.append(case)
    return []
