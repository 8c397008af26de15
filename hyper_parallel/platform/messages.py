# SPDX-License-Identifier: Apache-2.0
"""Messages between two ranks of a group: a header of a fixed size, and tensors behind it.

    messages = platform.connect_messages(group)             # called by all ranks of the group
    messages.send(1, tag, header, [x, y])                   # on rank 0
    messages.expect(0, tag, nbytes)                         # on rank 1: the message may come
    header, body = messages.receive(0, tag)                 # waits; body is a tensor of bytes
    platform.unpack_bytes(body, 0, specs)

Messages with one tag come in the order in which they were sent; those with different tags may be received in any order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.platform.contract.memory import round_up

if TYPE_CHECKING:
    from hyper_parallel.platform.platform import Platform

HEADER_BYTES = 32


class Messages(ABC):
    """The messages of one rank; ranks are global ones, ``nbytes`` is that of the body."""

    @abstractmethod
    def send(
        self, target: int, tag: int, header: bytes, tensors: Sequence[Any]
    ) -> None:
        """Starts to send plain tensors, which may change afterwards."""

    @abstractmethod
    def expect(self, source: int, tag: int, nbytes: int) -> None:
        """Starts to receive a message of this size."""

    @abstractmethod
    def receive(self, source: int, tag: int) -> tuple[bytes, Any]:
        """The header and the body of the oldest message with this tag that was expected; waits for it."""

    @abstractmethod
    def drop_finished(self) -> None:
        """Frees the memory of messages that have left."""

    @abstractmethod
    def flush(self) -> None:
        """Waits until all messages have left."""

    @abstractmethod
    def find_largest(self, number: int) -> int:
        """The largest of the numbers, from 0 to 255, with which the ranks of the group call this."""


class BackendMessages(Messages):
    """Messages as tensors of bytes that the framework's backend carries."""

    def __init__(self, platform: Platform, group: Any) -> None:
        self._platform, self._group = platform, group
        self._sends: list[tuple[Any, Any]] = []
        self._receives: dict[tuple[int, int], deque[tuple[Any, Any]]]
        self._receives = defaultdict(deque)

    def send(
        self, target: int, tag: int, header: bytes, tensors: Sequence[Any]
    ) -> None:
        assert len(header) == HEADER_BYTES
        packed = self._platform.pack_bytes(header, tensors)
        handle = self._platform.isend(packed, target, self._group, tag)
        self._sends.append((handle, packed))

    def expect(self, source: int, tag: int, nbytes: int) -> None:
        platform = self._platform
        shape = (HEADER_BYTES + round_up(nbytes),)
        buffer = platform.empty(
            shape, platform.str_to_dtype("uint8"), platform.device()
        )
        handle = platform.irecv(buffer, source, self._group, tag)
        self._receives[source, tag].append((handle, buffer))

    def receive(self, source: int, tag: int) -> tuple[bytes, Any]:
        handle, buffer = self._receives[source, tag].popleft()
        handle.wait()
        header = self._platform.tensor_to_numpy(buffer[:HEADER_BYTES]).tobytes()
        return header, buffer[HEADER_BYTES:]

    def drop_finished(self) -> None:
        self._sends = [one for one in self._sends if not one[0].is_completed()]

    def flush(self) -> None:
        sends, self._sends = self._sends, []
        for handle, _ in sends:
            handle.wait()

    def find_largest(self, number: int) -> int:
        platform = self._platform
        own = platform.full((1,), number, platform.str_to_dtype("int64"))
        largest = platform.all_reduce(own.to(platform.device()), self._group, op="max")
        return int(largest.item())
