# SPDX-License-Identifier: Apache-2.0
"""Whole tensors out of a checkpoint of any layout and into files, a few MiB at a time.

with Source(reader_for("runs/a")) as source:
    for box, data in source.slabs("model.w"):       the bytes of w in order; `data` is used again for the next box
        ...
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.core.distributed_checkpoint.chunks import Place
from hyper_parallel.core.distributed_checkpoint.data_file import (
    STEP,
    Bytes,
    DataFile,
    Piece,
    Progress,
)
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.filesystem import (
    FileSystemReader,
    read_box,
)
from hyper_parallel.core.distributed_checkpoint.header import build_plain_header
from hyper_parallel.core.distributed_checkpoint.metadata import (
    ITEM_SIZES,
    TensorStorageMetadata,
    dtype_name,
)
from hyper_parallel.core.distributed_checkpoint.resharding import as_chunks, read_items
from hyper_parallel.core.dtensor.geometry import Box
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

STAGING = 1 << 22  # bytes of a tensor that are in memory at once
_MOST_OPEN = 64  # files


class Source:
    """A checkpoint that is read tensor by tensor, by one process."""

    def __init__(self, reader: FileSystemReader) -> None:
        self.metadata = reader.load_metadata()
        reader.configure_reader(self.metadata, is_coordinator=True)
        self._reader = reader
        self._files: dict[Place, DataFile] = {}
        known = self.metadata.state_dict_metadata.items()
        self.tensors = {
            name: entry
            for name, entry in known
            if isinstance(entry, TensorStorageMetadata)
        }
        self.objects: Mapping[str, Any] = self.metadata.storage_data.objects

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def dtype(self, name: str) -> str:
        """The neutral name of a tensor's dtype."""
        return dtype_name(self.tensors[name].properties.dtype)

    def read(self, name: str, box: Box, out: NDArray[Any]) -> None:
        """Fills an array of opaque elements with a box of a tensor."""
        stored = self.tensors[name]
        chunks = as_chunks(stored.chunks)
        for item in read_items(name, [box], chunks, stored.stored_as):
            number = item.storage_index.index
            assert number is not None
            file = self._file(chunks.place(number))
            entry = self._reader.entry(
                file, item.storage_index.fqn, chunks.chunk(number)
            )
            starts = zip(item.dest_offsets, item.lengths, strict=True)
            inside: tuple[Any, ...] = (
                *(slice(start, start + n) for start, n in starts),
                ...,
            )
            read_box(file, entry, item, out[inside], verify=True)

    def slabs(self, name: str) -> Iterator[tuple[Box, NDArray[np.uint8]]]:
        """The boxes of a tensor whose bytes, one after the other, are the tensor's, with these bytes."""
        item_size = ITEM_SIZES[self.dtype(name)]
        buffer = np.empty(STAGING, np.uint8)
        for box in boxes_in_order(self.tensors[name].size, item_size):
            shape = tuple(size for _, size in box)
            data = buffer[: math.prod(shape) * item_size]
            self.read(name, box, data.view(f"V{item_size}").reshape(shape))
            yield box, data

    def stream(self, name: str, dtype: str | None = None) -> Bytes:
        """The bytes of a tensor, read when they are asked for; floating-point numbers may be cast."""
        own = self.dtype(name)
        wanted = dtype if dtype is not None and "float" in own else own
        parts = (
            data if wanted == own else _cast(data, own, wanted)
            for _, data in self.slabs(name)
        )
        return _Stream(math.prod(self.tensors[name].size) * ITEM_SIZES[wanted], parts)

    def _file(self, place: Place) -> DataFile:
        if place not in self._files:
            if len(self._files) >= _MOST_OPEN:
                self._files.pop(next(iter(self._files))).close()
            self._files[place] = self._reader.open(place)
        return self._files[place]


def boxes_in_order(
    size: Sequence[int], item_size: int, most: int = STAGING
) -> Iterator[Box]:
    """Boxes of at most so many bytes that follow each other in a row-major tensor and fill it."""
    if not size or math.prod(size) == 0:
        yield from [()] if not size else []
        return
    dim = next(
        dim
        for dim in range(len(size))
        if math.prod(size[dim + 1 :]) * item_size <= most
    )
    step = max(1, most // (math.prod(size[dim + 1 :]) * item_size))
    inner = tuple((0, n) for n in size[dim + 1 :])
    for outer in itertools.product(*(range(n) for n in size[:dim])):
        for start in range(0, size[dim], step):
            yield (
                *((index, 1) for index in outer),
                (start, min(step, size[dim] - start)),
                *inner,
            )


def _cast(data: NDArray[np.uint8], own: str, wanted: str) -> NDArray[np.uint8]:
    platform = get_platform()
    tensor = platform.tensor_from_bytes(data, own, (data.nbytes // ITEM_SIZES[own],))
    made: NDArray[Any] = platform.tensor_memory(
        platform.tensor_type_cast(tensor, wanted)
    )
    return made.reshape(-1).view(np.uint8)


class _Stream:
    """Bytes that are asked for in order, made of parts of any length."""

    def __init__(self, nbytes: int, parts: Iterator[NDArray[np.uint8]]) -> None:
        self._nbytes, self._parts = nbytes, parts
        self._at, self._rest = 0, np.empty(0, np.uint8)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def __getitem__(self, part: slice, /) -> NDArray[np.uint8]:
        start, stop, _ = part.indices(self._nbytes)
        assert start == self._at, "a stream is read from its beginning to its end"
        self._at = stop
        found: list[NDArray[np.uint8]] = []
        missing = stop - start
        while missing:
            if not len(self._rest):
                self._rest = next(self._parts)
            found.append(
                self._rest[:missing].copy()
                if len(self._rest) < missing
                else self._rest[:missing]
            )
            self._rest = self._rest[missing:]
            missing -= len(found[-1])
        return (
            found[0]
            if len(found) == 1
            else np.concatenate([np.empty(0, np.uint8), *found])
        )


def write_plain_file(
    path: Path,
    pieces: Sequence[Piece],
    metadata: Mapping[str, str],
    progress: Progress | None = None,
) -> None:
    """Writes and syncs a safetensors file as any library would; what fails leaves nothing behind."""
    head, entries = build_plain_header(
        [(piece.key, piece.dtype, piece.shape) for piece in pieces], metadata
    )
    memories = {piece.key: piece.memory for piece in pieces}
    try:
        path.unlink(missing_ok=True)
        with path.open("xb") as file:
            file.write(head)
            for entry in entries:
                data = memories[entry.key]()
                for at in range(0, entry.nbytes, STEP):
                    file.write(data[at : at + STEP].data)
                    if progress is not None:
                        progress(min(STEP, entry.nbytes - at))
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise coded(
                CheckpointError,
                "HP505",
                f"cannot be written: {error.strerror or error}",
                file=path,
            ) from error
        raise
