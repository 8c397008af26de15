# SPDX-License-Identifier: Apache-2.0
"""The tensors that a unit computes with, in memory that is allocated while they are whole and freed in between.

Where the framework can free what autograd has saved, the tensors themselves live as long as the unit, and what was
saved of them is valid again as soon as they are gathered again into the same place. Elsewhere each gather makes new
tensors, and autograd saves references to them: see ``saved.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.fully_shard.packing import Packing
from hyper_parallel.core.fully_shard.plan import Owner, Plan
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.rows import Rows

platform = get_platform()


class Memory:
    """The whole tensors of a plan. Packed ones share one block of memory."""

    def __init__(self, plan: Plan, dtype: Any, device: Any) -> None:
        self.plan, self.dtype, self.device = plan, dtype, device
        self.tensors: list[Any] = [None] * len(plan.entries)
        self._blocks: list[Any] = []
        self._is_allocated = False
        self.allocate()

    def _make(self) -> None:
        plan = self.plan
        for number in plan.direct:
            shape = plan.entries[number].shape
            block = platform.empty(shape, self.dtype, self.device)
            self.tensors[number] = block
            self._blocks.append(block)
        if plan.packed:
            self._blocks.append(self._share_block(plan))

    def _share_block(self, plan: Plan) -> Any:
        sizes = [math.prod(plan.entries[number].shape) for number in plan.packed]
        block = platform.empty((sum(sizes),), self.dtype, self.device)
        start = 0
        for number, size in zip(plan.packed, sizes, strict=True):
            view = block[start : start + size]
            self.tensors[number] = view.reshape(plan.entries[number].shape)
            start += size
        return block

    def release(self) -> None:
        """Frees the memory."""
        if not self._is_allocated:
            return
        self._is_allocated = False
        if platform.releases_saved_tensors:
            for block in self._blocks:
                platform.release_memory(block)
        else:
            self._blocks = []
            self.tensors = [None] * len(self.tensors)

    def allocate(self) -> None:
        """Allocates the memory, unless it is there."""
        if self._is_allocated:
            return
        self._is_allocated = True
        if not self._blocks:
            self._make()
        else:
            for block in self._blocks:
                platform.restore_memory(block)

    def own_pieces(self, plan: Plan) -> list[Any]:
        """Copies of what this rank holds of the tensors by another plan."""
        return [
            platform.clone(tensor[plan.slices(number, plan.index)].contiguous())
            for number, tensor in enumerate(self.tensors)
        ]


class Gatherer:
    """Gathers the tensors of a memory from the shards of a plan, in one collective per gather.

    Packed shards travel in rows, one per rank. The last element of a row is the unit's number, so that ranks which
    gather different units are told so.
    """

    def __init__(
        self, memory: Memory, packing: Packing, group: Any, owner: Owner
    ) -> None:
        self.memory, self.plan = memory, packing.plan
        self._packing, self._group, self._owner = packing, group, owner
        self._targets: list[Any] = []

    def start(self, shards: Sequence[Any]) -> Gather:
        """Starts to gather every rank's shards."""
        memory, plan = self.memory, self.plan
        memory.allocate()
        if plan.ranks == 1:
            platform.copy_all(memory.tensors, shards)
            return Gather(self, None, None)
        outputs = [memory.tensors[number].reshape(-1) for number in plan.direct]
        sources = [self._prepare(shards[number]) for number in plan.direct]
        rows = None
        if plan.packed:
            rows = platform.take_rows(plan.row + 1, memory.dtype, self._group)
            self._pack(rows.own, shards)
        handle = platform.gather_tensors(
            outputs, sources, self._group, self._owner.number, rows
        )
        return Gather(self, handle, rows)

    def _prepare(self, shard: Any) -> Any:
        moved = shard.to(self.memory.device).to(self.memory.dtype)
        return moved.contiguous().reshape(-1)

    def _pack(self, row: Any, shards: Sequence[Any]) -> None:
        index = self.plan.index
        own = self.plan.pieces[index]
        targets = self._packing.pieces_in(row, index)
        platform.copy_all(targets, [shards[piece.number] for piece in own])
        row[self.plan.row] = _to_element(self._owner.number)

    def unpack(self, rows: Sequence[Any]) -> None:
        """Copies packed tensors from the ranks' rows into their places."""
        numbers = [int(row[self.plan.row].item()) for row in rows]
        if any(number != _to_element(self._owner.number) for number in numbers):
            raise _explain_other_unit(self._owner, numbers)
        sources: list[Any] = []
        for rank, row in enumerate(rows):
            sources += self._packing.pieces_in(row, rank)
        platform.copy_all(self._find_targets(), sources)

    def _find_targets(self) -> list[Any]:
        """The places of packed shards in the whole tensors."""
        if self._targets:
            return self._targets
        tensors = self.memory.tensors
        targets = [
            tensors[piece.number][piece.slices]
            for pieces in self.plan.pieces
            for piece in pieces
        ]
        if platform.releases_saved_tensors:  # else tensors are others the next time
            self._targets = targets
        return targets


def _to_element(number: int) -> int:
    """A unit's number as a value that every floating-point dtype holds exactly."""
    return number % 128


def _explain_other_unit(owner: Owner, numbers: Sequence[int]) -> Exception:
    return coded(
        RuntimeError,
        "HP430",
        f"fully_shard: this rank gathers unit {owner.number}, {owner.name}, but the ranks of its group gather the "
        f"units {list(numbers)}; every rank must call fully_shard for the same modules in the same order, and run the "
        "same units in the same order",
    )


class Gather:
    """A gather under way."""

    def __init__(self, gatherer: Gatherer, handle: Any, rows: Rows | None) -> None:
        self._gatherer, self._handle, self._rows = gatherer, handle, rows

    def finish(self) -> None:
        """Waits until the tensors are whole."""
        handle, self._handle = self._handle, None
        rows, self._rows = self._rows, None
        try:
            if handle is not None:
                handle.wait()
            if rows is not None:
                self._gatherer.unpack(rows.read())
        finally:
            if rows is not None:
                rows.release()
