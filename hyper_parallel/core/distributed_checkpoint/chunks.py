# SPDX-License-Identifier: Apache-2.0
"""The chunks of a tensor and the ranks that wrote them: listed, or computed from the layout of the tensor.

    grid = ChunkGrid((8, 6), Cut((2, 4), range(8), ((1,), ())))      dim 0 is sharded along the axis of 4 ranks
    len(grid), grid[1], grid.place(1)                                4, rows 2 and 3, rank 1

A grid takes as much memory and time for 65,536 ranks as for 8: nothing in it is listed. Chunks without elements are
counted, and never written.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, overload

from hyper_parallel.core.distributed_checkpoint.metadata import ChunkStorageMetadata
from hyper_parallel.core.dtensor.geometry import Box, Span, nested_span, overlap
from hyper_parallel.core.dtensor.placement_types import Shard

Place = int | str  # the rank that wrote a chunk, or the name of the file that has it


class Chunks(Sequence[ChunkStorageMetadata]):
    """A sequence of chunks that knows where each is stored."""

    @abstractmethod
    def chunk(self, number: int) -> ChunkStorageMetadata:
        """One chunk."""

    @abstractmethod
    def place(self, number: int) -> Place:
        """Where a chunk is stored."""

    @abstractmethod
    def overlapping(self, box: Box) -> Iterator[int]:
        """The numbers of the chunks that have an element of the box."""

    @overload
    def __getitem__(self, number: int) -> ChunkStorageMetadata: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[ChunkStorageMetadata]: ...
    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self.chunk(i) for i in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(f"chunk {number} of {len(self)}")
        return self.chunk(number % len(self))


@dataclass(frozen=True, eq=False)
class ChunkList(Chunks):
    """Chunks that are listed."""

    chunks: tuple[ChunkStorageMetadata, ...]
    places: tuple[Place, ...]

    def __len__(self) -> int:
        return len(self.chunks)

    def chunk(self, number: int) -> ChunkStorageMetadata:
        return self.chunks[number]

    def place(self, number: int) -> Place:
        return self.places[number]

    def overlapping(self, box: Box) -> Iterator[int]:
        return (
            i
            for i, chunk in enumerate(self.chunks)
            if overlap(box, box_of(chunk)) is not None
        )


class Part(NamedTuple):
    """A chunk that a rank has: its number, its box in the whole, and where it begins in the rank's shard."""

    number: int
    box: Box
    start: tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """How a mesh cuts a tensor: for each dim the axes that do, the outermost first.

    ``irregular`` has the placements of dims that are not divided into chunks. A dim that no axis shards is one piece.
    """

    mesh_shape: tuple[int, ...]
    ranks: range | tuple[int, ...]  # of the mesh, the last axis fastest
    dim_axes: tuple[tuple[int, ...], ...]
    irregular: Mapping[int, Shard] = field(default_factory=dict)  # by dim
    names: tuple[str, ...] | None = None  # of the axes, for people

    @cached_property
    def cutting(self) -> frozenset[int]:
        """The axes that cut any dim."""
        return frozenset(axis for axes in self.dim_axes for axis in axes)

    @cached_property
    def copying(self) -> tuple[int, ...]:
        """The axes along which the tensor is copied."""
        return tuple(
            axis for axis in range(len(self.mesh_shape)) if axis not in self.cutting
        )

    @cached_property
    def replicas(self) -> int:
        """How many ranks have each chunk."""
        return math.prod(self.mesh_shape[axis] for axis in self.copying)

    @cached_property
    def pieces(self) -> tuple[int, ...]:
        """How many chunks there are along each dim."""
        counts = [
            math.prod(self.mesh_shape[axis] for axis in axes) for axes in self.dim_axes
        ]
        for dim, placement in self.irregular.items():
            counts[dim] = placement.piece_count(counts[dim])
        return tuple(counts)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """What a step along each axis adds to a rank's place in ``ranks``."""
        return tuple(
            math.prod(self.mesh_shape[axis + 1 :])
            for axis in range(len(self.mesh_shape))
        )

    @cached_property
    def writers(self) -> dict[tuple[int, int], int]:
        """The ranks that were asked for, by the number of the chunk and the replica; many tensors share a cut."""
        return {}

    def span(self, dim: int, size: int, piece: int) -> Span:
        """(offset, size) of one of the pieces of a dim."""
        ranks = [self.mesh_shape[axis] for axis in self.dim_axes[dim]]
        if dim in self.irregular:
            placement = self.irregular[dim]
            rank, number = placement.owner_of(piece, ranks[0])
            return placement.spans(size, ranks[0], rank)[number]
        coordinates = self._coordinates(dim, piece)
        return nested_span(size, list(zip(ranks, coordinates, strict=True)))

    def rank(self, cell: Sequence[int], replica: int) -> int:
        """The rank that has this piece of each dim, as the given one of those that have it."""
        place = 0
        for dim, piece in enumerate(cell):
            for axis, index in zip(
                self.dim_axes[dim], self._coordinates(dim, piece), strict=True
            ):
                place += index * self.strides[axis]
        for axis in reversed(self.copying):
            replica, index = divmod(replica, self.mesh_shape[axis])
            place += index * self.strides[axis]
        return self.ranks[place]

    def replica_of(self, coordinate: Sequence[int]) -> int:
        """Which of those that have its chunk a place of the mesh is."""
        number = 0
        for axis in self.copying:
            number = number * self.mesh_shape[axis] + coordinate[axis]
        return number

    def cells_of(self, coordinate: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """The pieces, one number a dim, that a place of the mesh has."""
        return itertools.product(
            *(self._pieces_of(dim, coordinate) for dim in range(len(self.dim_axes)))
        )

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The place of a rank on the mesh; None outside."""
        try:
            place = self.ranks.index(rank)
        except ValueError:
            return None
        return tuple(
            place // stride % size
            for stride, size in zip(self.strides, self.mesh_shape, strict=True)
        )

    def _pieces_of(self, dim: int, coordinate: Sequence[int]) -> Sequence[int]:
        """The pieces of a dim that a coordinate holds, ascending."""
        if dim in self.irregular:
            axis = self.dim_axes[dim][0]
            placement, ranks = self.irregular[dim], self.mesh_shape[axis]
            return placement.pieces_of(coordinate[axis], ranks)
        piece = 0
        for axis in self.dim_axes[dim]:
            piece = piece * self.mesh_shape[axis] + coordinate[axis]
        return [piece]

    def _coordinates(self, dim: int, piece: int) -> list[int]:
        """Where along the axes that shard a dim a piece lies."""
        if dim in self.irregular:
            ranks = self.mesh_shape[self.dim_axes[dim][0]]
            return [self.irregular[dim].owner_of(piece, ranks)[0]]
        found = []
        for axis in reversed(self.dim_axes[dim]):
            piece, index = divmod(piece, self.mesh_shape[axis])
            found.append(index)
        return found[::-1]


@dataclass(frozen=True, eq=False)
class ChunkGrid(Chunks):
    """The chunks of a tensor that lay on a mesh; ``replica`` says which of the ranks that have a chunk wrote it."""

    size: tuple[int, ...]
    cut: Cut
    replica: int = 0

    def __len__(self) -> int:
        return math.prod(self.cut.pieces)

    def cell(self, number: int) -> tuple[int, ...]:
        """The piece of each dim that a chunk is made of."""
        found = []
        for count in reversed(self.cut.pieces):
            number, piece = divmod(number, count)
            found.append(piece)
        return tuple(found[::-1])

    def number(self, cell: Sequence[int]) -> int:
        """The number of the chunk that is made of these pieces."""
        number = 0
        for piece, count in zip(cell, self.cut.pieces, strict=True):
            number = number * count + piece
        return number

    def box(self, cell: Sequence[int]) -> Box:
        """(offset, size) along each dim of a cell."""
        return tuple(
            self.cut.span(dim, self.size[dim], piece) for dim, piece in enumerate(cell)
        )

    def parts_at(self, coordinate: Sequence[int]) -> Iterator[Part]:
        """What a place of the mesh has: the chunks that are not empty, and where in its shard each begins."""
        for cell in self.cut.cells_of(coordinate):
            box = self.box(cell)
            if all(size for _, size in box):
                yield Part(self.number(cell), box, self._within(cell))

    def _within(self, cell: Sequence[int]) -> tuple[int, ...]:
        """Where a cell begins in the shard of the rank that holds it: after its earlier spans."""
        starts = [0] * len(cell)
        for dim, placement in self.cut.irregular.items():
            ranks = self.cut.mesh_shape[self.cut.dim_axes[dim][0]]
            rank, number = placement.owner_of(cell[dim], ranks)
            earlier = placement.spans(self.size[dim], ranks, rank)[:number]
            starts[dim] = sum(size for _, size in earlier)
        return tuple(starts)

    def chunk(self, number: int) -> ChunkStorageMetadata:
        found = self._known.get(number)
        if found is None:
            found = self._known[number] = chunk_of(self.box(self.cell(number)))
        return found

    @cached_property
    def _known(self) -> dict[int, ChunkStorageMetadata]:
        """Chunks that were asked for: a plan asks several times for the few that it needs."""
        return {}

    def place(self, number: int) -> int:
        known = self.cut.writers
        key = (number, self.replica)
        if key not in known:
            known[key] = self.cut.rank(self.cell(number), self.replica)
        return known[key]

    def overlapping(self, box: Box) -> Iterator[int]:
        if any(size == 0 for _, size in box):
            return
        spans = [
            self._pieces_in(dim, offset, offset + size)
            for dim, (offset, size) in enumerate(box)
        ]
        for cell in itertools.product(*spans):
            if all(size for _, size in self.box(cell)):
                yield self.number(cell)

    def _pieces_in(self, dim: int, start: int, stop: int) -> range:
        """The pieces of a dim that begin before ``stop`` and end after ``start``; pieces ascend."""
        first = _first(
            self.cut.pieces[dim],
            lambda piece: sum(self.cut.span(dim, self.size[dim], piece)) > start,
        )
        last = _first(
            self.cut.pieces[dim],
            lambda piece: self.cut.span(dim, self.size[dim], piece)[0] >= stop,
        )
        return range(first, last)


def _first(count: int, is_true: Any) -> int:
    """The first number below ``count`` from which on something is true; ``count`` if it never is."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_true(middle) else (middle + 1, high)
    return low


def box_of(chunk: ChunkStorageMetadata) -> Box:
    """(offset, size) along each dim."""
    return tuple(zip(chunk.offsets, chunk.sizes, strict=True))


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """The chunk that is this box."""
    return ChunkStorageMetadata(
        tuple(offset for offset, _ in box), tuple(size for _, size in box)
    )
