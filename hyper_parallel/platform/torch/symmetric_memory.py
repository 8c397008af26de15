# SPDX-License-Identifier: Apache-2.0
"""Buffers that every rank of a group reads and writes directly, with barrier and signal.

    memory = platform.get_symmetric_memory_handler()
    mine = memory.empty(4)
    handle = memory.rendezvous(mine, group)
    mine.fill_(handle.rank)
    handle.barrier()
    theirs = handle.get_buffer(1, (4,), torch.float32)

On CUDA this is torch's own symmetric memory, on a CPU files in shared memory that the ranks of one host map. There a
signal is a counter with one writer, in memory that belongs to the receiver, so nothing needs an atomic addition.
"""

from __future__ import annotations

import math
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hyper_parallel.platform.errors import CommunicationError
from hyper_parallel.platform.torch.collectives import check_tensor
from hyper_parallel.platform.torch.shared_files import (
    CHANNELS,
    COUNTERS,
    SharedFile,
    as_tensor,
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


class SymmetricMemoryHandler:
    """Makes tensors in memory that can be shared, and shares them with the ranks of a group."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform
        self._device_handles: weakref.WeakValueDictionary[int, _DeviceHandle] = weakref.WeakValueDictionary()

    def empty(self, *size: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        """A tensor in memory that ``rendezvous`` can share, like torch.empty.

        Untested on hardware: CUDA.
        """
        where = _checked_device("empty", torch.device(self._platform.device() if device is None else device))
        shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
        if not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError(f"symmetric memory: empty: sizes must be integers from 0 on, got {shape}")
        dtype = dtype or torch.get_default_dtype()
        if where.type == "cuda":
            from torch.distributed import _symmetric_memory

            return _symmetric_memory.empty(shape, dtype=dtype, device=where)
        file = SharedFile(math.prod(shape) * dtype.itemsize)
        memory = file.memory()
        tensor = as_tensor(memory, shape, dtype, 0)
        address = tensor.untyped_storage().data_ptr()
        _allocations[address] = _Allocation(file, weakref.WeakKeyDictionary())
        # The storage of the tensor and of its views keeps the mapping alive; the name goes with the last of them.
        weakref.finalize(memory, _allocations.pop, address, None)
        return tensor

    def rendezvous(self, tensor: torch.Tensor, group: Any = None) -> Any:
        """Shares ``tensor`` with the group; every rank of it calls. Again on the same group gives the same handle.

        Untested on hardware: CUDA.
        """
        check_tensor("symmetric memory: rendezvous", tensor)
        resolved = self._platform._group("symmetric memory: rendezvous", group)
        if _checked_device("rendezvous", tensor.device).type == "cuda":
            from torch.distributed import _symmetric_memory

            return self._device_handle(_symmetric_memory.rendezvous(tensor, resolved))
        allocation = _allocations.get(tensor.untyped_storage().data_ptr())
        known = allocation.handles.get(resolved) if allocation is not None else None
        if known is not None and not known.closed:
            return known
        handle = self._share(tensor, allocation, resolved)
        assert allocation is not None  # else _share has raised, on every rank
        allocation.handles[resolved] = handle
        return handle

    def _share(self, tensor: torch.Tensor, allocation: _Allocation | None, group: dist.ProcessGroup) -> SharedHandle:
        file = allocation.file if allocation is not None else None
        ranks = self._platform.get_process_group_ranks(group)
        offer, pad = make_offer(tensor, file, len(ranks))
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
        return SharedHandle(group.rank(), ranks, file, buffers, pads)

    def _gather(self, mine: Any, ranks: list[int], group: dist.ProcessGroup) -> list[Any]:
        everyones: list[Any] = [None] * len(ranks)
        self._platform.all_gather_object(everyones, mine, group)
        return everyones

    def _device_handle(self, native: Any) -> _DeviceHandle:
        handle = self._device_handles.get(id(native))
        if handle is None:
            handle = self._device_handles[id(native)] = _DeviceHandle(native)
        return handle


class SharedHandle:
    """One tensor of each rank of a group, in the memory of one host. Ranks here are ranks in the group."""

    def __init__(
        self, rank: int, ranks: list[int], own: SharedFile, buffers: list[mmap.mmap | None], pads: list[mmap.mmap]
    ) -> None:
        self.rank = rank
        self.world_size = len(ranks)
        self.buffer_size = own.nbytes
        self.closed = False
        self._ranks = ranks
        self._own = own
        self._buffers = buffers  # without this rank's: that memory should go with its tensor
        self._pads = [memoryview(pad).cast("q") for pad in pads]
        self._barriers = [0] * CHANNELS
        self._lock = threading.Lock()

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """That rank's memory from element ``storage_offset`` on; what any rank writes there, all see."""
        self._check("get_buffer", rank, 0, 0)
        end = (storage_offset + math.prod(sizes)) * dtype.itemsize
        if storage_offset < 0 or min(sizes, default=0) < 0 or end > self.buffer_size:
            raise ValueError(
                f"symmetric memory: get_buffer: sizes {tuple(sizes)} of {dtype} from element {storage_offset} on do "
                f"not fit into the {self.buffer_size} bytes that each rank shares"
            )
        return as_tensor(self._buffers[rank] or self._own.memory(), sizes, dtype, storage_offset)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Returns when every rank has called it on that channel; what they wrote before can then be read."""
        self._check("barrier", self.rank, channel, timeout_ms)
        count = self._barriers[channel] + 1  # kept only on success, so that a barrier that failed can be tried again
        slots = [self._slot(_BARRIER, sender, channel) for sender in range(self.world_size)]
        own = self._pads[self.rank]
        self._fence()
        with self._lock:
            for pad in self._pads:
                pad[slots[self.rank]] = count

        def missing() -> list[int]:
            with self._lock:
                return [sender for sender, slot in enumerate(slots) if own[slot] < count]

        if not _poll(lambda: not missing(), timeout_ms) and (late := missing()):
            raise self._error("barrier", channel, timeout_ms, late, "did not come", "barrier")
        self._barriers[channel] = count
        self._fence()

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Signals ``dst_rank``, once it has taken the signal before; what was written before can then be read there."""
        self._check("put_signal", dst_rank, channel, timeout_ms)
        pad = self._pads[dst_rank]
        sent, taken = self._slot(_SENT, self.rank, channel), self._slot(_TAKEN, self.rank, channel)

        def put() -> bool:
            with self._lock:
                if pad[sent] != pad[taken]:
                    return False
                pad[sent] += 1
                return True

        self._fence()
        if not _poll(put, timeout_ms):
            what = "has not taken the signal before this one"
            raise self._error("put_signal", channel, timeout_ms, [dst_rank], what, "wait_signal")

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Takes one signal of ``src_rank``, waiting for it; what that rank wrote before can then be read."""
        self._check("wait_signal", src_rank, channel, timeout_ms)
        pad = self._pads[self.rank]
        sent, taken = self._slot(_SENT, src_rank, channel), self._slot(_TAKEN, src_rank, channel)

        def take() -> bool:
            with self._lock:
                if pad[sent] == pad[taken]:
                    return False
                pad[taken] += 1
                return True

        if not _poll(take, timeout_ms):
            raise self._error("wait_signal", channel, timeout_ms, [src_rank], "sent no signal", "put_signal")
        self._fence()

    def close(self) -> None:
        """Lets go of the others' memory; tensors from get_buffer stay valid. A new rendezvous needs all to close."""
        self.closed = True
        self._buffers, self._pads = [], []

    def _fence(self) -> None:
        # Taking a lock keeps what follows from moving before it, giving it back what precedes from moving after it.
        # The flags are read and written under the same lock, so one pair more, before a write and after a read,
        # separates them from the data on weakly ordered processors too.
        with self._lock:
            pass

    def _slot(self, kind: int, sender: int, channel: int) -> int:
        return (kind * self.world_size + sender) * CHANNELS + channel

    def _check(self, call: str, rank: int, channel: int, timeout_ms: int) -> None:
        if self.closed:
            raise RuntimeError(f"symmetric memory: {call}: this handle is closed; rendezvous() makes a new one")
        for name, value, limit in (("rank", rank, self.world_size), ("channel", channel, CHANNELS)):
            if not isinstance(value, int) or not 0 <= value < limit:
                raise ValueError(f"symmetric memory: {call}: {name} must be 0 to {limit - 1}, got {value!r}")
        if timeout_ms < 0:
            raise ValueError(
                f"symmetric memory: {call}: timeout_ms must be 0 (the default) or more, got {timeout_ms!r}"
            )

    def _error(
        self, call: str, channel: int, timeout_ms: int, missing: list[int], what: str, answer: str
    ) -> CommunicationError:
        absent = [self._ranks[rank] for rank in missing]
        return CommunicationError(
            f"rank {self._ranks[self.rank]}: symmetric memory: {call} on channel {channel}: of ranks {self._ranks}, "
            f"rank {', '.join(map(str, absent))} {what} within {_seconds(timeout_ms):g} s. Check that it lives and "
            f"calls {answer} on this channel; timeout_ms= gives more time",
            collective=call,
            ranks=tuple(self._ranks),
            missing=tuple(absent),
        )


class _DeviceHandle:
    """torch's own handle, whose waiting is done by the stream and, with timeout_ms=0, has no end.

    Untested on hardware: all of it.
    """

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def close(self) -> None:
        self._native = None


class _Allocation(NamedTuple):
    file: SharedFile
    handles: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedHandle]


# The tensors that ``empty`` has made on a CPU and that are still held, by the address of their storage.
_allocations: dict[int, _Allocation] = {}


def _checked_device(call: str, device: torch.device) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise RuntimeError(f"symmetric memory: {call}: not available on device {device.type!r}, only on cpu and cuda")
    return device


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
