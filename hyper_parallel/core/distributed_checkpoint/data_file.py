# SPDX-License-Identifier: Apache-2.0
"""Data files: written so that they appear whole or not at all, and read with every block compared with its checksum.

write_data_file(path, [Piece("w", "float32", (4, 6), lambda: memory)], tag=tag, rank=0)
with open_data_file(path, tag=tag, rank=0) as file:
    file.read(file.header.entries["w"], offsets=(1, 0), lengths=(2, 6), out=rows)
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.core.distributed_checkpoint import checksum
from hyper_parallel.core.distributed_checkpoint.checksum import BLOCK, block_sums
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.header import (
    Entry,
    build_header,
    parse_header,
    read_head,
)
from hyper_parallel.platform.error_codes import coded

STEP = (
    64 * BLOCK
)  # what is written, or read and compared, at a time: it stays in the processor's cache
WINDOW = 8 << 20  # what the system is told to store at a time
UNINTERRUPTED = (
    2**26
)  # bytes of the file that compiled code goes over before Python can act on a signal
SUM = np.dtype("<u8")
Progress = Callable[[int], None]  # gets the bytes that were moved since the last call


def _nothing(name: str) -> None:
    """Told how far a file is."""


phase: Callable[[str], None] = _nothing  # tests put one here that ends the process


@runtime_checkable
class Bytes(Protocol):
    """The bytes of a chunk, asked for from the first to the last: an array, or what reads them meanwhile."""

    @property
    def nbytes(self) -> int:
        """How many there are."""

    def __getitem__(self, part: slice, /) -> NDArray[np.uint8]:
        """Those of a slice."""


@dataclass(frozen=True)
class Piece:
    """A chunk to be written; ``memory`` gives its contiguous bytes when they are needed."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    memory: Callable[[], Bytes]


# --- writing


def write_data_file(
    path: str | Path,
    pieces: Sequence[Piece],
    *,
    tag: str,
    rank: int,
    progress: Progress | None = None,
) -> int:
    """Writes, syncs and renames; the number of bytes. What fails leaves nothing behind."""
    head, entries = build_header(
        [(piece.key, piece.dtype, piece.shape) for piece in pieces], tag, rank
    )
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        _write(
            unfinished, head, entries, {piece.key: piece for piece in pieces}, progress
        )
        unfinished.rename(path)
        phase("renamed")
        sync_folder(path.parent)
        phase("folder synced")
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            told = f"cannot be written: {error.strerror or error}"
            raise coded(CheckpointError, "HP503", told, file=path) from error
        raise
    return entries[-1].start + entries[-1].nbytes


def sync_folder(path: str | Path) -> None:
    """Makes the names of a folder's files durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write(
    path: Path,
    head: bytes,
    entries: Sequence[Entry],
    pieces: dict[str, Piece],
    progress: Progress | None,
) -> None:
    path.unlink(missing_ok=True)
    fd = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
    )
    try:
        phase("created")
        _write_all(fd, memoryview(head))
        phase("header")
        *chunks, last = entries
        sums = np.empty(last.shape, SUM)
        for chunk in chunks:
            _write_chunk(
                fd,
                chunk,
                pieces[chunk.key].memory(),
                sums[chunk.first_block :],
                progress,
            )
        _write_all(fd, sums.data.cast("B") if len(sums) else memoryview(b""))
        phase("sums")
        os.fsync(fd)
        phase("synced")
    finally:
        os.close(fd)


def _write_chunk(
    fd: int,
    chunk: Entry,
    memory: Bytes,
    sums: NDArray[np.uint64],
    progress: Progress | None,
) -> None:
    if memory.nbytes != chunk.nbytes:
        raise coded(
            CheckpointError,
            "HP510",
            f"{chunk.nbytes} bytes were expected, {memory.nbytes} came",
            field=chunk.key,
        )
    for at in range(0, chunk.nbytes, STEP):
        part = memory[at : at + STEP]
        found = block_sums(part)
        sums[at // BLOCK : at // BLOCK + len(found)] = found
        _write_all(fd, part.data)
        _start_storing(fd, chunk.start + at, chunk.start + at + part.nbytes)
        phase("data")
        if progress is not None:
            progress(part.nbytes)


def _start_storing(fd: int, before: int, after: int) -> None:
    """Has the system begin to store what was written, window by window: it would otherwise wait for the sync."""
    if after // WINDOW > before // WINDOW and hasattr(os, "posix_fadvise"):
        end = after // WINDOW * WINDOW
        os.posix_fadvise(fd, end - WINDOW, WINDOW, os.POSIX_FADV_DONTNEED)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


# --- reading


def open_data_file(
    path: str | Path,
    *,
    tag: str | None = None,
    rank: int | None = None,
    ours: bool = True,
    follow_links: bool = False,
) -> DataFile:
    """A file whose header is in order; ``ours=False`` takes any safetensors file, which has no checksums."""
    fd = _opened(path, follow_links=follow_links)
    try:
        return DataFile(fd, path, tag=tag, rank=rank, ours=ours)
    except OSError as error:
        os.close(fd)
        raise coded(
            CheckpointError, "HP504", f"cannot be read: {error.strerror}", file=path
        ) from error
    except BaseException:
        os.close(fd)
        raise


def read_small_file(
    path: str | Path, most: int = 2**30, *, follow_links: bool = False
) -> bytes:
    """All of a file that has at most so many bytes."""
    fd = _opened(path, follow_links=follow_links)
    try:
        if (size := _regular_size(fd, path)) > most:
            raise coded(
                CheckpointError,
                "HP503",
                f"at most {most} bytes were expected, the file has {size}",
                file=path,
            )
        with open(fd, "rb", closefd=False) as file:
            return file.read(size)  # not more: it would take as much memory
    except OSError as error:
        raise coded(
            CheckpointError, "HP504", f"cannot be read: {error.strerror}", file=path
        ) from error
    finally:
        os.close(fd)


def _opened(path: str | Path, *, follow_links: bool) -> int:
    # A pipe in place of the file would block without O_NONBLOCK, which regular files ignore.
    flags = (
        os.O_RDONLY
        | os.O_CLOEXEC
        | os.O_NONBLOCK
        | (0 if follow_links else os.O_NOFOLLOW)
    )
    try:
        with suppress(PermissionError):  # of others' files
            return os.open(
                path, flags | getattr(os, "O_NOATIME", 0)
            )  # noting the time takes a part of small reads
        return os.open(path, flags)
    except OSError as error:
        told = (
            "a link, which is not followed"
            if error.errno == errno.ELOOP
            else error.strerror
        )
        raise coded(
            CheckpointError, "HP504", f"cannot be opened: {told}", file=path
        ) from error


def _regular_size(fd: int, path: str | Path) -> int:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise coded(CheckpointError, "HP504", "a regular file was expected", file=path)
    return status.st_size


class DataFile:
    """An open data file. Several threads may read from it."""

    def __init__(
        self,
        fd: int,
        path: str | Path,
        *,
        tag: str | None,
        rank: int | None,
        ours: bool,
    ) -> None:
        size = _regular_size(fd, path)
        self.path, self.is_ours, self._fd = Path(path), ours, fd
        self.header = parse_header(read_head(fd, path), size, path, ours=ours)
        self._known: tuple[str, int, NDArray[np.uint64]] = (
            "",
            0,
            np.empty(0, np.uint64),
        )  # key, first block, sums
        for name, wanted, found in (
            ("tag", tag, self.header.tag),
            ("rank", rank, self.header.rank),
        ):
            if wanted is not None and wanted != found:
                told = f"{wanted} was expected, {found} came; the file is of another checkpoint or was renamed"
                raise coded(
                    CheckpointError,
                    "HP503",
                    told,
                    file=path,
                    field=f"__metadata__.{name}",
                )

    def __enter__(self) -> DataFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing can be read afterwards."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def read(
        self,
        entry: Entry,
        offsets: Sequence[int],
        lengths: Sequence[int],
        out: NDArray[Any],
        verify: bool = True,
    ) -> int:
        """Fills an array, whose elements are opaque and of the chunk's size, with a box of the chunk.

        Returns how many bytes were read: those of the box, widened to whole blocks where they are compared with their
        sums, and the sums.
        """
        _check_box(entry, offsets, lengths, out)
        if out.size == 0:
            return 0
        strides = _strides(entry)
        start = sum(
            offset * stride for offset, stride in zip(offsets, strides, strict=True)
        )
        end = start + _extent(lengths, strides, entry.item_size)
        sums, first, read = (
            self._sums(entry, start // BLOCK, -(-end // BLOCK))
            if verify
            else (None, 0, 0)
        )
        return read + _Chunk(self, entry, sums, first).read(start, strides, out)

    def verify(self, entry: Entry, progress: Progress | None = None) -> None:
        """Compares a whole chunk with its sums."""
        sums, first, _ = self._sums(entry, 0, entry.blocks)
        chunk, buffer = (
            _Chunk(self, entry, sums, first),
            np.empty(min(STEP, entry.nbytes), np.uint8),
        )
        for at in range(0, entry.nbytes, STEP):
            part = buffer[: entry.nbytes - at]
            chunk.take(at, part)
            if progress is not None:
                progress(part.nbytes)

    def fill(self, at: int, out: NDArray[np.uint8], key: str) -> None:
        """Fills an array with the file's bytes from ``at`` on."""
        done = 0
        while done < out.nbytes:
            try:
                got = os.preadv(self._fd, [out[done:].data], at + done)
            except OSError as error:
                raise coded(
                    CheckpointError,
                    "HP504",
                    f"cannot be read: {error.strerror}",
                    file=self.path,
                    field=key,
                ) from error
            if got == 0:
                raise self.cut_short(key)
            done += got

    def cut_short(self, key: str) -> CheckpointError:
        """The error of a file that was longer when it was opened."""
        return coded(
            CheckpointError,
            "HP502",
            "the file ends within this chunk; it was cut short meanwhile",
            file=self.path,
            field=key,
        )

    def damaged(self, entry: Entry, block: int) -> CheckpointError:
        """The error of a block that is not what was written."""
        start, end = block * BLOCK, min((block + 1) * BLOCK, entry.nbytes)
        place = f"bytes {start} to {end} of the chunk, {entry.start + start} to {entry.start + end} of the file"
        told = f"{place}, do not have the checksum that was stored; the file is damaged, use another checkpoint"
        return coded(CheckpointError, "HP502", told, file=self.path, field=entry.key)

    def _sums(
        self, entry: Entry, first: int, end: int
    ) -> tuple[NDArray[np.uint64] | None, int, int]:
        """(sums from some block on that have those of the blocks asked for, that block, bytes read for it)."""
        if self.header.sums is None:
            return None, 0, 0
        key, known_first, known = self._known
        if (
            key == entry.key
            and known_first <= first
            and end <= known_first + len(known)
        ):
            return known, known_first, 0
        stored = np.empty(end - first, SUM)
        if end > first:
            self.fill(
                self.header.sums.start + SUM.itemsize * (entry.first_block + first),
                stored.view(np.uint8),
                entry.key,
            )
        sums = stored.astype(np.uint64, copy=False)
        self._known = (entry.key, first, sums)
        return sums, first, stored.nbytes


class _Chunk:
    """Reads from one chunk of an open file and compares blocks with sums, which begin with that of block ``first``."""

    def __init__(
        self, file: DataFile, entry: Entry, sums: NDArray[np.uint64] | None, first: int
    ) -> None:
        self._file, self._entry, self._sums, self._first = file, entry, sums, first

    def read(self, start: int, strides: tuple[int, ...], out: NDArray[Any]) -> int:
        """Fills an array from ``start`` on; halves it until a half can be read at once."""
        extent = _extent(out.shape, strides, out.itemsize)
        if checksum.fast is not None and extent <= UNINTERRUPTED:
            return self._read_compiled(start, strides, out)
        if (
            checksum.fast is None
            and extent <= STEP
            and _widest_gap(out, strides) <= BLOCK
        ):
            return self._read_at_once(start, extent, strides, out)
        dim = next(dim for dim, length in enumerate(out.shape) if length > 1)
        half = out.shape[dim] // 2
        before = (slice(None),) * dim
        read = self.read(start, strides, out[(*before, slice(None, half))])
        return read + self.read(
            start + half * strides[dim], strides, out[(*before, slice(half, None))]
        )

    def _read_compiled(
        self, start: int, strides: tuple[int, ...], out: NDArray[Any]
    ) -> int:
        entry, file = self._entry, self._file
        try:
            read, damaged = checksum.fast.read_box(
                file._fd,
                entry.start,
                entry.nbytes,
                start,
                strides,
                out,
                self._sums,
                self._first,
            )
        except OSError as error:
            raise coded(
                CheckpointError,
                "HP504",
                f"cannot be read: {error.strerror}",
                file=file.path,
                field=entry.key,
            ) from error
        except EOFError:
            raise file.cut_short(entry.key) from None
        if damaged >= 0:
            raise file.damaged(entry, damaged)
        return int(read)

    def _read_at_once(
        self, start: int, extent: int, strides: tuple[int, ...], out: NDArray[Any]
    ) -> int:
        # In Python: all from the first to the last byte, which must be little and have no wide gaps.
        begin, end = start, start + extent
        if self._sums is not None:
            begin, end = (
                begin // BLOCK * BLOCK,
                min(-(-end // BLOCK) * BLOCK, self._entry.nbytes),
            )
        buffer = np.empty(end - begin, np.uint8)
        self.take(begin, buffer)
        out[...] = np.ndarray(out.shape, out.dtype, buffer.data, start - begin, strides)
        return buffer.nbytes

    def take(self, at: int, out: NDArray[np.uint8]) -> None:
        """Fills an array; where it is compared, both ends are those of blocks."""
        self._file.fill(self._entry.start + at, out, self._entry.key)
        if self._sums is None:
            return
        found = block_sums(out)
        block = at // BLOCK
        wrong = np.flatnonzero(found != self._sums[block - self._first :][: len(found)])
        if len(wrong):
            raise self._file.damaged(self._entry, block + int(wrong[0]))


def _check_box(
    entry: Entry, offsets: Sequence[int], lengths: Sequence[int], out: NDArray[Any]
) -> None:
    """A wrong box is the caller's mistake: files cannot cause one."""
    inside = len(offsets) == len(lengths) == len(entry.shape) and all(
        offset >= 0 and length >= 0 and offset + length <= size
        for offset, length, size in zip(offsets, lengths, entry.shape, strict=True)
    )
    if not inside or out.shape != tuple(lengths) or out.itemsize != entry.item_size:
        told = f"{tuple(lengths)} at {tuple(offsets)} of {entry.key!r}, {entry.dtype} of shape {entry.shape}"
        raise ValueError(
            f"read: {told}, into an array of shape {out.shape} and {out.itemsize} bytes an element"
        )


def _strides(entry: Entry) -> tuple[int, ...]:
    """How far apart in the chunk the elements along each dim are, in bytes."""
    strides, step = [], entry.item_size
    for size in reversed(entry.shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _extent(lengths: Sequence[int], strides: Sequence[int], item_size: int) -> int:
    """The bytes from the first to behind the last one of a box that is not empty."""
    return item_size + sum(
        (length - 1) * stride for length, stride in zip(lengths, strides, strict=True)
    )


def _widest_gap(out: NDArray[Any], strides: Sequence[int]) -> int:
    """The most bytes between neighbours of a box that do not belong to it."""
    gap, extent = 0, out.itemsize
    for length, stride in zip(reversed(out.shape), reversed(strides), strict=True):
        if length > 1:
            gap = max(gap, stride - extent)
        extent += (length - 1) * stride
    return gap
