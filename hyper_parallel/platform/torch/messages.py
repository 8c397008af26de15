# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks of one host on torch: in memory that they share where gloo would carry them.

Sharing is agreed on once for a group: see ``sharing``. A receiver looks a few times for what it waits for, and then
sleeps until the sender wakes it up.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hyper_parallel.platform.contract.memory import round_up
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.messages import HEADER_BYTES, Messages
from hyper_parallel.platform.shared_channel import PeerEndedError
from hyper_parallel.platform.shared_queue import Message, Queues
from hyper_parallel.platform.torch.faults import BACKEND_ERRORS, explain, waiting_in
from hyper_parallel.platform.torch.sharing import connect

# As long a receiver only lets other processes run between its looks. Where others use the processor, one yield takes
# longer than that, and it sleeps after it: who sleeps is run sooner when the message comes.
_SPIN_SECONDS = 5e-5

# At most as long is slept without a look: for a peer that has ended, and a wake-up that another thread has got.
_LONGEST_SLEEP = 0.01

_queues: WeakKeyDictionary[dist.ProcessGroup, Queues | None] = WeakKeyDictionary()


def is_agreed(group: dist.ProcessGroup) -> bool:
    """Whether the ranks of the group know whether they share memory for messages."""
    return group in _queues


def agree(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
    """Has the ranks of the group agree whether they share memory."""
    _queues[group] = connect(group, device, timeout, "messages", Queues)


def shared_messages(
    group: dist.ProcessGroup,
    timeout: timedelta,
    tell: Callable[[str, Sequence[int], int], None],
) -> SharedMessages | None:
    """Messages of a group whose ranks have agreed; None if they share no memory. ``tell``: the platform's listeners."""
    queues = _queues[group]
    if queues is None:
        return None
    return SharedMessages(queues, group, timeout, tell)


class _Arrivals:
    """Messages that came before those that this rank asked for, by sender and tag."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.messages: dict[tuple[int, int], deque[tuple[bytes, Any]]]
        self.messages = defaultdict(deque)


_arrivals: WeakKeyDictionary[Queues, _Arrivals] = WeakKeyDictionary()


class SharedMessages(Messages):
    """Messages in the memory of a host; all of a group have one set of queues."""

    def __init__(
        self,
        queues: Queues,
        group: dist.ProcessGroup,
        timeout: timedelta,
        tell: Callable[[str, Sequence[int], int], None],
    ) -> None:
        self._queues, self._group = queues, group
        self._timeout, self._tell = timeout, tell
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = self._ranks[queues.index]
        self._index_of = {rank: index for index, rank in enumerate(self._ranks)}
        self._arrivals = _arrivals.setdefault(queues, _Arrivals())

    def send(
        self, target: int, tag: int, header: bytes, tensors: Sequence[Any]
    ) -> None:
        assert len(header) == HEADER_BYTES
        self._tell("isend", (self._rank, target), 0)
        stored = [_store(one) for one in tensors]
        sizes = [one.nbytes for one in stored]
        index = self._index_of[target]
        with self._arrivals.lock:
            queue = self._queues.outgoing(index)
            address = queue.reserve(HEADER_BYTES + sum(map(round_up, sizes)))
            ctypes.memmove(address, header, HEADER_BYTES)
            address += HEADER_BYTES
            for tensor, nbytes in zip(stored, sizes, strict=True):
                ctypes.memmove(address, tensor.data_ptr(), nbytes)
                address += round_up(nbytes)
            self._queues.publish(index, tag)

    def expect(self, source: int, tag: int, nbytes: int) -> None:  # noqa: ARG002 - messages need no place
        self._tell("irecv", (self._rank, source), HEADER_BYTES + round_up(nbytes))

    def receive(self, source: int, tag: int) -> tuple[bytes, Any]:
        arrived = None
        with suppress(PeerEndedError):  # which the wait explains
            arrived = self._take(source, tag)
        if arrived is None:
            index = self._index_of[source]
            arrived = self._wait(
                f"irecv from rank {source}",
                lambda: [index],
                lambda: self._take(source, tag),
                self._queues.incoming(index).is_empty,
            )
        header, body = arrived
        return header, body

    def _take(self, source: int, tag: int) -> tuple[bytes, Any] | None:
        """The message if it is there; moves those before it out of the queue."""
        with self._arrivals.lock:
            earlier = self._arrivals.messages
            waiting = earlier.get((source, tag))
            if waiting:
                return waiting.popleft()
            queue = self._queues.incoming(self._index_of[source])
            while message := queue.look():
                arrived = _copy(message)
                queue.advance()
                if message.tag == tag:
                    return arrived
                earlier[source, message.tag].append(arrived)
        return None

    def drop_finished(self) -> None:
        pass

    def flush(self) -> None:
        for rank, index in self._index_of.items():
            if rank == self._rank:
                continue
            queue = self._queues.outgoing(index)
            if not queue.is_read():
                call = f"isend to rank {rank}"
                # Nobody is told that a message was read.
                self._wait(call, [index].copy, queue.is_read, lambda: True)

    def find_largest(self, number: int) -> int:
        queues = self._queues
        count = queues.ranks
        members = list(self._index_of)
        self._tell("all_reduce", members, 2 * -(-8 // count) * (count - 1))
        queues.vote(number)

        def find_missing() -> list[int]:
            return sorted(set(range(count)) - set(queues.votes()))

        def has_all() -> bool:
            return len(queues.votes()) == count

        if not has_all():
            self._wait("all_reduce", find_missing, has_all, lambda: not has_all())
        return max(queues.votes().values())

    def _wait(
        self,
        call: str,
        find_peers: Callable[[], list[int]],
        look: Callable[[], Any],
        is_idle: Callable[[], bool],
    ) -> Any:
        """What ``look`` returns once it is true; a CommunicationError after the timeout or if a peer has ended.

        ``find_peers``: those that are waited for, by their ranks in the group. ``is_idle``: whether they have done
        nothing new.
        """
        try:
            with waiting_in(call, self._group):
                return self._look_until_found(find_peers, look, is_idle)
        except BACKEND_ERRORS as error:
            peers = find_peers()
            peer = self._ranks[peers[0]] if len(peers) == 1 else None
            raise explain(error, call, self._group, peer) from error

    def _look_until_found(
        self,
        find_peers: Callable[[], list[int]],
        look: Callable[[], Any],
        is_idle: Callable[[], bool],
    ) -> Any:
        began = time.perf_counter()
        while time.perf_counter() - began < _SPIN_SECONDS:
            if found := look():
                return found
            os.sched_yield()
        deadline = time.monotonic() + self._timeout.total_seconds()
        while True:
            peers = find_peers()
            ended = sorted(set(peers) & set(self._queues.ended()))
            if found := look():  # also if the sender has ended since
                return found
            if ended:
                ranks = [self._ranks[index] for index in ended]
                raise RuntimeError(
                    f"shared memory: the processes of ranks {ranks} have ended"
                )
            if time.monotonic() > deadline:
                raise RuntimeError(f"shared memory: timed out after {self._timeout}")
            self._queues.sleep(peers, _LONGEST_SLEEP, is_idle)


def _store(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in one piece of host memory, as its bytes are sent."""
    if type(tensor) is not torch.Tensor:  # which may hold its memory in another one
        tensor = tensor.detach().clone()
    if not tensor.is_cpu:
        raise coded(
            ValueError,
            "HP139",
            f"isend: the tensor is on {tensor.device}, but the group's messages are on the cpu",
        )
    return tensor.resolve_conj().resolve_neg().contiguous()


def _copy(message: Message) -> tuple[bytes, torch.Tensor]:
    header = ctypes.string_at(message.address, HEADER_BYTES)
    nbytes = message.nbytes - HEADER_BYTES
    body = torch.empty(nbytes, dtype=torch.uint8)
    ctypes.memmove(body.data_ptr(), message.address + HEADER_BYTES, nbytes)
    return header, body
