# SPDX-License-Identifier: Apache-2.0
"""Which unit is gathered next, from the order of the last pass. Pure: no platform, no processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Order:
    """The order in which units were first entered, in this pass and in the one before.

    Example::

        order.begin()                  a new pass
        order.enter(unit)
        order.after(unit)              the one that followed it in the last pass, or None
        order.before(unit)             the one that came before it in this pass, for backward
    """

    def __init__(self) -> None:
        self._last: list[Any] = []
        self.current: list[Any] = []

    def begin(self) -> None:
        """Begins a new pass."""
        self._last, self.current = self.current, []

    def enter(self, unit: Any) -> None:
        """Records that a unit is entered."""
        if unit not in self.current:
            self.current.append(unit)

    def after(self, unit: Any) -> Any:
        """The unit that followed this one in the last pass."""
        return _neighbor(self._last, unit, 1)

    def before(self, unit: Any) -> Any:
        """The unit that came before this one in the current pass, which backward needs next."""
        return _neighbor(self.current, unit, -1)

    def __contains__(self, unit: Any) -> bool:
        return unit in self.current


def _neighbor(order: Sequence[Any], unit: Any, step: int) -> Any:
    if unit not in order:
        return None
    position = order.index(unit) + step
    return order[position] if 0 <= position < len(order) else None
