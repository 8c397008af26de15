# SPDX-License-Identifier: Apache-2.0
"""The units of ``fully_shard`` in a stage, by what their modules offer: whole over all micro batches, reduced once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hyper_parallel.platform import get_platform

platform = get_platform()


class ShardedStage:
    """The outermost units of a stage; does nothing if there are none.

    ``modules``: those of the stage, in ``whole``, which other stages may have as well. A unit around all of them is
    that of the stage, if their own ones leave anything to it.
    """

    def __init__(self, modules: Sequence[Any], whole: Any) -> None:
        own = [unit for module in modules for unit in _find_units(module)]
        covered = {id(one) for unit in own for one in _parameters_in(unit)}
        needed = {id(one) for module in modules for one in _parameters_in(module)}
        self._units = own if needed <= covered else _find_units(whole)

    @property
    def is_sharded(self) -> bool:
        """Whether there are units."""
        return bool(self._units)

    def prepare(self, *, keeps_whole: bool) -> None:
        """Before a step: nothing is reduced until ``reduce``, and with ``keeps_whole`` nothing is freed before it."""
        for unit in self._units:
            unit.set_requires_gradient_sync(False)
            unit.set_is_last_backward(not keeps_whole)
            unit.set_reshard_after_backward(not keeps_whole)
            if keeps_whole:
                unit.set_reshard_after_forward(False)

    def gather(self) -> None:
        """Makes all parameters whole."""
        for unit in self._units:
            unit.unshard_all()

    def free(self) -> None:
        """Frees whole parameters."""
        for unit in self._units:
            unit.reshard_all()

    def reduce(self) -> None:
        """Reduces the gradients of all micro batches."""
        for unit in self._units:
            unit.reduce_gradients()

    def reset(self) -> None:
        """Clears away what a failed step has left."""
        for unit in self._units:
            unit.reset_iter_state()


def _parameters_in(module: Any) -> Iterable[Any]:
    return platform.parameters_dict(module).values()


def _find_units(module: Any) -> list[Any]:
    units: list[Any] = []
    inside: set[int] = set()
    for _, inner in platform.get_cells_and_names(module):
        if id(inner) in inside or not hasattr(inner, "reduce_gradients"):
            continue
        units.append(inner)
        inside |= {id(one) for _, one in platform.get_cells_and_names(inner)}
    return units
