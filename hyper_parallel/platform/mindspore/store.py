# SPDX-License-Identifier: Apache-2.0
"""A key-value store that all ranks of a job reach, and the parts of it under a prefix."""

from __future__ import annotations

import ctypes
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from mindspore.mint.distributed import TCPStore

# How long the store may take to answer a question. No Python code of this process runs while that lasts, and so no
# handler of a signal.
ANSWER_SECONDS = 15.0

# Seconds for one attempt to reach a store that is not there yet.
_ATTEMPT_SECONDS = 1.0

# As many ranks sign one counter: its bits, with room to spare in a signed number of 32.
_BITS = 30


class _Client:
    """MindSpore's store over TCP. It is not used again after a question without an answer.

    The late answer would be taken for that to the next question, which may be about another key.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._has_failed = False
        self.host: str = client.host
        self.port: int = client.port

    def ask(self, question: str, *arguments: Any) -> Any:
        """What the store says; a RuntimeError if it does not answer in time, or did not before."""
        if self._has_failed:
            raise RuntimeError(f"the store at {self.host}:{self.port} does not answer")
        try:
            return getattr(self._client, question)(*arguments)
        except RuntimeError:
            self._has_failed = True
            raise


class Store:
    """A store that all ranks reach, or the part of it under a prefix. ``client``: MindSpore's own store."""

    def __init__(self, client: Any, prefix: str = "") -> None:
        self._client = client if isinstance(client, _Client) else _Client(client)
        self._prefix = prefix
        self.host: str = client.host
        self.port: int = client.port

    def set(self, key: str, value: str | bytes) -> None:
        """Sets the value of a key."""
        self._client.ask("set", self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """The value of a key that has one. No thread of this process runs while it is fetched."""
        value: bytes = self._client.ask("get", self._prefix + key)
        return value

    def add(self, key: str, amount: int) -> int:
        """The counter of that name after ``amount`` is added to it; it begins at 0."""
        return int(self._client.ask("add", self._prefix + key, amount))

    def delete_key(self, key: str) -> bool:
        """Whether there was such a key, which is gone now."""
        return bool(self._client.ask("delete_key", self._prefix + key))

    def under(self, prefix: str) -> Store:
        """The part of this store under a prefix."""
        return Store(self._client, f"{self._prefix}{prefix}/")


def connect(
    host: str,
    port: int,
    *,
    is_master: bool,
    timeout: float,
    world_size: int = 1,
    answer_timeout: float = ANSWER_SECONDS,
) -> Any:
    """MindSpore's own store, when its master is there; the master's ``port`` 0 means any free one.

    ``timeout``: in seconds, for reaching it. MindSpore takes one for that and for each answer.
    """
    if is_master and port == 0:
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
    if not is_master:
        _await_listener(host, port, time.monotonic() + timeout)
    client = TCPStore(
        host,
        port,
        world_size=world_size,
        is_master=is_master,
        timeout=timedelta(seconds=min(timeout, answer_timeout)),
        wait_for_workers=False,
    )
    if not is_master:
        # Destroying a client while its master ends may be a segmentation fault: none is destroyed, not even at exit.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
    return client


def _await_listener(host: str, port: int, deadline: float) -> None:
    """Returns when someone listens there, or the time is over; a signal is handled meanwhile."""
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), min(left, _ATTEMPT_SECONDS)).close()
        except OSError:
            time.sleep(0.05)
        else:
            return


class Membership:
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
            found.update(
                rank
                for i, rank in enumerate(self._ranks[first : first + _BITS])
                if bits >> i & 1
            )
        return found

    def delete(self) -> None:
        """Removes the counters."""
        for block in range(-(-len(self._ranks) // _BITS)):
            self._store.delete_key(f"{self._key}/{block}")
