# SPDX-License-Identifier: Apache-2.0
"""Messages between the ranks of one host, in memory that the reader maps: nothing passes through a socket.

    channel = Channel(index, ranks)
    channel.connect(addresses)              # of all ranks, in rank order
    slot = channel.take(nbytes)             # memory that no rank reads any more
    fill(slot.memory)
    number = channel.publish(slot)          # every rank's n-th message belongs to the same collective
    channel.missing(number)                 # the ranks whose n-th message is not there yet
    slot = channel.slot_of(rank, number)
    channel.mark_read(number)

A rank keeps its control words in a file of its own: what it has published, and what it has read. Every word has one
writer. The files have no names: a rank opens those of another through its process, and they go with the last of
them, however a process ends.
"""

from __future__ import annotations

import mmap
import os
import select
import threading
import weakref
from typing import Any, NamedTuple

# As many messages of a rank are known; nobody lets as many collectives be under way at once.
RECENT = 128

# The words that describe a message: its number from 1, the descriptor and the size of its slot.
_WORDS = 3


class Address(NamedTuple):
    """Where another process finds a rank's control words."""

    host: str
    process: int
    descriptor: int


class Slot:
    """Memory for messages of this rank, one after the other, or such memory of another rank."""

    def __init__(self, descriptor: int, nbytes: int, path: str | None = None) -> None:
        self.nbytes = nbytes
        self.descriptor = descriptor
        self.message = 0  # the last one that was in it
        self.is_taken = False
        self.views: dict[Any, Any] = {}  # tensors in it, for whoever makes them
        if path is None:
            self.memory = mmap.mmap(descriptor, nbytes)
            weakref.finalize(self, os.close, descriptor)
        else:
            opened = os.open(path, os.O_RDWR)
            self.memory = mmap.mmap(opened, nbytes)
            os.close(opened)

    @staticmethod
    def create(nbytes: int) -> Slot:
        """New memory, which other processes can open."""
        descriptor = os.memfd_create("hyper_parallel", os.MFD_CLOEXEC)
        os.truncate(descriptor, nbytes)
        return Slot(descriptor, nbytes)


class _Control:
    """A rank's words: how many messages it has published, the recent ones, and which of each rank it has read."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.words = memoryview(slot.memory).cast("q")

    @staticmethod
    def nbytes(ranks: int) -> int:
        return 8 * (1 + _WORDS * RECENT + ranks * RECENT)

    def describe(self, number: int, slot: Slot) -> None:
        start = 1 + _WORDS * (number % RECENT)
        self.words[start] = number
        self.words[start + 1] = slot.descriptor
        self.words[start + 2] = slot.nbytes

    def description(self, number: int) -> tuple[int, int]:
        start = 1 + _WORDS * (number % RECENT)
        if self.words[start] != number:
            raise RuntimeError(
                f"shared memory: message {number} was read too late, when message {self.words[start]} was there"
            )
        return self.words[start + 1], self.words[start + 2]

    def place_read(self, rank: int, number: int) -> int:
        return 1 + _WORDS * RECENT + rank * RECENT + number % RECENT


class Channel:
    """The messages of a group's ranks; ``index`` is this one's rank in the group."""

    def __init__(self, index: int, ranks: int) -> None:
        self.index, self.ranks = index, ranks
        self._own = _Control(Slot.create(_Control.nbytes(ranks)))
        self._controls: list[_Control] = []
        self._processes: list[int] = []
        self._others: list[tuple[int, int]] = []  # (rank, what tells of its end)
        self._slots: list[Slot] = []
        self._slots_of: dict[tuple[int, int], Slot] = {}
        self._published = 0
        self._lock = threading.Lock()

    def address(self, host: str) -> Address:
        """What the other ranks need to connect."""
        return Address(host, os.getpid(), self._own.slot.descriptor)

    def connect(self, addresses: list[Address]) -> None:
        """Opens the control words of all ranks; an OSError if that cannot be."""
        for rank, address in enumerate(addresses):
            self._processes.append(address.process)
            if rank == self.index:
                self._controls.append(self._own)
                continue
            path = _path_of(address.process, address.descriptor)
            slot = Slot(address.descriptor, self._own.slot.nbytes, path)
            self._controls.append(_Control(slot))
            descriptor = os.pidfd_open(address.process)
            weakref.finalize(self, os.close, descriptor)
            self._others.append((rank, descriptor))

    # --- this rank's messages

    def take(self, nbytes: int) -> Slot:
        """Memory of exactly this size that every rank has read, or that is new."""
        for slot in self._slots:
            is_fit = slot.nbytes == nbytes and not slot.is_taken
            if is_fit and self._is_read(slot.message):
                slot.is_taken = True
                return slot
        slot = Slot.create(nbytes)
        slot.is_taken = True
        self._slots.append(slot)
        return slot

    def _is_read(self, number: int) -> bool:
        if number == 0:
            return True
        for rank, control in enumerate(self._controls):
            place = control.place_read(self.index, number)
            if rank != self.index and control.words[place] < number:
                return False
        return True

    def publish(self, slot: Slot) -> int:
        """Shows a slot to the other ranks as this rank's next message; returns its number."""
        self._published += 1
        number = slot.message = self._published
        self._fence()
        self._own.describe(number, slot)
        self._fence()
        self._own.words[0] = number
        return number

    # --- messages of other ranks

    def missing(self, number: int) -> list[int]:
        """The ranks that have not published their message of this number."""
        return [
            rank
            for rank, control in enumerate(self._controls)
            if control.words[0] < number
        ]

    def slot_of(self, rank: int, number: int) -> Slot:
        """The memory of a rank's message, which has been published."""
        self._fence()
        descriptor, nbytes = self._controls[rank].description(number)
        slot = self._slots_of.get((rank, descriptor))
        if slot is None:
            path = _path_of(self._processes[rank], descriptor)
            slot = Slot(descriptor, nbytes, path)
            self._slots_of[rank, descriptor] = slot
        return slot

    def mark_read(self, number: int) -> None:
        """Tells the other ranks that their messages of this number may be overwritten."""
        self._fence()
        for rank in range(self.ranks):
            self._own.words[self._own.place_read(rank, number)] = number

    def ended(self) -> list[int]:
        """The ranks whose processes have ended."""
        poll = select.poll()
        for _, descriptor in self._others:
            poll.register(descriptor, select.POLLIN)
        readable = {descriptor for descriptor, _ in poll.poll(0)}
        return [rank for rank, descriptor in self._others if descriptor in readable]

    def _fence(self) -> None:
        # Nothing moves past taking and giving back a lock: words are written after the data that they are about, and
        # read before it, on weakly ordered processors too.
        with self._lock:
            pass


def _path_of(process: int, descriptor: int) -> str:
    return f"/proc/{process}/fd/{descriptor}"
