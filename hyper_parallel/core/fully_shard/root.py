# SPDX-License-Identifier: Apache-2.0
"""The outermost unit of a model with all units below it: passes, the order of units, and reductions under way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.fully_shard.prefetch import Order
from hyper_parallel.core.fully_shard.saved import save_references
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

if TYPE_CHECKING:
    from hyper_parallel.core.fully_shard.reduction import Reduction
    from hyper_parallel.core.fully_shard.running import Runner
    from hyper_parallel.core.fully_shard.unit import Unit

platform = get_platform()
Complete = dict[int, Callable[[Any], None]]  # takes the gradient of a parameter


class _Active(threading.local):
    """The root whose forward runs in this thread."""

    def __init__(self) -> None:
        self.root: Root | None = None


ACTIVE = _Active()


class Root:
    """Runs one pass after the other."""

    def __init__(self, outermost: Runner) -> None:
        self.outermost = outermost
        self.order = Order()
        self.pass_number = 0
        self._runners: list[Runner] = []
        self._backward: int | None = None
        self._saving: AbstractContextManager[Any] = nullcontext()
        self._reductions: list[tuple[Reduction, Complete]] = []

    def claim(self, runner: Runner) -> None:
        """Makes this the root of a unit."""
        if runner.root is self:
            return
        if runner.root is not None:
            raise coded(
                RuntimeError,
                "HP422",
                f"fully_shard: {runner.unit.name} ran as the outermost unit before, and is now used below "
                f"{self.outermost.unit.name}; run forward of the outermost unit first",
            )
        runner.root = self
        self._runners.append(runner)
        self._name_units()

    def _name_units(self) -> None:
        """Names units by their paths in the model, for messages."""
        for module in self.outermost.modules:
            for path, inner in platform.get_cells_and_names(module):
                for runner in self._runners:
                    if path and inner in runner.modules:
                        runner.unit.name = f"{path} ({type(inner).__name__})"

    # --- forward

    def begin_pass(self) -> None:
        """Begins a forward; what a failed backward has left behind is cleared away."""
        self.recover()
        for runner in self._runners:
            if runner is not self.outermost:
                runner.begin_pass()
            if runner.unit.may_have_changed:
                runner.unit.release()
        self.pass_number += 1
        self.order.begin()
        self._saving = save_references(self._units)
        self._saving.__enter__()

    def _units(self) -> list[Unit]:
        return [runner.unit for runner in self._runners]

    def _stop_saving(self) -> None:
        saving, self._saving = self._saving, nullcontext()
        saving.__exit__(None, None, None)

    def end_forward(self) -> None:
        """Frees what was gathered for units that did not run, or not all of whose modules did."""
        self._stop_saving()
        for runner in self._runners:
            if runner is self.outermost or runner.is_in_backward:
                continue
            if runner not in self.order or runner.reshards_after_forward:
                runner.unit.release_after_forward()

    # --- backward

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward through this model runs in this thread."""
        return (
            self._backward is not None and platform.backward_number() == self._backward
        )

    def enter_backward(self) -> int:
        """Begins the running backward, unless it has begun; returns its number."""
        number = platform.backward_number()
        if self._backward != number:
            self._backward = number
            platform.after_backward(self._end_backward)
        return number

    def pass_over_skipped_before(self, runner: Runner) -> None:
        """When backward enters a unit: has the units that it should have entered before, and did not, take part."""
        if self._takes_part_anyway():
            self._pass_over(self.order.after_and_outside(runner))

    def pass_over_skipped_within(self, runner: Runner) -> None:
        """The same when backward leaves a unit, for the units that forward has entered after it."""
        if self._takes_part_anyway():
            self._pass_over(self.order.within_and_after(runner))

    def _takes_part_anyway(self) -> bool:
        return any(runner.unit.settings.reduces_unused for runner in self._runners)

    def _pass_over(self, runners: Sequence[Runner]) -> None:
        """Has those of the units that backward has not entered, where that is asked, do what other ranks do in it."""
        for runner in runners:
            settings = runner.unit.settings
            is_asked = settings.reduces_unused and settings.syncs_gradients
            if is_asked and runner.entered_in != self._backward:
                runner.entered_in = self._backward
                runner.pass_over()

    def add_reductions(
        self, reductions: Sequence[Reduction], complete: Complete
    ) -> None:
        """Finishes them while later ones run, or when backward ends."""
        self._reductions += [(reduction, complete) for reduction in reductions]

    def advance_reductions(self) -> None:
        """Takes every reduction under way one collective further."""
        pending, self._reductions = self._reductions, []
        with platform.no_grad():
            for reduction, complete in pending:
                if reduction.advance():
                    _complete(reduction, complete)
                else:
                    self._reductions.append((reduction, complete))

    def finish_reductions(self) -> None:
        """Waits for all reductions under way, and gives the parameters their gradients."""
        pending, self._reductions = self._reductions, []
        with platform.no_grad():
            for reduction, complete in pending:
                _complete(reduction, complete)

    def _end_backward(self) -> None:
        self._pass_over(self.order.all_left())
        self.finish_reductions()
        for runner in self._runners:
            if runner.unit.has_waiting_gradients:
                runner.reduce_waiting(self)
        self.finish_reductions()
        self._backward = None
        for runner in self._runners:
            runner.end_backward()

    def recover(self) -> None:
        """Clears away what a backward that raised has left behind."""
        if self._backward is not None and not self.is_in_backward:
            self.reset()

    def reset(self) -> None:
        """Back to where a pass can begin, after an error."""
        self._stop_saving()
        self._backward = None
        self._reductions = []
        for runner in self._runners:
            runner.reset()


def _complete(reduction: Reduction, complete: Complete) -> None:
    for number, gradient in reduction.finish().items():
        complete[number](gradient)
