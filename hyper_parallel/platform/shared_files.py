# SPDX-License-Identifier: Apache-2.0
"""Files in shared memory, and how the ranks of one host tell each other where theirs are and map them.

offers = gather(offer)          what each rank shares, or why it cannot
check_offers(offers, ranks)     raises on every rank or on none
buffers, pads, failure = map_all(offers, own)
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hyper_parallel.platform.error_codes import coded

CHANNELS = 64
COUNTERS = 3  # for every (sender, channel) in a receiver's pad of signals
SHARED_DIRECTORY = Path("/dev/shm")  # noqa: S108 - memory, not disk; the files are this user's alone


class SharedFile:
    """Memory with a name by which other processes of this host can map it, until ``unlink``."""

    def __init__(self, nbytes: int) -> None:
        directory = (
            SHARED_DIRECTORY
            if SHARED_DIRECTORY.is_dir()
            else Path(tempfile.gettempdir())
        )
        self.nbytes = nbytes
        self._length = max(nbytes, 1)  # nothing cannot be mapped
        self._descriptor, name = tempfile.mkstemp(
            prefix=f"hyper_parallel_{os.getpid()}_", dir=directory
        )
        self._path: Path | None = Path(name)
        self._mapped: Callable[[], mmap.mmap | None] = lambda: None
        end = weakref.finalize(
            self, _end_file, self._descriptor, self._path
        )  # at exit too
        try:
            os.truncate(self._descriptor, self._length)
            if hasattr(os, "posix_fallocate"):
                # Takes the memory now: where there is too little, the process would be killed when it writes there.
                os.posix_fallocate(self._descriptor, 0, self._length)
        except OSError as error:
            end()
            raise coded(
                RuntimeError,
                "HP137",
                f"symmetric memory: no room for {nbytes} bytes in {directory} ({error.strerror}); enlarge it (for "
                "a container: --shm-size) or share less",
            ) from error

    def memory(self) -> mmap.mmap:
        """The mapping: the same one as long as anybody holds it."""
        mapped = self._mapped()
        if mapped is None:
            mapped = mmap.mmap(self._descriptor, self._length)
            self._mapped = weakref.ref(mapped)
        return mapped

    def address(self) -> str:
        """A path that other processes can open."""
        return str(self._path or f"/proc/{os.getpid()}/fd/{self._descriptor}")

    def unlink(self) -> None:
        """Takes the name away; the memory lives until the last process that has mapped it ends."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None


class Offer(NamedTuple):
    """What a rank tells the others at a rendezvous."""

    host: str
    tensor: str  # its shape, dtype and size in words
    nbytes: int
    buffer: str  # where to open the tensor's memory
    pad: str  # and the signals
    problem: Exception | None = None  # why this rank cannot share its tensor


def pad_size(world_size: int) -> int:
    """The bytes of a receiver's pad: words of 8 bytes."""
    return COUNTERS * world_size * CHANNELS * 8


def make_offer(
    what: str, file: SharedFile | None, world_size: int
) -> tuple[Offer, SharedFile | None]:
    """(what this rank tells the others, its pad); ``what``: the shape and the dtype of its tensor in words."""
    if file is None:
        problem = coded(
            ValueError,
            "HP137",
            "the tensor is not in memory that can be shared; make it with handler.empty(...)",
        )
        return Offer("", "", 0, "", "", problem), None
    try:
        pad = SharedFile(pad_size(world_size))
    except RuntimeError as error:
        return Offer("", "", 0, "", "", error), None
    return Offer(
        find_host(),
        f"{what} in {file.nbytes} bytes",
        file.nbytes,
        file.address(),
        pad.address(),
    ), pad


def check_offers(offers: list[Offer], ranks: list[int]) -> None:
    """Every rank sees the same offers, so that either none raises or all do."""
    call = "symmetric memory: rendezvous"
    problems = [
        (rank, offer.problem)
        for rank, offer in zip(ranks, offers, strict=True)
        if offer.problem is not None
    ]
    if problems:
        names = ", ".join(str(rank) for rank, _ in problems)
        raise type(problems[0][1])(
            f"{call}: on rank {names} of ranks {ranks}: {problems[0][1]}"
        )
    if len({offer.host for offer in offers}) > 1:
        hosts = _by_value(ranks, [offer.host for offer in offers])
        raise coded(
            RuntimeError,
            "HP137",
            f"{call}: on a CPU all ranks must be on one host, but they are on several: {hosts}",
        )
    if len({offer.tensor for offer in offers}) > 1:
        tensors = _by_value(ranks, [offer.tensor for offer in offers])
        raise coded(
            ValueError,
            "HP137",
            f"{call}: all ranks must share tensors of one shape and dtype, but they differ: {tensors}",
        )


def check_mapped(failures: list[str | None], ranks: list[int]) -> None:
    failed = {
        rank: failure for rank, failure in zip(ranks, failures, strict=True) if failure
    }
    if failed:
        raise coded(
            RuntimeError,
            "HP137",
            f"symmetric memory: rendezvous: ranks {list(failed)} of {ranks} cannot map the memory of the others "
            f"({next(iter(failed.values()))}). The ranks must run as one user and see one {SHARED_DIRECTORY}",
        )


def _by_value(ranks: list[int], values: list[str]) -> str:
    groups = {
        value: [r for r, v in zip(ranks, values, strict=True) if v == value]
        for value in values
    }
    return "; ".join(f"ranks {members}: {value}" for value, members in groups.items())


def map_all(
    offers: list[Offer], own: int
) -> tuple[list[mmap.mmap | None], list[mmap.mmap], str | None]:
    """The memory of every other rank and the pad of every rank, or why they cannot be had."""
    try:
        buffers = [
            _map(o.buffer, max(o.nbytes, 1)) if rank != own else None
            for rank, o in enumerate(offers)
        ]
        pads = [_map(offer.pad, pad_size(len(offers))) for offer in offers]
    except OSError as error:
        return [], [], str(error)
    return buffers, pads, None


def _map(path: str, length: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, length)
    finally:
        os.close(descriptor)


def _end_file(descriptor: int, path: Path) -> None:
    os.close(descriptor)
    path.unlink(missing_ok=True)


def find_host() -> str:
    """The same on all processes of a host, different on different hosts; containers of one host are one."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return (
        boot.read_text().strip()
        if boot.exists()
        else f"{socket.gethostname()} {uuid.getnode():x}"
    )
