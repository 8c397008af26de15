# SPDX-License-Identifier: Apache-2.0
"""From any chunks to any boxes: which part of which chunk goes where.

chunks of rows, [0:4] and [4:8]; a rank wants columns [3:6]   ->   [0:4, 3:6] of the first, [0:4, 3:6] of the second
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hyper_parallel.core.distributed_checkpoint.chunks import Box, ChunkList, Chunks, box_of, overlap
from hyper_parallel.core.distributed_checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from hyper_parallel.core.distributed_checkpoint.planner import LoadItemType, ReadItem


def read_items(
    name: str, boxes: Iterable[Box], chunks: Sequence[ChunkStorageMetadata], stored_as: str | None = None
) -> Iterator[ReadItem]:
    """What fills these boxes of a tensor; every element comes from one chunk."""
    stored = as_chunks(chunks)
    for box in boxes:
        for number in stored.overlapping(box):
            chunk = stored.chunk(number)
            common = overlap(box, box_of(chunk))
            if common is not None:
                yield _item(name, stored_as or name, box, number, chunk, common)


def as_chunks(chunks: Sequence[ChunkStorageMetadata]) -> Chunks:
    """Chunks that can be asked for those in a box; a plain sequence of them is one written by rank 0."""
    return chunks if isinstance(chunks, Chunks) else ChunkList(tuple(chunks), (0,) * len(chunks))


def _item(name: str, stored_as: str, box: Box, number: int, chunk: ChunkStorageMetadata, common: Box) -> ReadItem:
    return ReadItem(
        LoadItemType.TENSOR,
        dest_index=MetadataIndex(name, tuple(offset for offset, _ in box)),
        dest_offsets=tuple(start - offset for (start, _), (offset, _) in zip(common, box, strict=True)),
        storage_index=MetadataIndex(stored_as, chunk.offsets, number),
        storage_offsets=tuple(start - offset for (start, _), offset in zip(common, chunk.offsets, strict=True)),
        lengths=tuple(size for _, size in common),
    )
