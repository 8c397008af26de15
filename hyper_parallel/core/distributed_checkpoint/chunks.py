# SPDX-License-Identifier: Apache-2.0
"""The chunks of a tensor, and who wrote each: told one by one, or computed from the way the tensor lay on a mesh.

    grid = ChunkGrid((8, 6), Cut((2, 4), range(8), ((1,), ())))      dim 0 is cut along the axis of 4 ranks
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
from hyper_parallel.platform.transform import chunk_span

Box = tuple[tuple[int, int], ...]  # (offset, size) along each dim
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
    """Chunks that are told one by one."""

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

    ``sections`` are the sizes of the parts of a dim that are cut each for itself. A dim that no axis cuts is one piece.
    """

    mesh_shape: tuple[int, ...]
    ranks: range | tuple[int, ...]  # of the mesh, the last axis fastest
    dim_axes: tuple[tuple[int, ...], ...]
    sections: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
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
        for dim, sections in self.sections.items():
            counts[dim] *= len(sections)
        return tuple(counts)

    @cached_property
    def section_starts(self) -> dict[int, tuple[int, ...]]:
        """Where the sections of a dim begin."""
        return {
            dim: tuple(itertools.accumulate(sizes, initial=0))
            for dim, sizes in self.sections.items()
        }

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

    def span(self, dim: int, size: int, piece: int) -> tuple[int, int]:
        """(offset, size) of one of the pieces of a dim."""
        if dim in self.sections:
            sections = self.sections[dim]
            count = self.pieces[dim] // len(sections)
            section, piece = divmod(piece, count)
            offset, length = chunk_span(sections[section], count, piece)
            return self.section_starts[dim][section] + offset, length
        offset = 0
        for axis, index in zip(
            self.dim_axes[dim], self._coordinates(dim, piece), strict=True
        ):
            step, size = chunk_span(size, self.mesh_shape[axis], index)
            offset += step
        return offset, size

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

    def _pieces_of(self, dim: int, coordinate: Sequence[int]) -> range:
        piece = 0
        for axis in self.dim_axes[dim]:
            piece = piece * self.mesh_shape[axis] + coordinate[axis]
        count = len(self.sections.get(dim, (0,)))
        return range(piece, self.pieces[dim], self.pieces[dim] // count)

    def _coordinates(self, dim: int, piece: int) -> list[int]:
        """Where along the axes that cut a dim a piece lies."""
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
        """Where in the shard of the rank that has it a cell begins: after the pieces of earlier sections."""
        starts = [0] * len(cell)
        for dim, sections in self.cut.sections.items():
            count = self.cut.pieces[dim] // len(sections)
            earlier = range(cell[dim] % count, cell[dim], count)
            starts[dim] = sum(
                self.cut.span(dim, self.size[dim], piece)[1] for piece in earlier
            )
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


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None where that is nothing."""
    found = []
    for (start, size), (begin, length) in zip(one, other, strict=True):
        first, last = max(start, begin), min(start + size, begin + length)
        if first >= last:
            return None
        found.append((first, last - first))
    return tuple(found)
