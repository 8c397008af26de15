# SPDX-License-Identifier: Apache-2.0
"""Rows of collectives on torch: in memory that the ranks of one host share where gloo carries them, else in buffers.

Sharing is agreed on once for a group, in the job's store: all ranks are on one host and can open each other's memory,
or none of them shares. HYPER_PARALLEL_SHARE_MEMORY=0 on any rank turns it off.
"""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections import defaultdict
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.platform.rows import BufferRows, Rows
from hyper_parallel.platform.shared_channel import Address, Channel, Slot
from hyper_parallel.platform.shared_files import find_host
from hyper_parallel.platform.torch import gloo, order

HYPER_PARALLEL_SHARE_MEMORY = "HYPER_PARALLEL_SHARE_MEMORY"
_PAGE = 4096

_YIELDS = 30  # looks that only let other processes run, before the first nap
_SHORTEST_NAP, _LONGEST_NAP = 2e-5, 5e-4
_LOOK_SECONDS = 0.25  # between looks whether another process has ended


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
    _memory[group] = _Memory(_connect(group, device, timeout), timeout)


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
        next_look = start + _LOOK_SECONDS
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
                next_look = now + _LOOK_SECONDS
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


# --- agreement


def _connect(
    group: dist.ProcessGroup, device: torch.device, timeout: timedelta
) -> Channel | None:
    """A channel to all ranks of the group, or None on all of them."""
    if not gloo.is_used(group, torch.empty(0, device=device)) or group.size() == 1:
        return None
    exchange = functools.partial(_exchange, _store_of(group), group, timeout)
    channel = _make_channel(group)
    offer = None if channel is None else list(channel.address(_find_namespaces()))
    offers = exchange("offers", offer)
    answers = exchange("answers", _open_all(channel, offers))
    return channel if all(answers) else None


def _open_all(channel: Channel | None, offers: list[Any]) -> bool:
    """Whether all ranks offer their memory on one host, and this one can open it."""
    if channel is None or None in offers:
        return False
    if len({host for host, *_ in offers}) > 1:
        return False
    try:
        channel.connect([Address(*one) for one in offers])
    except OSError:
        return False
    return True


def _make_channel(group: dist.ProcessGroup) -> Channel | None:
    asked = os.environ.get(HYPER_PARALLEL_SHARE_MEMORY, "1")
    can_share = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
    if asked in ("", "0") or not can_share:
        return None
    try:
        return Channel(group.rank(), group.size())
    except OSError:
        return None


def _find_namespaces() -> str:
    """The same on all processes that see one host: containers and network namespaces are hosts of their own."""
    namespaces = [
        str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("net", "pid")
    ]
    return " ".join((find_host(), *namespaces))


def _store_of(group: dist.ProcessGroup) -> Any:
    store = distributed_c10d._get_default_store()
    key = f"hyper_parallel/rows/{group.group_name}"
    # A job that is joined again in the same store agrees anew.
    times = store.add(f"{key}/{dist.get_rank()}", 1)
    return dist.PrefixStore(f"{key}/{times}", store)  # type: ignore[attr-defined]


def _exchange(
    store: Any, group: dist.ProcessGroup, timeout: timedelta, what: str, own: Any
) -> list[Any]:
    """What every rank says, in rank order."""
    keys = [f"{what}/{rank}" for rank in range(group.size())]
    store.set(keys[group.rank()], json.dumps(own))
    deadline = time.monotonic() + timeout.total_seconds()
    while not store.check(keys):
        if time.monotonic() > deadline:
            raise RuntimeError(f"shared memory: timed out after {timeout}")
        if failed := order.failure(group):
            raise failed
        with suppress(RuntimeError):  # which tells that the time is over
            store.wait(keys, timedelta(seconds=_LOOK_SECONDS))
    return [json.loads(store.get(key)) for key in keys]
