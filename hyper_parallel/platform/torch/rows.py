# SPDX-License-Identifier: Apache-2.0
"""Rows of collectives on torch: in memory that the ranks of one host share where gloo carries them, else in buffers.

Sharing is agreed on once for a group: see ``sharing``.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hyper_parallel.platform.rows import BufferRows, Rows
from hyper_parallel.platform.shared_channel import Channel, Slot
from hyper_parallel.platform.torch.sharing import LOOK_SECONDS, connect

_PAGE = 4096

_YIELDS = 30  # looks that only let other processes run, before the first nap
_SHORTEST_NAP, _LONGEST_NAP = 2e-5, 5e-4


class _Memory:
    """The memory of a group's rows: its channel, None if the ranks share nothing, and buffers that wait for use."""

    def __init__(self, channel: Channel | None, timeout: timedelta) -> None:
        self.channel, self.timeout = channel, timeout
        self.buffers: dict[Any, list[BufferRows]] = defaultdict(list)


def view_slot(slot: Slot, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
    """A slot as a tensor, and its rows; the same ones each time."""
    found = slot.views.get((dtype, shape))
    if found is None:
        flat = torch.frombuffer(slot.memory, dtype=torch.uint8)
        nbytes = math.prod(shape) * dtype.itemsize
        tensor = flat[:nbytes].view(dtype).view(shape)
        found = slot.views[dtype, shape] = (tensor, list(tensor))
    return found


_memory: WeakKeyDictionary[dist.ProcessGroup, _Memory] = WeakKeyDictionary()


def is_agreed(group: dist.ProcessGroup) -> bool:
    """Whether the ranks of the group know whether they share memory."""
    return group in _memory


def agree(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
    """Has the ranks of the group agree whether they share memory."""
    channel = connect(group, device, timeout, "rows", Channel)
    _memory[group] = _Memory(channel, timeout)


def take_rows(
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
    *,
    is_outgoing: bool,
) -> Rows:
    """Rows of a collective of the group, whose ranks have agreed."""
    memory = _memory[group]
    if memory.channel is not None:
        channel, timeout = memory.channel, memory.timeout
        return SharedRows(channel, length, dtype, timeout, is_outgoing=is_outgoing)
    free = memory.buffers[length, dtype, is_outgoing]
    if free:
        return free.pop()
    buffer = torch.empty((group.size(), length), dtype=dtype, device=device)
    own = buffer if is_outgoing else buffer[group.rank()]
    return BufferRows(buffer, own, free.append)


class SharedRows(Rows):
    """Rows in the memory of a host; a rank reads what others have written where they have written it."""

    is_shared = True

    def __init__(
        self,
        channel: Channel,
        length: int,
        dtype: torch.dtype,
        timeout: timedelta,
        *,
        is_outgoing: bool,
    ) -> None:
        self._channel, self._timeout = channel, timeout
        self._dtype, self._is_outgoing = dtype, is_outgoing
        self._shape = (channel.ranks, length) if is_outgoing else (1, length)
        nbytes = math.prod(self._shape) * dtype.itemsize
        self._slot = channel.take(-(-nbytes // _PAGE) * _PAGE)
        self._number = 0
        whole, rows = view_slot(self._slot, dtype, self._shape)
        self.own = whole if is_outgoing else rows[0]

    @property
    def nbytes(self) -> int:
        """The bytes of a row."""
        return self._shape[1] * self._dtype.itemsize

    def start(self) -> SharedWork:
        """Shows the other ranks what this one has written; returns what to wait for."""
        self._number = self._channel.publish(self._slot)
        return SharedWork(self._channel, self._number, self._timeout)

    def read(self) -> list[torch.Tensor]:
        index, channel = self._channel.index, self._channel
        place = index if self._is_outgoing else 0
        rows = []
        for rank in range(channel.ranks):
            slot = self._slot
            if rank != index:
                slot = channel.slot_of(rank, self._number)
            if slot.nbytes != self._slot.nbytes:
                raise RuntimeError(
                    f"shared memory: rank {rank} of the group has sent {slot.nbytes} bytes where this rank has sent "
                    f"{self._slot.nbytes}: the ranks have started different collectives"
                )
            _, rows_of_rank = view_slot(slot, self._dtype, self._shape)
            rows.append(rows_of_rank[place])
        return rows

    def sum_into(self, output: torch.Tensor) -> None:
        """The sum of what all ranks have written for this one, in rank order."""
        first, second, *others = self.read()
        torch.add(first, second, out=output)
        for row in others:
            output.add_(row)

    def release(self) -> None:
        if self._number:
            self._channel.mark_read(self._number)
        self._slot.is_taken = False


class SharedWork:
    """A message of every rank, awaited; like torch's own works."""

    def __init__(self, channel: Channel, number: int, timeout: timedelta) -> None:
        self._channel, self._number, self._timeout = channel, number, timeout
        self._deadline = time.monotonic() + timeout.total_seconds()

    def is_completed(self) -> bool:
        """Whether every rank has published its message, or ``wait`` would raise that it has not."""
        if self._has_arrived():
            return True
        return time.monotonic() > self._deadline or bool(self._ended())

    def _has_arrived(self) -> bool:
        return not self._channel.missing(self._number)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Returns when every rank has published its message; a RuntimeError after the timeout or if one has ended."""
        timeout = self._timeout if timeout is None else timeout
        looks, nap = 0, _SHORTEST_NAP
        start = time.monotonic()
        deadline = min(start + timeout.total_seconds(), self._deadline)
        next_look = start + LOOK_SECONDS
        while not self._has_arrived():
            looks += 1
            if looks <= _YIELDS:
                os.sched_yield()
                continue
            now = time.monotonic()
            if now > deadline:
                raise RuntimeError(f"shared memory: timed out after {timeout}")
            if now > next_look:
                self._check_alive()
                next_look = now + LOOK_SECONDS
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)

    def _ended(self) -> set[int]:
        return set(self._channel.ended()) & set(self._channel.missing(self._number))

    def _check_alive(self) -> None:
        ended = self._ended()
        if ended:
            raise RuntimeError(
                f"shared memory: the processes of ranks {sorted(ended)} of the group have ended"
            )
