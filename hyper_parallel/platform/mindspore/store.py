# SPDX-License-Identifier: Apache-2.0
"""A key-value store that all ranks of a job reach, and the parts of it under a prefix."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from mindspore.mint.distributed import TCPStore

# As many ranks sign one counter: its bits, with room to spare in a signed number of 32.
_BITS = 30


class Store:
    """MindSpore's store over TCP, or the part of it under a prefix."""

    def __init__(self, client: Any, prefix: str = "") -> None:
        self._client = client
        self._prefix = prefix
        self.host: str = client.host
        self.port: int = client.port

    def set(self, key: str, value: str | bytes) -> None:
        """Sets the value of a key."""
        self._client.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """The value of a key, when it has one. No thread of this process runs while that is waited for."""
        value: bytes = self._client.get(self._prefix + key)
        return value

    def add(self, key: str, amount: int) -> int:
        """The counter of that name after ``amount`` is added to it; it begins at 0."""
        return int(self._client.add(self._prefix + key, amount))

    def delete_key(self, key: str) -> bool:
        """Whether there was such a key, which is gone now."""
        return bool(self._client.delete_key(self._prefix + key))

    def under(self, prefix: str) -> Store:
        """The part of this store under a prefix."""
        return Store(self._client, f"{self._prefix}{prefix}/")


def connect(host: str, port: int, *, is_master: bool, timeout: float, world_size: int = 1) -> Any:
    """MindSpore's own store; the master's ``port`` 0 means any free one."""
    if is_master and port == 0:
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
    return TCPStore(
        host,
        port,
        world_size=world_size,
        is_master=is_master,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )


class Roll:
    """Which of some ranks have signed: a bit a rank, in counters of the store, so that asking never waits."""

    def __init__(self, store: Store, key: str, ranks: Sequence[int]) -> None:
        self._store = store
        self._key = key
        self._ranks = ranks

    def sign(self, rank: int) -> None:
        """Notes that a rank is here; once only."""
        block, bit = divmod(self._ranks.index(rank), _BITS)
        self._store.add(f"{self._key}/{block}", 1 << bit)

    def signed(self) -> set[int]:
        """The ranks that have signed."""
        found: set[int] = set()
        for block, first in enumerate(range(0, len(self._ranks), _BITS)):
            bits = self._store.add(f"{self._key}/{block}", 0)
            found.update(rank for i, rank in enumerate(self._ranks[first : first + _BITS]) if bits >> i & 1)
        return found

    def delete(self) -> None:
        """Removes the counters."""
        for block in range(-(-len(self._ranks) // _BITS)):
            self._store.delete_key(f"{self._key}/{block}")
