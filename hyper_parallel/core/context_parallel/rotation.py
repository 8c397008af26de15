# SPDX-License-Identifier: Apache-2.0
"""A ring of ranks that pass tensors on, with which other ranks' keys come one rank at a time.

with Ring(ranks, index) as ring:
    pending = ring.start(parcel, count)     parcel goes to the next rank, one of that size comes from the one before
    ...                                     computation with the parcel
    parcel = pending.finish()
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.errors import CommunicationError
from hyper_parallel.platform.pending import Pending
from hyper_parallel.platform.platform import P2POp

platform = get_platform()
_TAG = 0x6370  # keys must not be taken for what the user sends in the same group


class Ring:
    """Passes flat tensors on to the next rank.

    After an error within its context it waits for what is under way, which all ranks have started: a message that
    nobody takes would be taken for a later one.
    """

    def __init__(self, ranks: Sequence[int], index: int) -> None:
        self.size, self.index = len(ranks), index
        self._next = ranks[(index + 1) % len(ranks)]
        self._previous = ranks[index - 1]
        self._group = platform.create_group(list(ranks))
        self._under_way: list[list[Any]] = []

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        is_clear = not isinstance(error, Exception)
        if is_clear or isinstance(error, CommunicationError):
            return
        while self._under_way:
            self._finish(self._under_way[0])

    def _finish(self, handles: list[Any]) -> None:
        self._under_way = [one for one in self._under_way if one is not handles]
        for handle in handles:
            handle.wait()

    def owner(self, step: int) -> int:
        """The index of the rank whose parcel is here after so many steps."""
        return (self.index - step) % self.size

    def start(self, parcel: Any, count: int) -> Pending:
        """Passes a flat tensor on; the one that comes has ``count`` elements."""
        received = platform.empty((count,), dtype=parcel.dtype, device=parcel.device)
        ops = []
        if parcel.shape[0]:
            ops.append(P2POp("send", parcel, self._next, self._group, _TAG))
        if count:
            ops.append(P2POp("recv", received, self._previous, self._group, _TAG))
        handles = list(platform.batch_p2p(ops)) if ops else []
        self._under_way.append(handles)

        def finish() -> Any:
            self._finish(handles)
            return received

        return Pending(None, finish)


def pack(tensors: Sequence[Any]) -> Any:
    """Tensors as one flat tensor."""
    return platform.cat([tensor.reshape(-1) for tensor in tensors], 0)


def add_to(parcel: Any, tensors: list[Any]) -> None:
    """Adds tensors to those of a parcel, and takes them out of the list, so that their memory is free."""
    stop = int(parcel.shape[0])
    while tensors:
        part = tensors.pop().reshape(-1)
        start = stop - int(part.shape[0])
        parcel[start:stop] = parcel[start:stop] + part
        stop = start


def unpack(parcel: Any, shapes: Sequence[Sequence[int]]) -> list[Any]:
    """The tensors of a parcel; views."""
    tensors, start = [], 0
    for shape in shapes:
        stop = start + math.prod(shape)
        tensors.append(parcel[start:stop].reshape(tuple(shape)))
        start = stop
    return tensors
