# SPDX-License-Identifier: Apache-2.0
"""Is a checkpoint as it was written, and are two the same? One process reads every byte, a few MiB at a time.

problems = verify_checkpoint("runs/a/step-100")         a list of errors: which file, which field
found = compare_checkpoints("step-100", "step-200")     names, shapes, values, objects; layouts do not matter
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.core.distributed_checkpoint.codec import encode
from hyper_parallel.core.distributed_checkpoint.data_file import (
    Progress,
    open_data_file,
)
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.filesystem import FileSystemReader
from hyper_parallel.core.distributed_checkpoint.format import data_file_name
from hyper_parallel.core.distributed_checkpoint.hugging_face import (
    HuggingFaceReader,
    reader_for,
)
from hyper_parallel.core.distributed_checkpoint.metadata import (
    ITEM_SIZES,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from hyper_parallel.core.distributed_checkpoint.resharding import as_chunks
from hyper_parallel.core.distributed_checkpoint.streaming import Source
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

_DATA = re.compile(r"data-([0-9a-f]{16})-(\d{5,10})\.safetensors")
_Expected = dict[
    int, list[tuple[str, ChunkStorageMetadata]]
]  # the chunks in the file of each rank


# --- verifying


def verify_checkpoint(
    folder: str | os.PathLike[str],
    progress: Progress | None = None,
    *,
    follow_links: bool = False,
) -> list[CheckpointError]:
    """Everything that is wrong: damage, missing files and chunks, files of other saves. Nothing is unpickled.

    Files of Hugging Face have no checksums: of them names, sizes and offsets are checked.
    """
    reader = reader_for(folder, follow_links=follow_links, allow_pickle=None)
    problems: list[CheckpointError] = []
    metadata: Metadata | None = None
    try:
        metadata = reader.load_metadata()
        reader.configure_reader(metadata, is_coordinator=True)
    except CheckpointError as error:
        problems.append(error)
    if isinstance(reader, HuggingFaceReader) or not reader.folder.is_dir():
        return problems
    expected = _expected(metadata)
    for path in sorted(reader.folder.iterdir()):
        problems.extend(_path_problems(path, reader, metadata, expected, progress))
    for rank in sorted(expected):
        told = f"the file is missing; {len(expected[rank])} chunks are in it"
        assert metadata is not None
        problems.append(
            coded(
                CheckpointError,
                "HP501",
                told,
                file=reader.folder / data_file_name(metadata.storage_data.tag, rank),
            )
        )
    return problems


def _expected(metadata: Metadata | None) -> _Expected:
    made: _Expected = {}
    for name, entry in (
        {} if metadata is None else metadata.state_dict_metadata
    ).items():
        if not isinstance(entry, TensorStorageMetadata) or entry.stored_as is not None:
            continue
        chunks = as_chunks(entry.chunks)
        for number, chunk in enumerate(chunks):
            place = chunks.place(number)
            assert isinstance(place, int)
            if math.prod(chunk.sizes):
                made.setdefault(place, []).append((name, chunk))
    return made


def _path_problems(
    path: Path,
    reader: FileSystemReader,
    metadata: Metadata | None,
    expected: _Expected,
    progress: Progress | None,
) -> list[CheckpointError]:
    named = _DATA.fullmatch(path.name)
    if named is None:
        if path.suffix not in (".tmp", ".safetensors"):
            return []
        return [
            coded(
                CheckpointError,
                "HP518",
                "the metadata does not know this file; a save that broke off may have left it",
                file=path,
            )
        ]
    tag, rank = named[1], int(named[2])
    if metadata is not None and (
        tag != metadata.storage_data.tag or rank >= metadata.storage_data.ranks
    ):
        return [
            coded(
                CheckpointError,
                "HP518",
                "the metadata does not know this file; it is of another save",
                file=path,
            )
        ]
    return _file_problems(path, tag, rank, reader, expected.pop(rank, []), progress)


def _file_problems(
    path: Path,
    tag: str,
    rank: int,
    reader: FileSystemReader,
    chunks: list[tuple[str, ChunkStorageMetadata]],
    progress: Progress | None,
) -> list[CheckpointError]:
    problems: list[CheckpointError] = []
    try:
        with open_data_file(path, tag=tag, rank=rank) as file:
            for name, chunk in chunks:
                try:
                    reader.entry(file, name, chunk)
                except CheckpointError as error:
                    problems.append(error)
            for entry in file.header.entries.values():
                try:
                    file.verify(entry, progress)
                except CheckpointError as error:
                    problems.append(error)
    except CheckpointError as error:
        problems.append(error)
    return problems


# --- comparing


@dataclass(frozen=True)
class Difference:
    """Elements of a tensor whose bits differ, of how many, and how far they are apart at most; a nan counts as nan."""

    count: int
    elements: int
    largest: float


@dataclass(frozen=True)
class Comparison:
    """What is not the same in two checkpoints, by name."""

    only_in_first: tuple[str, ...]
    only_in_second: tuple[str, ...]
    kinds: Mapping[str, tuple[str, str]]  # shape and dtype, or that it is an object
    values: Mapping[str, Difference]
    objects: Mapping[str, tuple[Any, Any]]
    compared: int  # names in both

    @property
    def is_equal(self) -> bool:
        """Whether there is no difference at all."""
        return not (
            self.only_in_first
            or self.only_in_second
            or self.kinds
            or self.values
            or self.objects
        )


def compare_checkpoints(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    prefixes: tuple[str, str] = ("", ""),
    follow_links: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Compares tensors bit by bit, and objects; how tensors were cut does not matter.

    Where a prefix is given, the names that begin with it are compared, without it, and no objects.
    """
    readers = [
        reader_for(place, follow_links=follow_links, allow_pickle=None)
        for place in (first, second)
    ]
    with Source(readers[0]) as one, Source(readers[1]) as other:
        with_objects = not any(prefixes)
        left, right = (
            _named(one, prefixes[0], with_objects),
            _named(other, prefixes[1], with_objects),
        )
        kinds: dict[str, tuple[str, str]] = {}
        values: dict[str, Difference] = {}
        objects: dict[str, tuple[Any, Any]] = {}
        both = [name for name in left if name in right]
        for name in both:
            told = _kind(one, left[name]), _kind(other, right[name])
            if told[0] != told[1]:
                kinds[name] = told
            elif left[name] in one.tensors:
                found = _compared(one, left[name], other, right[name], progress)
                if found.count:
                    values[name] = found
            elif not _are_same(
                name, one.objects[left[name]], other.objects[right[name]]
            ):
                objects[name] = one.objects[left[name]], other.objects[right[name]]
        is_foreign = any(isinstance(reader, HuggingFaceReader) for reader in readers)
        alone = (
            _alone(one, left, right, is_foreign),
            _alone(other, right, left, is_foreign),
        )
        return Comparison(*alone, kinds, values, objects, len(both))


def _named(source: Source, prefix: str, with_objects: bool) -> dict[str, str]:
    """The names to be compared, and what they are in the source."""
    every = sorted([*source.tensors, *(source.objects if with_objects else ())])
    return {name[len(prefix) :]: name for name in every if name.startswith(prefix)}


def _alone(
    source: Source,
    names: Mapping[str, str],
    others: Mapping[str, str],
    is_foreign: bool,
) -> tuple[str, ...]:
    """The names that the other one lacks. Of tied tensors files of Hugging Face have one, which then is enough."""
    tied = (
        {own: entry.stored_as or own for own, entry in source.tensors.items()}
        if is_foreign
        else {}
    )
    known = {tied.get(own) for name, own in names.items() if name in others} - {None}
    return tuple(
        name
        for name, own in names.items()
        if name not in others and tied.get(own) not in known
    )


def _kind(source: Source, name: str) -> str:
    if name not in source.tensors:
        return "object"
    return f"{source.dtype(name)} {list(source.tensors[name].size)}"


def _are_same(name: str, one: Any, other: Any) -> bool:
    """Type for type; two nans are the same, and True is not 1."""
    return repr(encode(one, name)) == repr(encode(other, name))


def _compared(
    one: Source, name: str, other: Source, other_name: str, progress: Progress | None
) -> Difference:
    count, largest, dtype = 0, 0.0, one.dtype(name)
    for (_, left), (_, right) in zip(
        one.slabs(name), other.slabs(other_name), strict=True
    ):
        where = _differing(left, right, ITEM_SIZES[dtype])
        if len(where):
            count += len(where)
            largest = float(np.maximum(largest, _largest(left, right, where, dtype)))
        if progress is not None:
            progress(left.nbytes)
    return Difference(count, math.prod(one.tensors[name].size), largest)


def _differing(
    left: NDArray[np.uint8], right: NDArray[np.uint8], item_size: int
) -> NDArray[np.intp]:
    """The numbers of the elements that do not have the same bits."""
    if np.array_equal(left, right):
        return np.empty(0, np.intp)
    return np.flatnonzero(
        (left.reshape(-1, item_size) != right.reshape(-1, item_size)).any(axis=1)
    )


def _largest(
    left: NDArray[np.uint8],
    right: NDArray[np.uint8],
    where: NDArray[np.intp],
    dtype: str,
) -> float:
    one, other = _numbers(left, where, dtype), _numbers(right, where, dtype)
    if dtype == "bool":
        return 1.0
    if "int" in dtype:  # unsigned arithmetic is exact, whatever the sign
        unsigned = f"u{one.dtype.itemsize}"
        return float(
            (
                np.maximum(one, other).view(unsigned)
                - np.minimum(one, other).view(unsigned)
            ).max()
        )
    wide = np.complex128 if "complex" in dtype else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.abs(one.astype(wide) - other.astype(wide)).max())


def _numbers(
    data: NDArray[np.uint8], where: NDArray[np.intp], dtype: str
) -> NDArray[Any]:
    chosen = np.ascontiguousarray(data.reshape(-1, ITEM_SIZES[dtype])[where]).reshape(
        -1
    )
    platform = get_platform()
    made: NDArray[Any] = platform.tensor_to_numpy(
        platform.tensor_from_bytes(chosen, dtype, (len(where),))
    )
    return made
