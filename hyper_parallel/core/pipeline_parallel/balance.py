# SPDX-License-Identifier: Apache-2.0
"""Divides a row of costs into contiguous parts, the most expensive of which is as cheap as possible.

balance([1, 1, 1, 1, 4], 2)         [4, 1]: the sizes of the parts
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """The sizes of ``parts`` parts, each of at least one item; among equals the most even ones."""
    sums = [0.0, *itertools.accumulate(costs)]

    @cache
    def divide(end: int, count: int) -> tuple[float, float, tuple[int, ...]]:
        """The best division of the first items: its largest part, how uneven it is, and the sizes."""
        if count == 1:
            return sums[end], sums[end] ** 2, (end,)
        found = []
        for start in range(count - 1, end):
            largest, uneven, sizes = divide(start, count - 1)
            own = sums[end] - sums[start]
            size = (*sizes, end - start)
            found.append((max(largest, own), uneven + own**2, size))
        return min(found)

    return list(divide(len(costs), parts)[2])
