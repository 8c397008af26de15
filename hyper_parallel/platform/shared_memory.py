# SPDX-License-Identifier: Apache-2.0
"""Buffers that every rank of one host reads and writes directly, with barrier and signal, for every framework.

    memory = platform.get_symmetric_memory_handler()
    mine = memory.empty(4)
    handle = memory.rendezvous(mine, group)
    mine[:] = handle.rank
    handle.barrier()
    theirs = handle.get_buffer(1, (4,), float32)

They are files in shared memory that the ranks map. A signal is a counter with one writer, in memory that belongs to the
receiver, so nothing needs an atomic addition. A framework says how a tensor is made in such memory.
"""

from __future__ import annotations

import math
import mmap
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.errors import CommunicationError
from hyper_parallel.platform.shared_files import (
    CHANNELS,
    COUNTERS,
    SharedFile,
    check_mapped,
    check_offers,
    make_offer,
    map_all,
)

DEFAULT_TIMEOUT = 60.0  # seconds, where timeout_ms is 0

# The counters in a receiver's pad, each for every (sender, channel). TAKEN is written by the receiver, the others by
# the sender. They are aligned words of 8 bytes: a machine of 64 bits writes them whole.
_SENT, _TAKEN, _BARRIER = range(COUNTERS)
_SPINS = 50  # looks without a pause, before the first nap
_LONGEST_NAP = 1e-3


class SharedMemoryHandler(ABC):
    """Makes tensors in memory that can be shared, and shares them with the ranks of a group."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    @abstractmethod
    def default_dtype(self) -> Any:
        """The dtype of a tensor for which none is given."""

    @abstractmethod
    def itemsize(self, dtype: Any) -> int:
        """The bytes of one element."""

    @abstractmethod
    def tensor_in(
        self, memory: mmap.mmap, sizes: Sequence[int], dtype: Any, offset: int
    ) -> Any:
        """A tensor that is this memory, from element ``offset`` on, and keeps it alive."""

    @abstractmethod
    def settle(self) -> None:
        """Returns when all operators that were called have read and written."""

    def empty(self, *size: Any, dtype: Any = None, device: Any = None) -> Any:  # noqa: ARG002 - a framework looks at it
        """A tensor in memory that ``rendezvous`` can share, like torch.empty."""
        shape = checked_shape(size)
        dtype = self.default_dtype() if dtype is None else dtype
        file = SharedFile(math.prod(shape) * self.itemsize(dtype))
        memory = file.memory()
        tensor = self.tensor_in(memory, shape, dtype, 0)
        address = tensor.untyped_storage().data_ptr()
        _allocations[address] = _Allocation(file, weakref.WeakKeyDictionary())
        # The storage of the tensor and of its views keeps the mapping alive; the name goes with the last of them.
        weakref.finalize(memory, _allocations.pop, address, None)
        return tensor

    def rendezvous(self, tensor: Any, group: Any = None) -> Any:
        """Shares ``tensor`` with the group; every rank of it calls. Again on the same group gives the same handle."""
        resolved = self._platform._group("symmetric memory: rendezvous", group)
        allocation = _allocations.get(tensor.untyped_storage().data_ptr())
        known = allocation.handles.get(resolved) if allocation is not None else None
        if known is not None and not known.closed:
            return known
        handle = self._share(tensor, allocation, resolved)
        assert allocation is not None  # else _share has raised, on every rank
        allocation.handles[resolved] = handle
        return handle

    def _share(
        self, tensor: Any, allocation: _Allocation | None, group: Any
    ) -> SharedHandle:
        file = allocation.file if allocation is not None else None
        ranks = self._platform.get_process_group_ranks(group)
        what = f"{tuple(tensor.shape)} {str(tensor.dtype).rpartition('.')[2].lower()}"
        offer, pad = make_offer(what, file, len(ranks))
        try:
            offers = self._gather(offer, ranks, group)
            check_offers(offers, ranks)
            buffers, pads, failure = map_all(offers, group.rank())
            # Also the barrier before the names go: who has answered has mapped.
            check_mapped(self._gather(failure, ranks, group), ranks)
        finally:
            for named in (file, pad):
                if named is not None:
                    named.unlink()
        assert file is not None  # else the offers have said so
        return SharedHandle(self, group.rank(), ranks, file, buffers, pads)

    def _gather(self, mine: Any, ranks: list[int], group: Any) -> list[Any]:
        everyones: list[Any] = [None] * len(ranks)
        self._platform.all_gather_object(everyones, mine, group)
        return everyones


class SharedHandle:
    """One tensor of each rank of a group, in the memory of one host. Ranks here are ranks in the group."""

    def __init__(
        self,
        handler: SharedMemoryHandler,
        rank: int,
        ranks: list[int],
        own: SharedFile,
        buffers: list[mmap.mmap | None],
        pads: list[mmap.mmap],
    ) -> None:
        self._handler = handler
        self.rank = rank
        self.world_size = len(ranks)
        self.buffer_size = own.nbytes
        self.closed = False
        self._ranks = ranks
        self._own = own
        self._buffers = (
            buffers  # without this rank's: that memory should go with its tensor
        )
        self._pads = [memoryview(pad).cast("q") for pad in pads]
        self._barriers = [0] * CHANNELS
        self._lock = threading.Lock()

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: Any, storage_offset: int = 0
    ) -> Any:
        """That rank's memory from element ``storage_offset`` on; what any rank writes there, all see."""
        self._check("get_buffer", rank, 0, 0)
        end = (storage_offset + math.prod(sizes)) * self._handler.itemsize(dtype)
        if storage_offset < 0 or min(sizes, default=0) < 0 or end > self.buffer_size:
            raise coded(
                ValueError,
                "HP137",
                f"symmetric memory: get_buffer: sizes {tuple(sizes)} of {dtype} from element {storage_offset} on "
                f"do not fit into the {self.buffer_size} bytes that each rank shares",
            )
        return self._handler.tensor_in(
            self._buffers[rank] or self._own.memory(), sizes, dtype, storage_offset
        )

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Returns when every rank has called it on that channel; what they wrote before can then be read."""
        self._check("barrier", self.rank, channel, timeout_ms)
        count = (
            self._barriers[channel] + 1
        )  # kept only on success, so that a barrier that failed can be tried again
        slots = [
            self._slot(_BARRIER, sender, channel) for sender in range(self.world_size)
        ]
        own = self._pads[self.rank]
        self._fence()
        with self._lock:
            for pad in self._pads:
                pad[slots[self.rank]] = count

        def missing() -> list[int]:
            with self._lock:
                return [
                    sender for sender, slot in enumerate(slots) if own[slot] < count
                ]

        if not _poll(lambda: not missing(), timeout_ms) and (late := missing()):
            raise self._error(
                "barrier", channel, timeout_ms, late, "did not come", "barrier"
            )
        self._barriers[channel] = count
        self._fence()

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Signals ``dst_rank``, once it has taken the signal before; what was written before can then be read there."""
        self._check("put_signal", dst_rank, channel, timeout_ms)
        pad = self._pads[dst_rank]
        sent, taken = (
            self._slot(_SENT, self.rank, channel),
            self._slot(_TAKEN, self.rank, channel),
        )

        def put() -> bool:
            with self._lock:
                if pad[sent] != pad[taken]:
                    return False
                pad[sent] += 1
                return True

        self._fence()
        if not _poll(put, timeout_ms):
            what = "has not taken the signal before this one"
            raise self._error(
                "put_signal", channel, timeout_ms, [dst_rank], what, "wait_signal"
            )

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Takes one signal of ``src_rank``, waiting for it; what that rank wrote before can then be read."""
        self._check("wait_signal", src_rank, channel, timeout_ms)
        pad = self._pads[self.rank]
        sent, taken = (
            self._slot(_SENT, src_rank, channel),
            self._slot(_TAKEN, src_rank, channel),
        )

        def take() -> bool:
            with self._lock:
                if pad[sent] == pad[taken]:
                    return False
                pad[taken] += 1
                return True

        if not _poll(take, timeout_ms):
            raise self._error(
                "wait_signal",
                channel,
                timeout_ms,
                [src_rank],
                "sent no signal",
                "put_signal",
            )
        self._fence()

    def close(self) -> None:
        """Lets go of the others' memory; tensors from get_buffer stay valid. A new rendezvous needs all to close."""
        self.closed = True
        self._buffers, self._pads = [], []

    def _fence(self) -> None:
        self._handler.settle()
        # Taking a lock keeps what follows from moving before it, giving it back what precedes from moving after it.
        # The flags are read and written under the same lock, so one pair more, before a write and after a read,
        # separates them from the data on weakly ordered processors too.
        with self._lock:
            pass

    def _slot(self, kind: int, sender: int, channel: int) -> int:
        return (kind * self.world_size + sender) * CHANNELS + channel

    def _check(self, call: str, rank: int, channel: int, timeout_ms: int) -> None:
        if self.closed:
            raise coded(
                RuntimeError,
                "HP137",
                f"symmetric memory: {call}: this handle is closed; rendezvous() makes a new one",
            )
        for name, value, limit in (
            ("rank", rank, self.world_size),
            ("channel", channel, CHANNELS),
        ):
            if not isinstance(value, int) or not 0 <= value < limit:
                raise coded(
                    ValueError,
                    "HP137",
                    f"symmetric memory: {call}: {name} must be 0 to {limit - 1}, got {value!r}",
                )
        if timeout_ms < 0:
            raise coded(
                ValueError,
                "HP137",
                f"symmetric memory: {call}: timeout_ms must be 0 (the default) or more, got {timeout_ms!r}",
            )

    def _error(
        self,
        call: str,
        channel: int,
        timeout_ms: int,
        missing: list[int],
        what: str,
        answer: str,
    ) -> CommunicationError:
        absent = [self._ranks[rank] for rank in missing]
        return coded(
            CommunicationError,
            "HP118",
            f"rank {self._ranks[self.rank]}: symmetric memory: {call} on channel {channel}: of ranks "
            f"{self._ranks}, rank {', '.join(map(str, absent))} {what} within {_seconds(timeout_ms):g} s. Check "
            f"that it lives and calls {answer} on this channel; timeout_ms= gives more time",
            collective=call,
            ranks=tuple(self._ranks),
            missing=tuple(absent),
        )


class _Allocation(NamedTuple):
    file: SharedFile
    handles: weakref.WeakKeyDictionary[Any, SharedHandle]


# The tensors that ``empty`` has made on a CPU and that are still held, by the address of their storage.
_allocations: dict[int, _Allocation] = {}


def checked_shape(size: Sequence[Any]) -> tuple[int, ...]:
    """The sizes of a tensor, which may come as one sequence."""
    shape = (
        tuple(size[0])
        if len(size) == 1 and isinstance(size[0], Sequence)
        else tuple(size)
    )
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise coded(
            ValueError,
            "HP137",
            f"symmetric memory: empty: sizes must be integers from 0 on, got {shape}",
        )
    return shape


def _poll(ready: Callable[[], bool], timeout_ms: int) -> bool:
    """Whether ``ready`` became true in time; looks often at first, then with growing pauses."""
    deadline = time.monotonic() + _seconds(timeout_ms)
    looks, nap = 0, 1e-5
    while not ready():
        if time.monotonic() > deadline:
            return False
        looks += 1
        if looks > _SPINS:
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
    return True


def _seconds(timeout_ms: int) -> float:
    return timeout_ms / 1000 if timeout_ms else DEFAULT_TIMEOUT
