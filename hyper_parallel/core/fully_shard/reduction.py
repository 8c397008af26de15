# SPDX-License-Identifier: Apache-2.0
"""Gradients of a unit on their way into its shards: one reduce-scatter, for hybrid meshes one all-reduce after it.

Beside the packed gradients of each rank travel a few numbers: which entries have a gradient there, and of which unit
they are. So all ranks learn which gradients are None everywhere, and whether they have reduced the same unit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hyper_parallel.core.fully_shard.packing import Packing, pair_gradients
from hyper_parallel.core.fully_shard.plan import Owner
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.rows import Rows

platform = get_platform()

# A unit's number travels in binary, each digit beside its complement: where this rank has a zero, so must all others.
DIGITS = 12


class Scatter:
    """A reduce-scatter of the gradients of some entries, whose results are views of one flat tensor."""

    def __init__(
        self, packing: Packing, gradients: Sequence[Any], dtype: Any, owner: Owner
    ) -> None:
        plan = packing.plan
        self.plan, self._packing = plan, packing
        self._dtype, self._owner = dtype, owner
        self._device = platform.device()
        self._is_used = tuple(gradient is not None for gradient in gradients)
        self._gradients = [
            self._zeros(number) if gradient is None else gradient
            for number, gradient in enumerate(gradients)
        ]
        row_start = packing.starts[-1]
        self._marks_start = row_start + plan.row
        self._row_length = plan.row + len(plan.entries) + 2 * DIGITS
        size = row_start + self._row_length
        self.flat = platform.empty((size,), dtype, self._device)
        self._handle: Any = None
        self._rows: Rows | None = None

    def start(self, group: Any) -> None:
        """Starts the collective."""
        plan, length = self.plan, self._row_length
        sources = [
            self._gradients[number].contiguous().reshape(-1) for number in plan.direct
        ]
        starts = self._packing.starts
        stops = [*starts[1:], int(self.flat.shape[0])]
        outputs = [
            self.flat[start:stop] for start, stop in zip(starts, stops, strict=True)
        ]
        self._rows = platform.take_rows(length, self._dtype, group, is_outgoing=True)
        self._pack(self._rows.own)
        if plan.ranks > 1:
            self._handle = platform.reduce_scatter_tensors(
                outputs, sources, group, self._owner.number, self._rows
            )
        else:
            platform.copy_all(outputs, [*sources, self._rows.own.reshape(-1)])
            self._rows.release()

    def _pack(self, rows: Any) -> None:
        """Packs what is not sent directly."""
        ranks = self.plan.ranks
        places = self._packing.targets_in(rows)
        targets, sources = pair_gradients(places, self._gradients, ranks)
        marks = _marks(self._is_used, self._owner.number, ranks, self._dtype)
        platform.copy_all([*targets, places.marks], [*sources, marks])
        self._gradients = []

    def _zeros(self, number: int) -> Any:
        shape = self.plan.entries[number].shape
        return platform.zeros(shape, self._dtype, self._device)

    def wait(self) -> None:
        """Waits until the results are there; raises if another rank has reduced another unit."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        rows, self._rows = self._rows, None
        assert rows is not None
        try:
            handle.wait()
        finally:
            rows.release()
        start = self._marks_start + len(self.plan.entries)
        digits = self.flat[start:].tolist()
        expected = _digits(self._owner.number)
        if any(digit and not own for digit, own in zip(digits, expected, strict=True)):
            raise _explain_other_unit(self._owner)

    def add(self, number: int, shard: Any) -> None:
        """Adds to this rank's shard of an entry's sum, which then counts as used."""
        self.flat[self._marks_start + number] = 1
        platform.add_into(self._take(number), shard)

    def result(self, number: int) -> Any:
        """This rank's shard of an entry's sum; None if no rank has a gradient for it."""
        if not self._is_used[number]:
            mark = self.flat[self._marks_start + number]
            if mark.item() == 0:
                return None
        return self._take(number)

    def _take(self, number: int) -> Any:
        place, shape = self._packing.sums[number]
        return self.flat[place].reshape(shape)


def _explain_other_unit(owner: Owner) -> Exception:
    return coded(
        RuntimeError,
        "HP431",
        f"fully_shard: this rank has reduced the gradients of unit {owner.number}, {owner.name}, and another rank "
        "those of another unit: backward has used different units on them. With "
        "set_reduce_scatter_unused_params(True) ranks that do not use a unit add zeros",
    )


@functools.lru_cache(maxsize=1024)
def _digits(number: int) -> tuple[int, ...]:
    digits = [(number >> position) & 1 for position in range(DIGITS)]
    return tuple(digit for own in digits for digit in (own, 1 - own))


@functools.lru_cache(maxsize=1024)
def _marks(is_used: tuple[bool, ...], number: int, ranks: int, dtype: Any) -> Any:
    """What travels at the end of each row."""
    row = [*(int(used) for used in is_used), *_digits(number)]
    array = np.array([row] * ranks, np.float32)
    rows = platform.tensor_from_bytes(
        array.view(np.uint8).reshape(-1), "float32", array.shape
    )
    return rows.to(dtype).to(platform.device())


class Reduction:
    """Gradients of some parameters of a unit, in one collective, on a hybrid mesh in two, one after the other.

    ``numbers``: which parameters. ``kept``: sums of shards that wait for an all-reduce, by parameter; the reduction
    takes what is there, or adds to it if it ends without an all-reduce itself.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        scatter: Scatter,
        factor: float,
        replicas: Any,
        kept: dict[int, Any],
        all_reduces: bool,
    ) -> None:
        self.numbers = list(numbers)
        self._scatter, self._factor = scatter, factor
        self._replicas, self._kept = replicas, kept
        self._all_reduces = all_reduces
        self._handle: Any = None
        self._is_scattered = False

    def advance(self) -> bool:
        """Waits for the collective under way and starts the next one; returns whether there is none."""
        if not self._is_scattered:
            self._scatter.wait()
            self._is_scattered = True
            if self._replicas is not None and self._all_reduces:
                self._add_kept()
                _, self._handle = platform.all_reduce(
                    self._scatter.flat, self._replicas, async_op=True
                )
                return False
        elif self._handle is not None:
            handle, self._handle = self._handle, None
            handle.wait()
        return True

    def finish(self) -> dict[int, Any]:
        """The gradients of the shards by the parameter's number; none while they wait for an all-reduce."""
        while not self.advance():
            pass
        if self._replicas is not None and not self._all_reduces:
            self._keep()
            return {}
        if self._factor != 1:
            platform.divide_by(self._scatter.flat, self._factor)
        results = {}
        for position, number in enumerate(self.numbers):
            result = self._scatter.result(position)
            if result is not None:
                results[number] = result
        return results

    def _keep(self) -> None:
        for position, number in enumerate(self.numbers):
            result = self._scatter.result(position)
            if result is not None:
                before = self._kept.get(number)
                self._kept[number] = result if before is None else before + result

    def _add_kept(self) -> None:
        for position, number in enumerate(self.numbers):
            kept = self._kept.pop(number, None)
            if kept is not None:
                self._scatter.add(position, kept)
