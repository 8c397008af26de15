# SPDX-License-Identifier: Apache-2.0
"""Which unit is gathered next, from the order of passes. Pure: no platform, no processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Order:
    """The order in which forward enters and leaves units; backward enters them in the reverse order of leaving.

    Example::

        order.begin()                  a new pass
        order.enter(unit)
        order.leave(unit)
        order.after(unit)              the one that was entered after it in the last pass, or None
        order.before(unit)             the one that was left before it in this pass, for backward
    """

    def __init__(self) -> None:
        self._last: list[Any] = []
        self._entered: list[Any] = []
        self._left: list[Any] = []

    def begin(self) -> None:
        """Begins a new pass."""
        self._last, self._entered, self._left = self._entered, [], []

    def enter(self, unit: Any) -> None:
        """Records that forward enters a unit."""
        if unit not in self._entered:
            self._entered.append(unit)

    def leave(self, unit: Any) -> None:
        """Records that forward leaves a unit, perhaps not for the first time."""
        if unit in self._left:
            self._left.remove(unit)
        self._left.append(unit)

    def after(self, unit: Any) -> Any:
        """The unit that was entered after this one in the last pass."""
        return _find_neighbor(self._last, unit, 1)

    def before(self, unit: Any) -> Any:
        """The unit that was left before this one in the current pass, which backward needs next."""
        return _find_neighbor(self._left, unit, -1)

    def all_left(self) -> list[Any]:
        """All units that were left, the last first, as backward enters them."""
        return self._left[::-1]

    def within_and_after(self, unit: Any) -> list[Any]:
        """The units that were entered after this one: backward has left them when it leaves this one."""
        if unit not in self._entered:
            return []
        later = self._entered[self._entered.index(unit) + 1 :]
        return [one for one in self.all_left() if one in later]

    def after_and_outside(self, unit: Any) -> list[Any]:
        """The units that were entered when this one had been left: backward enters them before it."""
        if unit not in self._left:
            return []
        left_later = self._left[self._left.index(unit) + 1 :]
        return [one for one in self.within_and_after(unit) if one in left_later]

    def __contains__(self, unit: Any) -> bool:
        return unit in self._entered


def _find_neighbor(order: Sequence[Any], unit: Any, step: int) -> Any:
    if unit not in order:
        return None
    position = order.index(unit) + step
    return order[position] if 0 <= position < len(order) else None
