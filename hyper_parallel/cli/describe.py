# SPDX-License-Identifier: Apache-2.0
"""What is in a checkpoint, as plain values and short texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyper_parallel.core.distributed_checkpoint.chunks import ChunkGrid, Chunks, Cut
from hyper_parallel.core.distributed_checkpoint.codec import encode
from hyper_parallel.core.distributed_checkpoint.entries import PLAIN
from hyper_parallel.core.distributed_checkpoint.format import data_file_name
from hyper_parallel.core.distributed_checkpoint.metadata import (
    Metadata,
    TensorStorageMetadata,
    dtype_name,
)
from hyper_parallel.core.distributed_checkpoint.resharding import as_chunks
from hyper_parallel.core.distributed_checkpoint.strict_json import quoted
from hyper_parallel.core.dtensor.placement_types import Shard


def described(path: Path, kind: str, metadata: Metadata) -> dict[str, Any]:
    """Everything but the data, ready for JSON."""
    known = metadata.state_dict_metadata.items()
    tensors = {
        name: entry for name, entry in known if isinstance(entry, TensorStorageMetadata)
    }
    stored = metadata.storage_data
    return {
        "path": str(path),
        "kind": kind,
        "bytes": sum(
            entry.nbytes() for entry in tensors.values() if entry.stored_as is None
        ),
        "ranks": stored.ranks,
        "library": stored.library,
        "meshes": _meshes(tensors),
        "tensors": [
            _tensor(name, entry, stored.tag) for name, entry in tensors.items()
        ],
        "objects": {
            name: encode(value, name) for name, value in sorted(stored.objects.items())
        },
    }


def _meshes(tensors: Mapping[str, TensorStorageMetadata]) -> list[dict[str, Any]]:
    """The meshes that tensors lay on, each once."""
    cuts = [
        entry.chunks.cut
        for entry in tensors.values()
        if isinstance(entry.chunks, ChunkGrid)
    ]
    found = {
        (cut.mesh_shape, cut.names)
        for cut in cuts
        if cut.names not in (PLAIN, ("rank",))
    }
    return [
        {"shape": list(shape), "names": names and list(names)}
        for shape, names in sorted(found, key=repr)
    ]


def _tensor(name: str, entry: TensorStorageMetadata, tag: str) -> dict[str, Any]:
    made = {
        "name": name,
        "dtype": dtype_name(entry.properties.dtype),
        "shape": list(entry.size),
        "bytes": entry.nbytes(),
        "layout": layout_text(as_chunks(entry.chunks)),
        "files": _files(as_chunks(entry.chunks), tag),
    }
    return made if entry.stored_as is None else {**made, "stored_as": entry.stored_as}


def _files(chunks: Chunks, tag: str) -> list[str]:
    places = {
        chunks.place(number)
        for number, chunk in enumerate(chunks)
        if math.prod(chunk.sizes)
    }
    return sorted(
        data_file_name(tag, place) if isinstance(place, int) else place
        for place in places
    )


def layout_text(chunks: Chunks) -> str:
    """Like "S(0) on tp, R on dp"."""
    if not isinstance(chunks, ChunkGrid):
        return "whole" if len(chunks) == 1 else f"{len(chunks)} chunks"
    cut = chunks.cut
    if cut.names == PLAIN or not cut.mesh_shape:
        return "whole"
    if cut.names == ("rank",):
        return "a row of each rank"
    return ", ".join(
        [*_cutting(cut), *(f"R on {_axis(cut, axis)}" for axis in cut.copying)]
    )


def _cutting(cut: Cut) -> list[str]:
    parts = []
    for dim, axes in enumerate(cut.dim_axes):
        placement = cut.irregular.get(dim, Shard(dim))
        parts += [f"{placement} on {_axis(cut, axis)}" for axis in axes]
    return parts


def _axis(cut: Cut, axis: int) -> str:
    return printable(cut.names[axis]) if cut.names is not None else f"axis {axis}"


def printable(text: str) -> str:
    """A name from a file, which could hold what a terminal obeys."""
    return text if text.isprintable() else quoted(text)


def size_text(count: int) -> str:
    """Like "1.5 GiB"."""
    for unit, size in (
        ("TiB", 1 << 40),
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
    ):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
