# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as a folder: one safetensors file per rank that writes, and checkpoint.json, which completes it.

Data is written under a temporary name, synced and renamed; when all ranks have done so the coordinator writes the
metadata the same way. File names contain the tag of their save, so a folder can be overwritten: until the new metadata
is in place the old checkpoint remains, with all of its files.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.core.distributed_checkpoint import data_file
from hyper_parallel.core.distributed_checkpoint.chunks import Place
from hyper_parallel.core.distributed_checkpoint.data_file import (
    Bytes,
    DataFile,
    Piece,
    Progress,
    open_data_file,
    write_data_file,
)
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.format import (
    METADATA_FILE,
    MOST_BYTES,
    Stored,
    data_file_name,
    from_bytes,
    key_of,
    to_bytes,
)
from hyper_parallel.core.distributed_checkpoint.header import PARTS, Entry
from hyper_parallel.core.distributed_checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
    dtype_name,
)
from hyper_parallel.core.distributed_checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from hyper_parallel.core.distributed_checkpoint.resharding import as_chunks
from hyper_parallel.core.distributed_checkpoint.storage import (
    SaveRun,
    StorageReader,
    StorageWriter,
    WriteResult,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

_OURS = re.compile(
    r"(data-(?P<tag>[0-9a-f]{16})-\d{5,}\.safetensors|checkpoint\.json)(\.[0-9a-f]{16})?(\.tmp)?"
)

_Located = list[tuple[Entry, ReadItem]]
_MOST_OPEN = 64  # files that stay open between a look at them and reading


def new_tag() -> str:
    """What the files of one save have in common, and no other save has."""
    return secrets.token_hex(8)


class FileSystemWriter(StorageWriter):
    """Writes into a folder that all ranks can access."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        progress: Progress | None = None,
    ) -> None:
        self._folder = None if path is None else Path(path)
        self._progress = progress
        self._run = SaveRun("")
        self._allow_pickle = False
        self._own: Path | None = None

    @property
    def folder(self) -> Path:
        """Where the checkpoint goes."""
        if self._folder is None:
            raise coded(
                ValueError,
                "HP513",
                "FileSystemWriter has no folder: pass one, or a checkpoint_id",
            )
        return self._folder

    def initialize_writer(self, checkpoint_id: Any) -> None:
        if checkpoint_id is not None:
            self._folder = Path(checkpoint_id)
        self._own = None

    def configure_writer(self, is_coordinator: bool) -> None:  # noqa: ARG002 - all see the same folder
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise coded(
                CheckpointError,
                "HP505",
                f"the folder cannot be made: {error.strerror}",
                file=self.folder,
            ) from error

    def execute_write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        self._run = plan.storage_data or SaveRun(new_tag())
        self._allow_pickle = getattr(planner, "allow_pickle", False)
        tensors = [item for item in plan.items if item.type is WriteItemType.TENSOR]
        if tensors:
            self._own = self.folder / data_file_name(self._run.token, self._run.rank)
            pieces = [_piece(item, planner) for item in tensors]
            write_data_file(
                self._own,
                pieces,
                tag=self._run.token,
                rank=self._run.rank,
                progress=self._progress,
            )
        written = [
            WriteResult(item.index, item.tensor_storage_size() or 0) for item in tensors
        ]
        objects = (item for item in plan.items if item.type is WriteItemType.BYTE_IO)
        return written + [
            WriteResult(item.index, 0, planner.get_data(item)) for item in objects
        ]

    def finalize_checkpoint(
        self, metadata: Metadata, results: list[list[WriteResult]]
    ) -> Metadata:
        found = {
            result.index.fqn: result.storage_data for each in results for result in each
        }
        objects = {
            n: found[n]
            for n, m in metadata.state_dict_metadata.items()
            if not isinstance(m, TensorStorageMetadata)
        }
        stored = Stored(
            self._run.token,
            self._run.ranks,
            objects,
            f"hyper_parallel {version('hyper_parallel')}",
        )
        whole = Metadata(
            metadata.state_dict_metadata,
            metadata.planner_data,
            stored,
            metadata.version,
        )
        self._write_metadata(to_bytes(whole, allow_pickle=self._allow_pickle))
        with suppress(
            OSError
        ):  # the checkpoint is whole, whatever else is there; the next save tries again
            remove_leftovers(self.folder, self._run.token)
        return whole

    def abandon(self) -> None:
        if self._own is not None:
            with suppress(
                OSError
            ):  # the others wait to be told what really went wrong; the next save removes it
                self._own.unlink(missing_ok=True)

    def _write_metadata(self, text: bytes) -> None:
        target = self.folder / METADATA_FILE
        growing = target.with_name(f"{target.name}.{self._run.token}.tmp")
        try:
            with growing.open("xb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            data_file.phase("metadata written")
            growing.replace(target)
            data_file.phase("metadata renamed")
            data_file.sync_folder(self.folder)
        except OSError as error:
            growing.unlink(missing_ok=True)
            raise coded(
                CheckpointError,
                "HP505",
                f"the metadata cannot be written: {error.strerror}",
                file=target,
            ) from error
        data_file.phase("metadata synced")


def remove_leftovers(folder: Path, tag: str) -> list[str]:
    """Removes the files of earlier saves in a folder, complete or interrupted, and returns their names.

    Only files that this library created are removed. No save into the folder may be running.
    """
    removed = []
    for path in sorted(folder.iterdir()):
        named = _OURS.fullmatch(path.name)
        if named is None or path.name == METADATA_FILE:
            continue
        if named["tag"] != tag or path.suffix == ".tmp":
            path.unlink(missing_ok=True)
            data_file.phase("leftover removed")
            removed.append(path.name)
    return removed


def _piece(item: WriteItem, planner: SavePlanner) -> Piece:
    assert item.tensor_data is not None
    chunk, size = item.tensor_data["chunk"], item.tensor_data["size"]
    dtype = dtype_name(item.tensor_data["properties"].dtype)
    return Piece(
        key_of(item.index.fqn, chunk, size),
        dtype,
        chunk.sizes,
        lambda: bytes_of(planner.get_data(item)),
    )


def bytes_of(tensor: Any) -> Bytes:
    """The bytes of a plain tensor, in its own memory where that is possible; a planner may also give bytes."""
    if not get_platform().is_tensor(tensor):
        assert isinstance(tensor, Bytes)
        return tensor
    host = get_platform().host_tensor(tensor)
    items: NDArray[Any] = get_platform().tensor_memory(host)
    return items.reshape(-1).view(np.uint8)


class FileSystemReader(StorageReader):
    """Reads a folder. ``verify=False`` does not compare checksums; ``allow_pickle=True`` unpickles what was pickled.

    With None for ``allow_pickle`` pickles are passed through, for callers that do not inspect objects.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        verify: bool = True,
        allow_pickle: bool | None = False,
        progress: Progress | None = None,
    ) -> None:
        self._folder = None if path is None else Path(path)
        self._verify = verify
        self._allow_pickle = allow_pickle
        self._progress = progress
        self._metadata: Metadata | None = None
        self._opened: dict[Place, tuple[DataFile, LoadPlan, _Located]] = {}
        self.bytes_read = 0

    @property
    def folder(self) -> Path:
        """Where the checkpoint is."""
        if self._folder is None:
            raise coded(
                ValueError,
                "HP513",
                "FileSystemReader has no folder: pass one, or a checkpoint_id",
            )
        return self._folder

    def initialize_reader(self, checkpoint_id: Any) -> None:
        if checkpoint_id is not None:
            self._folder = Path(checkpoint_id)
        self._metadata = None
        self.bytes_read = 0

    def load_metadata(self) -> Metadata:
        file = self.folder / METADATA_FILE
        try:
            data = data_file.read_small_file(file, MOST_BYTES)
        except CheckpointError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                torn = self.folder.is_dir() and any(
                    _OURS.fullmatch(path.name) for path in self.folder.iterdir()
                )
                why = (
                    "a save into it did not come to its end"
                    if torn
                    else "nothing was saved there"
                )
                raise coded(
                    CheckpointError,
                    "HP501",
                    f"there is no whole checkpoint here: {why}",
                    file=file,
                ) from error
            raise
        return from_bytes(data, file, allow_pickle=self._allow_pickle)

    def configure_reader(self, metadata: Metadata, is_coordinator: bool) -> None:  # noqa: ARG002 - the protocol's
        self._metadata = metadata

    def check_plan(self, plan: LoadPlan) -> None:
        for place, items in self._by_place(plan).items():
            file = self.open(place)
            located: _Located = []
            self._opened[place] = (
                file,
                plan,
                located,
            )  # before anything is found wrong with it, so that it is closed
            located += self._located(file, items)
            if len(self._opened) > _MOST_OPEN:
                self._opened.pop(place)[0].close()

    def execute_read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        for place, items in self._by_place(plan).items():
            file, checked, located = self._opened.pop(place, None) or (
                self.open(place),
                None,
                [],
            )
            with file:
                self._read(
                    file,
                    located if checked is plan else self._located(file, items),
                    planner,
                )
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.apply_bytes(
                    item, self._known().storage_data.objects[item.storage_index.fqn]
                )

    def close(self) -> None:
        for place in list(self._opened):
            self._opened.pop(place)[0].close()

    def open(self, place: Place) -> DataFile:
        """The data file of a place."""
        assert isinstance(place, int)
        tag = self._known().storage_data.tag
        return open_data_file(
            self.folder / data_file_name(tag, place), tag=tag, rank=place
        )

    def key(self, name: str, chunk: ChunkStorageMetadata) -> str:
        """What a chunk is called in its file."""
        return key_of(name, chunk, self._stored(name).size)

    def entry(self, file: DataFile, name: str, chunk: ChunkStorageMetadata) -> Entry:
        """Where a chunk is in its file; a CheckpointError if it is not there as the metadata says."""
        stored = self._stored(name)
        dtype, sizes = dtype_name(stored.properties.dtype), tuple(chunk.sizes)
        key = self.key(name, chunk)
        found = file.header.entries.get(key)
        if found is None:
            raise coded(
                CheckpointError,
                "HP503",
                "the file does not have this chunk",
                file=file.path,
                field=key,
            )
        if found.dtype == PARTS.get(dtype):
            dtype, sizes = PARTS[dtype], (*sizes, 2)
        if (found.dtype, found.shape) != (dtype, sizes):
            raise coded(
                CheckpointError,
                "HP503",
                f"expected {dtype} of shape {sizes}, the file has {found.dtype} of shape {found.shape}",
                file=file.path,
                field=key,
            )
        return found

    def _located(self, file: DataFile, items: list[ReadItem]) -> _Located:
        """The items with their chunks, in the order of the file."""
        found = [
            (self.entry(file, item.storage_index.fqn, self._chunk(item)), item)
            for item in items
        ]
        return sorted(found, key=lambda pair: (pair[0].start, pair[1].storage_offsets))

    def _read(self, file: DataFile, located: _Located, planner: LoadPlanner) -> None:
        for entry, item in located:
            tensor = planner.acquire_tensor(item)
            memory = get_platform().tensor_memory(tensor)
            count = read_box(file, entry, item, memory, verify=self._verify)
            self.bytes_read += count
            planner.apply_tensor(item, tensor)
            if self._progress is not None:
                self._progress(count)

    def _by_place(self, plan: LoadPlan) -> dict[Place, list[ReadItem]]:
        found: dict[Place, list[ReadItem]] = {}
        for item in (item for item in plan.items if item.type is LoadItemType.TENSOR):
            chunks = as_chunks(self._stored(item.storage_index.fqn).chunks)
            found.setdefault(chunks.place(_number(item)), []).append(item)
        places = sorted(found, key=str)
        platform = get_platform()
        first = (
            platform.get_rank() * len(places) // platform.get_world_size()
        )  # not all ranks at one file at a time
        return {place: found[place] for place in places[first:] + places[:first]}

    def _chunk(self, item: ReadItem) -> ChunkStorageMetadata:
        return as_chunks(self._stored(item.storage_index.fqn).chunks).chunk(
            _number(item)
        )

    def _stored(self, name: str) -> TensorStorageMetadata:
        stored = self._known().state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        return stored

    def _known(self) -> Metadata:
        if self._metadata is None:
            self._metadata = self.load_metadata()
        return self._metadata


def _number(item: ReadItem) -> int:
    assert item.storage_index.index is not None
    return item.storage_index.index


def read_box(
    file: DataFile, entry: Entry, item: ReadItem, memory: NDArray[Any], *, verify: bool
) -> int:
    """Fills an array of opaque elements, of the item's lengths, from a chunk; returns how many bytes were read."""
    offsets, lengths = item.storage_offsets, item.lengths
    if entry.item_size < memory.dtype.itemsize:  # complex numbers are stored as pairs
        pairs = np.lib.stride_tricks.as_strided(
            memory, (*memory.shape, 1), (*memory.strides, memory.dtype.itemsize)
        )
        memory = pairs.view(f"V{entry.item_size}")
        offsets, lengths = (*offsets, 0), (*lengths, 2)
    return file.read(entry, offsets, lengths, memory, verify=verify)
