# SPDX-License-Identifier: Apache-2.0
"""Messages from one rank of a host to another, in memory that both map: a queue for each sender and receiver.

    queues = Queues(index, ranks)
    queues.connect(addresses)                  # of all ranks, in rank order
    address = queues.outgoing(1).reserve(nbytes)
    fill(address)
    queues.publish(1, tag)                     # rank 1 sees the message, and wakes up if it sleeps

    tag, address, nbytes = queues.incoming(0).look()     # None if there is nothing new
    queues.incoming(0).advance()                         # its memory serves other messages

A queue is a ring. Its positions count all bytes since it began: ``head`` is the sender's, ``tail`` the receiver's.
A message that does not fit goes to a larger ring, of which the last record of the old one tells, so that a sender
never waits. A ring that is empty begins at its start again, so that few messages under way touch little memory.

A receiver that has nothing to read says that it sleeps, and waits at a pipe for a byte.

The ranks also vote: each gives a number, and sees those of all others.
"""

from __future__ import annotations

import ctypes
import os
import select
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from hyper_parallel.platform.shared_channel import Address, Peers, Slot

# A rank's words: how many of its threads sleep, the descriptor that wakes them, and its votes of the last two rounds;
# then eight for each rank, of which three are about the queue to it: its head, the first ring's descriptor and size;
# and one is the tail of the queue from it.
_SLEEPERS, _BELL, _VOTES = 0, 1, 2
_WORDS = 8
_HEAD, _DESCRIPTOR, _NBYTES, _TAIL = range(4)

# A record of a ring: four words, then the message. The words: what it is; a message's tag and size, or the next
# ring's descriptor and size.
_RECORD = 64
_MESSAGE, _SKIP, _MOVE = 1, 2, 3

# The first bytes of a ring's memory hold the position at which the ring begins.
_RING_HEADER = 64

_SMALLEST = 1 << 16
_PAGE = 4096


class Message(NamedTuple):
    """A message in memory that the sender writes again after ``advance``."""

    tag: int
    address: int
    nbytes: int


class _Ring:
    """Memory of a queue."""

    def __init__(self, slot: Slot, base: int | None = None) -> None:
        self.slot = slot
        self.capacity = slot.nbytes - _RING_HEADER
        self.words = memoryview(slot.memory).cast("q")
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(slot.memory))
        if base is not None:
            self.words[0] = base

    def place(self, position: int) -> int:
        """Where a position is, in bytes from the ring's start."""
        return (position - self.words[0]) % self.capacity

    def describe(
        self, position: int, kind: int, first: int = 0, second: int = 0
    ) -> None:
        """Writes the words of a record."""
        word = (_RING_HEADER + self.place(position)) // 8
        self.words[word] = kind
        self.words[word + 1] = first
        self.words[word + 2] = second

    def record(self, position: int) -> tuple[int, int, int]:
        """The words of a record."""
        word = (_RING_HEADER + self.place(position)) // 8
        return self.words[word], self.words[word + 1], self.words[word + 2]

    def address(self, position: int) -> int:
        """Where the message of a record is in the memory of this process."""
        return self._start + _RING_HEADER + self.place(position) + _RECORD


class Outgoing:
    """The queue to another rank. ``own``, ``theirs``: the words of both about each other."""

    def __init__(self, own: memoryview, theirs: memoryview, peers: Peers) -> None:
        self._own, self._theirs, self._peers = own, theirs, peers
        self._head = 0  # behind what is published
        self._end = 0  # behind what is reserved
        self._reserved = (0, 0)  # the position and the size of the message
        self._ring: _Ring | None = None
        self._old: deque[tuple[int, _Ring]] = deque()  # (end, a ring not yet read)

    def reserve(self, nbytes: int) -> int:
        """Memory for a message; returns its address."""
        size = _RECORD + _round_up(nbytes, _RECORD)
        tail = self._theirs[_TAIL]
        self._peers.fence()
        while self._old and tail >= self._old[0][0]:
            self._old.popleft()
        self._end = self._head
        ring = self._ring
        if ring is None:
            ring = self._ring = self._create(_SMALLEST, size)
            self._own[_DESCRIPTOR] = ring.slot.descriptor
            self._own[_NBYTES] = ring.slot.nbytes
        elif tail == self._head:
            ring.words[0] = self._head
        ring = self._make_room(ring, size, tail)
        self._reserved = self._end, nbytes
        self._end += size
        return ring.address(self._reserved[0])

    def _make_room(self, ring: _Ring, size: int, tail: int) -> _Ring:
        """The ring in which the record is, at ``_end``."""
        left = ring.capacity - ring.place(self._end)
        skipped = left if size > left else 0
        used = self._end - max(tail, ring.words[0])
        # A record that leads to another ring must always fit.
        if used + skipped + size + _RECORD <= ring.capacity:
            if skipped:
                ring.describe(self._end, _SKIP)
                self._end += skipped
            return ring
        position = self._end
        self._end += _RECORD
        larger = self._ring = self._create(2 * ring.capacity, size)
        ring.describe(position, _MOVE, larger.slot.descriptor, larger.slot.nbytes)
        self._old.append((self._end, ring))
        self._head = self._end  # even if the message is given up
        return larger

    def _create(self, smallest: int, size: int) -> _Ring:
        capacity = max(smallest, 4 * size)
        slot = Slot.create(_round_up(_RING_HEADER + capacity, _PAGE))
        return _Ring(slot, self._end)

    def finish(self, tag: int) -> None:
        """Describes the message that was reserved and filled."""
        assert self._ring is not None
        position, nbytes = self._reserved
        self._ring.describe(position, _MESSAGE, tag, nbytes)

    def publish(self) -> None:
        """Shows the message to the receiver, after a fence."""
        self._head = self._own[_HEAD] = self._end

    def is_read(self) -> bool:
        """Whether the receiver has read all messages."""
        return self._theirs[_TAIL] == self._head


class Incoming:
    """The queue from another rank. ``own``, ``theirs``: the words of both about each other."""

    def __init__(
        self, own: memoryview, theirs: memoryview, peers: Peers, rank: int
    ) -> None:
        self._own, self._theirs = own, theirs
        self._peers, self._rank = peers, rank
        self._tail = 0
        self._size = 0  # of the record that was looked at
        self._ring: _Ring | None = None

    def is_empty(self) -> bool:
        """Whether there is nothing new."""
        return self._theirs[_HEAD] == self._tail

    def look(self) -> Message | None:
        """The first message that was not read; the same one until ``advance``."""
        if self.is_empty():
            return None
        self._peers.fence()
        if self._ring is None:
            self._ring = self._open(self._theirs[_DESCRIPTOR], self._theirs[_NBYTES])
        while True:
            kind, first, second = self._ring.record(self._tail)
            if kind == _MESSAGE:
                self._size = _RECORD + _round_up(second, _RECORD)
                return Message(first, self._ring.address(self._tail), second)
            if kind == _SKIP:
                self._tail += self._ring.capacity - self._ring.place(self._tail)
            else:
                assert kind == _MOVE
                self._tail += _RECORD
                self._ring = self._open(first, second)

    def _open(self, descriptor: int, nbytes: int) -> _Ring:
        return _Ring(self._peers.open_slot(self._rank, descriptor, nbytes))

    def advance(self) -> None:
        """Gives the memory of the message back."""
        self._peers.fence()
        self._tail += self._size
        self._own[_TAIL] = self._tail


class Queues(Peers):
    """The queues between this rank and all others of a group."""

    def __init__(self, index: int, ranks: int) -> None:
        super().__init__(index, ranks, _WORDS * (1 + ranks))
        self._hears, rings = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for descriptor in (self._hears, rings):
            weakref.finalize(self, os.close, descriptor)
        self.own[_BELL] = rings
        self._bells: dict[int, int] = {}
        self._outgoing: dict[int, Outgoing] = {}
        self._incoming: dict[int, Incoming] = {}
        self._ends: dict[int, int] = {}
        self._round = 0

    def connect(self, addresses: list[Address]) -> None:
        super().connect(addresses)
        for rank, end in self.others:
            path = self.path_of(rank, self.words[rank][_BELL])
            bell = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            weakref.finalize(self, os.close, bell)
            own = _words_about(self.own, rank)
            theirs = _words_about(self.words[rank], self.index)
            self._bells[rank], self._ends[rank] = bell, end
            self._outgoing[rank] = Outgoing(own, theirs, self)
            self._incoming[rank] = Incoming(own, theirs, self, rank)

    def outgoing(self, rank: int) -> Outgoing:
        """The queue to a rank."""
        return self._outgoing[rank]

    def incoming(self, rank: int) -> Incoming:
        """The queue from a rank."""
        return self._incoming[rank]

    def publish(self, rank: int, tag: int) -> None:
        """Shows a rank the message that was reserved and filled, and wakes it up."""
        queue = self._outgoing[rank]
        queue.finish(tag)
        self.fence()
        queue.publish()
        self._wake(rank)

    # --- votes

    def vote(self, number: int) -> None:
        """Gives this rank's number, from 0 to 255, in a new round; all ranks give theirs before the next one."""
        self._round += 1
        # Nobody begins the round after the next one before all have voted in the next one, and so read this one's.
        self.own[_VOTES + self._round % 2] = self._round << 8 | number
        for rank in self._bells:
            self._wake(rank)

    def votes(self) -> dict[int, int]:
        """The numbers of this round that ranks have given."""
        words = {
            rank: words[_VOTES + self._round % 2]
            for rank, words in enumerate(self.words)
        }
        return {
            rank: word & 255 for rank, word in words.items() if word >> 8 == self._round
        }

    # --- sleeping

    def _wake(self, rank: int) -> None:
        self.fence()
        if self.words[rank][_SLEEPERS]:
            with suppress(
                OSError
            ):  # it has ended, or has as many bytes as the pipe holds
                os.write(self._bells[rank], b"\0")

    def sleep(
        self, ranks: Iterable[int], seconds: float, is_idle: Callable[[], bool]
    ) -> None:
        """Waits for that time at most, while there is nothing to do, until one of the ranks does something or ends.

        A processor that lets a write pass a later read, or another thread that sleeps too, may make it miss that.
        """
        with self._lock:
            self.own[_SLEEPERS] += 1
        try:
            self.fence()
            if is_idle():
                poll = select.poll()
                for descriptor in (self._hears, *(self._ends[rank] for rank in ranks)):
                    poll.register(descriptor, select.POLLIN)
                poll.poll(seconds * 1000)
        finally:
            with self._lock:
                self.own[_SLEEPERS] -= 1
        with suppress(BlockingIOError):
            os.read(self._hears, _PAGE)


def _words_about(words: memoryview, rank: int) -> memoryview:
    start = _WORDS * (1 + rank)
    return words[start : start + _WORDS]


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
