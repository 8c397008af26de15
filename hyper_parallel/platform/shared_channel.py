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

A rank keeps its control words in a file of its own: what it has published, and what it has read. The files have no
names: a rank opens those of another through its process, and they go with the last of them, however a process ends.
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


class PeerEndedError(RuntimeError):
    """The process of another rank has ended, and what it shared has gone with it."""


class Peers:
    """The ranks of a group on one host: the words that each of them writes, and whether its process has ended.

    ``index`` is this process's rank in the group. Every word has one writer.
    """

    def __init__(self, index: int, ranks: int, words: int) -> None:
        self.index, self.ranks = index, ranks
        self._slot = Slot.create(8 * words)
        self.own = _view_words(self._slot)
        self.words: list[memoryview] = []  # of all ranks
        self._processes: list[int] = []
        self.others: list[tuple[int, int]] = []  # (rank, what tells of its end)
        self._lock = threading.Lock()

    def address(self, host: str) -> Address:
        """What the other ranks need to connect."""
        return Address(host, os.getpid(), self._slot.descriptor)

    def connect(self, addresses: list[Address]) -> None:
        """Opens the words of all ranks; an OSError if that cannot be."""
        for rank, address in enumerate(addresses):
            self._processes.append(address.process)
            if rank == self.index:
                self.words.append(self.own)
                continue
            path = self.path_of(rank, address.descriptor)
            slot = Slot(address.descriptor, self._slot.nbytes, path)
            self.words.append(_view_words(slot))
            descriptor = os.pidfd_open(address.process)
            weakref.finalize(self, os.close, descriptor)
            self.others.append((rank, descriptor))

    def open_slot(self, rank: int, descriptor: int, nbytes: int) -> Slot:
        """Memory that another rank has under this descriptor."""
        try:
            return Slot(descriptor, nbytes, self.path_of(rank, descriptor))
        except (FileNotFoundError, ProcessLookupError) as error:
            message = (
                f"shared memory: the process of rank {rank} of the group has ended"
            )
            raise PeerEndedError(message) from error

    def path_of(self, rank: int, descriptor: int) -> str:
        """Where a descriptor of another rank can be opened."""
        return f"/proc/{self._processes[rank]}/fd/{descriptor}"

    def ended(self) -> list[int]:
        """The ranks whose processes have ended."""
        poll = select.poll()
        for _, descriptor in self.others:
            poll.register(descriptor, select.POLLIN)
        readable = {descriptor for descriptor, _ in poll.poll(0)}
        return [rank for rank, descriptor in self.others if descriptor in readable]

    def fence(self) -> None:
        """No access to memory moves past this.

        So words are written after the data that they are about, and read before it, on weakly ordered processors too.
        """
        # What precedes giving a lock back stays before it, and what follows taking one stays behind it; only giving
        # back and then taking, in this order, holds both. One lock taken and given back would let them pass each other.
        with self._lock:
            pass
        with self._lock:
            pass


def _view_words(slot: Slot) -> memoryview:
    return memoryview(slot.memory).cast("q")


class _Control:
    """What a rank's words say: how many messages it has published, the recent ones, and which of each rank it has read.

    The first word is the number of the last message.
    """

    def __init__(self, words: memoryview) -> None:
        self.words = words

    @staticmethod
    def count_words(ranks: int) -> int:
        return 1 + _WORDS * RECENT + ranks * RECENT

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


class Channel(Peers):
    """The messages of a group's ranks, each of which is for all of them."""

    def __init__(self, index: int, ranks: int) -> None:
        super().__init__(index, ranks, _Control.count_words(ranks))
        self._own = _Control(self.own)
        self._controls: list[_Control] = []
        self._slots: list[Slot] = []
        self._slots_of: dict[tuple[int, int], Slot] = {}
        self._published = 0

    def connect(self, addresses: list[Address]) -> None:
        super().connect(addresses)
        self._controls = [_Control(words) for words in self.words]

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
        self.fence()
        self._own.describe(number, slot)
        self.fence()
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
        self.fence()
        descriptor, nbytes = self._controls[rank].description(number)
        slot = self._slots_of.get((rank, descriptor))
        if slot is None:
            slot = self.open_slot(rank, descriptor, nbytes)
            self._slots_of[rank, descriptor] = slot
        return slot

    def mark_read(self, number: int) -> None:
        """Tells the other ranks that their messages of this number may be overwritten."""
        self.fence()
        for rank in range(self.ranks):
            self._own.words[self._own.place_read(rank, number)] = number
