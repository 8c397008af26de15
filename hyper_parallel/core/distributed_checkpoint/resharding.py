# SPDX-License-Identifier: Apache-2.0
"""From any chunks to any boxes: which part of which chunk goes where.

chunks of rows, [0:4] and [4:8]; a rank wants columns [3:6]   ->   [0:4, 3:6] of the first, [0:4, 3:6] of the second
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hyper_parallel.core.distributed_checkpoint.chunks import (
    ChunkList,
    Chunks,
    Part,
    box_of,
)
from hyper_parallel.core.distributed_checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
)
from hyper_parallel.core.distributed_checkpoint.planner import LoadItemType, ReadItem
from hyper_parallel.core.dtensor.geometry import Box, overlap


@dataclass(frozen=True)
class Source:
    """Where the elements that a chunk and a box have in common are: in the chunk, and in the box."""

    box: tuple[int, ...]  # where the box begins in the whole
    within_box: tuple[int, ...]
    chunk: tuple[int, ...]
    number: int
    within_chunk: tuple[int, ...]
    lengths: tuple[int, ...]

    def item(self, name: str, stored_as: str | None) -> ReadItem:
        """The same for the tensor of a name."""
        return ReadItem(
            LoadItemType.TENSOR,
            MetadataIndex(name, self.box),
            self.within_box,
            MetadataIndex(stored_as or name, self.chunk, self.number),
            self.within_chunk,
            self.lengths,
        )


@dataclass(frozen=True)
class Filling:
    """How some parts are filled from chunks. It is the same for all tensors of one size that lie in the same ways."""

    parts: dict[tuple[int, ...], Part]  # by where they begin in the whole
    sources: tuple[Source, ...]
    volume: int  # elements
    is_whole: bool  # the chunks have all elements of the parts
    is_as_stored: bool  # each part is a chunk


def filling(parts: Iterable[Part], chunks: Sequence[ChunkStorageMetadata]) -> Filling:
    """What fills the parts of a tensor that a rank has; every element comes from one chunk."""
    wanted = {tuple(offset for offset, _ in part.box): part for part in parts}
    found = tuple(
        source
        for part in wanted.values()
        for source in _sources(part.box, as_chunks(chunks))
    )
    volume = sum(math.prod(source.lengths) for source in found)
    sizes = [tuple(size for _, size in part.box) for part in wanted.values()]
    whole = [
        source.lengths
        for source in found
        if not any((*source.within_box, *source.within_chunk))
    ]
    stored = [chunks[source.number].sizes for source in found]
    return Filling(
        wanted,
        found,
        volume,
        volume == sum(map(math.prod, sizes)),
        sizes == whole == stored,
    )


def read_items(
    name: str,
    boxes: Iterable[Box],
    chunks: Sequence[ChunkStorageMetadata],
    stored_as: str | None = None,
) -> Iterator[ReadItem]:
    """What fills these boxes of a tensor."""
    return (
        source.item(name, stored_as)
        for box in boxes
        for source in _sources(box, as_chunks(chunks))
    )


def as_chunks(chunks: Sequence[ChunkStorageMetadata]) -> Chunks:
    """Chunks that can be asked for those in a box; a plain sequence of them is one written by rank 0."""
    return (
        chunks
        if isinstance(chunks, Chunks)
        else ChunkList(tuple(chunks), (0,) * len(chunks))
    )


def _sources(box: Box, stored: Chunks) -> Iterator[Source]:
    begin = tuple(offset for offset, _ in box)
    for number in stored.overlapping(box):
        chunk = stored.chunk(number)
        common = overlap(box, box_of(chunk))
        if common is None:
            continue
        starts, lengths = (
            tuple(start for start, _ in common),
            tuple(size for _, size in common),
        )
        yield Source(
            begin,
            _minus(starts, begin),
            chunk.offsets,
            number,
            _minus(starts, chunk.offsets),
            lengths,
        )


def _minus(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(operator.sub, one, other))
