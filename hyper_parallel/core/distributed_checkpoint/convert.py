# SPDX-License-Identifier: Apache-2.0
"""Offline, in one process: checkpoints, folders of Hugging Face, single safetensors files and plain state dicts.

    hugging_face_to_checkpoint("llama-3-8b", "start")           load({"model": model}, checkpoint_id="start")
    checkpoint_to_hugging_face("runs/a/step-100", "exported")   from_pretrained("exported")
    checkpoint_to_file("runs/a/step-100", "all.safetensors")    and back, exactly, with file_to_checkpoint

Tensors go from file to file in pieces of a few MiB. What is read may be any of the three kinds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hyper_parallel.core.distributed_checkpoint.api import save
from hyper_parallel.core.distributed_checkpoint.chunks import (
    ChunkGrid,
    ChunkList,
    Chunks,
)
from hyper_parallel.core.distributed_checkpoint.data_file import (
    Piece,
    Progress,
    sync_folder,
)
from hyper_parallel.core.distributed_checkpoint.entries import whole_on
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.filesystem import (
    FileSystemWriter,
    new_tag,
)
from hyper_parallel.core.distributed_checkpoint.format import Stored, to_bytes
from hyper_parallel.core.distributed_checkpoint.header import FOREIGN_CODES, PARTS
from hyper_parallel.core.distributed_checkpoint.hugging_face import (
    OUR_TEXT,
    SHARD_BYTES,
    export_hugging_face,
    reader_for,
)
from hyper_parallel.core.distributed_checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from hyper_parallel.core.distributed_checkpoint.metadata import Path as Steps
from hyper_parallel.core.distributed_checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from hyper_parallel.core.distributed_checkpoint.state_dict import nested
from hyper_parallel.core.distributed_checkpoint.streaming import (
    Source,
    write_plain_file,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

Place = str | os.PathLike[str]


def checkpoint_to_state_dict(
    folder: Place, *, follow_links: bool = False, allow_pickle: bool = False
) -> dict[str, Any]:
    """The nested state dict of a checkpoint, or of files of Hugging Face, with plain whole tensors in host memory.

    Tied tensors are one. What each rank had its own of is a tensor with a row for each, or a dict by rank.
    """
    with Source(
        reader_for(folder, follow_links=follow_links, allow_pickle=allow_pickle)
    ) as source:
        values: dict[str, Any] = dict(source.objects)
        stored = {
            name: _tensor(source, name)
            for name, entry in source.tensors.items()
            if entry.stored_as is None
        }
        for name, entry in source.tensors.items():
            values[name] = stored[entry.stored_as or name]
        return nested(values, source.metadata.planner_data)


def state_dict_to_checkpoint(state_dict: Mapping[str, Any], folder: Place) -> Metadata:
    """Saves what this process has; other processes, if there are any, are not asked."""
    return save(state_dict, checkpoint_id=folder, no_dist=True)


def checkpoint_to_hugging_face(
    checkpoint: Place,
    folder: Place,
    *,
    prefix: str = "model.",
    max_shard_bytes: int = SHARD_BYTES,
    dtype: Any = None,
    overwrite: bool = False,
    follow_links: bool = False,
    progress: Progress | None = None,
) -> dict[str, str]:
    """Exports the tensors under ``prefix``, without it, for from_pretrained; returns the file of each."""
    return export_hugging_face(
        checkpoint,
        folder,
        prefix=prefix,
        max_shard_bytes=max_shard_bytes,
        dtype=dtype,
        overwrite=overwrite,
        follow_links=follow_links,
        no_dist=True,
        progress=progress,
    )


def hugging_face_to_checkpoint(
    folder: Place,
    checkpoint: Place,
    *,
    prefix: str = "model.",
    follow_links: bool = False,
    progress: Progress | None = None,
) -> Metadata:
    """Makes a checkpoint of one file; with the prefix "model." it is that of {"model": {...}}."""
    with Source(
        reader_for(folder, follow_links=follow_links, allow_pickle=None)
    ) as source:
        return _write_checkpoint(source, checkpoint, prefix, progress)


def checkpoint_to_file(
    checkpoint: Place,
    file: Place,
    *,
    overwrite: bool = False,
    follow_links: bool = False,
    progress: Progress | None = None,
) -> None:
    """Makes one safetensors file with every tensor whole, and all else in its metadata."""
    path = Path(file)
    if not overwrite and os.path.lexists(path):
        raise coded(
            CheckpointError,
            "HP506",
            "is there already; choose another name, or pass overwrite=True",
            file=path,
        )
    growing = path.with_name(f"{path.name}.tmp")
    with Source(
        reader_for(checkpoint, follow_links=follow_links, allow_pickle=None)
    ) as source:
        own = [
            name for name, entry in source.tensors.items() if entry.stored_as is None
        ]
        text = to_bytes(
            _whole(
                source, {name: name for name in source.tensors}, _one_chunk, new_tag()
            )
        ).decode()
        pieces = [_piece(source, name) for name in own]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_plain_file(growing, pieces, {"format": "pt", OUR_TEXT: text}, progress)
    growing.replace(path)
    sync_folder(path.parent)


def file_to_checkpoint(
    file: Place, checkpoint: Place, *, progress: Progress | None = None
) -> Metadata:
    """Makes a checkpoint of one file; what `checkpoint_to_file` wrote comes back as it was."""
    with Source(reader_for(file, allow_pickle=None)) as source:
        return _write_checkpoint(source, checkpoint, "", progress)


# --- whole tensors


def _tensor(source: Source, name: str) -> Any:
    platform, size = get_platform(), source.tensors[name].size
    made = platform.empty(
        size, dtype=platform.str_to_dtype(source.dtype(name)), device="cpu"
    )
    source.read(name, tuple((0, n) for n in size), platform.tensor_memory(made))
    return made


def _piece(source: Source, name: str) -> Piece:
    dtype, shape = source.dtype(name), tuple(source.tensors[name].size)
    if dtype not in FOREIGN_CODES:  # complex128, as pairs
        return Piece(name, PARTS[dtype], (*shape, 2), lambda: source.stream(name))
    return Piece(name, dtype, shape, lambda: source.stream(name))


def _one_chunk(size: tuple[int, ...]) -> Chunks:
    return ChunkList((ChunkStorageMetadata((0,) * len(size), size),), (0,))


def _one_rank(size: tuple[int, ...]) -> Chunks:
    return ChunkGrid(size, whole_on(1, len(size)))


def _whole(
    source: Source, names: Mapping[str, str], chunks: Any, tag: str, paths: Any = None
) -> Metadata:
    """What a source holds, each tensor in one piece, under other names: from the old to the new."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for old, new in names.items():
        entry = source.tensors[old]
        stored_as = None if entry.stored_as is None else names[entry.stored_as]
        properties = TensorProperties(source.dtype(old), entry.properties.requires_grad)
        entries[new] = TensorStorageMetadata(
            properties, tuple(entry.size), chunks(tuple(entry.size)), stored_as
        )
    entries.update((name, BytesStorageMetadata()) for name in source.objects)
    steps = source.metadata.planner_data if paths is None else paths
    stored = Stored(
        tag, 1, source.objects, f"hyper_parallel {version('hyper_parallel')}"
    )
    return Metadata(dict(sorted(entries.items())), dict(sorted(steps.items())), stored)


def _write_checkpoint(
    source: Source, folder: Place, prefix: str, progress: Progress | None
) -> Metadata:
    planner = _StreamPlanner(source, prefix)
    return save(
        {},
        storage_writer=FileSystemWriter(folder, progress=progress),
        planner=planner,
        no_dist=True,
    )


class _StreamPlanner(SavePlanner):
    """Has the tensors of a source written whole, while they are read."""

    def __init__(self, source: Source, prefix: str) -> None:
        if prefix and (not prefix.endswith(".") or "" in prefix[:-1].split(".")):
            raise coded(
                ValueError,
                "HP513",
                f"prefix: expected keys that each end with a dot, like 'model.', or '', got {prefix!r}",
            )
        self._source = source
        self._names = {name: prefix + name for name in source.tensors}
        self._old = {new: old for old, new in self._names.items()}
        paths: dict[str, Steps] = dict(source.metadata.planner_data)
        if prefix:
            keys = prefix[:-1].split(".")
            moved = {
                prefix + name: (*keys, *paths.get(name, (name,)))
                for name in source.tensors
            }
            paths = {
                name: path for name, path in paths.items() if name in source.objects
            } | moved
        self._metadata = _whole(source, self._names, _one_rank, new_tag(), paths)

    def configure_planner(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """The source says what there is."""

    def build_local_plan(self) -> SavePlan:
        objects = self._source.objects.items()
        items = [
            WriteItem(MetadataIndex(n), WriteItemType.BYTE_IO, bytes_io_data=value)
            for n, value in objects
        ]
        return SavePlan([*self._tensor_items(), *items])

    def _tensor_items(self) -> list[WriteItem]:
        items = []
        for name, entry in self._metadata.state_dict_metadata.items():
            if (
                isinstance(entry, TensorStorageMetadata)
                and entry.stored_as is None
                and entry.nbytes()
            ):
                data = {
                    "chunk": entry.chunks[0],
                    "properties": entry.properties,
                    "size": entry.size,
                }
                items.append(
                    WriteItem(
                        MetadataIndex(name, entry.chunks[0].offsets, 0),
                        WriteItemType.TENSOR,
                        data,
                    )
                )
        return items

    def build_global_plan(
        self, all_plans: Sequence[SavePlan]
    ) -> tuple[list[SavePlan], Metadata]:
        return list(all_plans), self._metadata

    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def get_data(self, item: WriteItem) -> Any:
        if item.type is WriteItemType.BYTE_IO:
            return item.bytes_io_data
        return self._source.stream(self._old[item.index.fqn])
