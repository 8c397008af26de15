# SPDX-License-Identifier: Apache-2.0
"""How the parameters of a unit are divided between ranks, and where each travels in the unit's collectives.

Example::

    plan = Plan((Entry((512, 512), 0, 4), Entry((512,), 0, 4)), ranks=2, index=0)
    plan.direct        (0,)   goes straight from the shards into its place
    plan.packed        (1,)   travels with other small ones in one buffer
    plan.row           256    elements per rank in that buffer

Everything here is pure: frozen values, no platform, no processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from hyper_parallel.core.dtensor.placement_types import Shard

# Below this many bytes per rank, copying costs less than a message of its own.
DIRECT_BYTES = 1 << 18


class Owner(Protocol):
    """The unit whose tensors travel, for messages; units of one mesh are numbered in the order of their creation."""

    name: str
    number: int


@dataclass(frozen=True)
class Entry:
    """A tensor that is divided along ``dim``; None: every rank holds all of it."""

    shape: tuple[int, ...]
    dim: int | None
    element_size: int

    def span(self, ranks: int, index: int) -> tuple[int, int]:
        """The start and the stop of a rank's shard along the dim."""
        assert self.dim is not None
        spans = Shard(self.dim).spans(self.shape[self.dim], ranks, index)
        if not spans:
            return 0, 0
        ((start, length),) = spans
        return start, start + length

    def shard_shape(self, ranks: int, index: int) -> tuple[int, ...]:
        """The shape of a rank's shard."""
        if self.dim is None:
            return self.shape
        start, stop = self.span(ranks, index)
        return (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :])

    def joins_without_copy(self, ranks: int) -> bool:
        """Whether the shards, joined in rank order in memory, are the tensor."""
        if self.dim is None:
            return False
        outer = math.prod(self.shape[: self.dim])
        return outer == 1 and self.shape[self.dim] % ranks == 0

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return math.prod(self.shape) * self.element_size


@dataclass(frozen=True)
class Plan:
    """The division of a unit's tensors of one dtype between ``ranks`` ranks, as seen by the rank at ``index``."""

    entries: tuple[Entry, ...]
    ranks: int
    index: int

    @cached_property
    def direct(self) -> tuple[int, ...]:
        """The entries whose shards are large and join into the tensor without a copy."""
        return tuple(
            number
            for number, entry in enumerate(self.entries)
            if entry.joins_without_copy(self.ranks)
            and entry.nbytes >= DIRECT_BYTES * self.ranks
        )

    @cached_property
    def packed(self) -> tuple[int, ...]:
        """The entries that travel together in one buffer."""
        return tuple(n for n in range(len(self.entries)) if n not in self.direct)

    @cached_property
    def offsets(self) -> dict[int, int]:
        """Where the shard of each packed entry starts in a rank's row of the buffer."""
        offsets, offset = {}, 0
        for number in self.packed:
            offsets[number] = offset
            offset += self.largest_shard(number)
        return offsets

    @cached_property
    def row(self) -> int:
        """The elements of a rank's row of the buffer; shorter shards are padded."""
        return sum(self.largest_shard(number) for number in self.packed)

    def largest_shard(self, number: int) -> int:
        """The elements of the first rank's shard, which no other exceeds."""
        return math.prod(self.entries[number].shard_shape(self.ranks, 0))

    def shard_shape(self, number: int, index: int | None = None) -> tuple[int, ...]:
        """The shape of a rank's shard of an entry; by default this rank's."""
        return self._shapes[number][self.index if index is None else index]

    @cached_property
    def _shapes(self) -> list[list[tuple[int, ...]]]:
        ranks = range(self.ranks)
        return [
            [entry.shard_shape(self.ranks, index) for index in ranks]
            for entry in self.entries
        ]

    def slices(self, number: int, index: int) -> tuple[slice, ...]:
        """The slices of an entry that are a rank's shard."""
        entry = self.entries[number]
        if entry.dim is None:
            return ()
        start, stop = entry.span(self.ranks, index)
        before = (slice(None),) * entry.dim
        return (*before, slice(start, stop))

    @cached_property
    def pieces(self) -> list[list[Piece]]:
        """The packed shards that have elements, by rank."""
        return [self._pieces_of(rank) for rank in range(self.ranks)]

    def _pieces_of(self, rank: int) -> list[Piece]:
        pieces = []
        for number in self.packed:
            start = self.offsets[number]
            shape = self.shard_shape(number, rank)
            stop = start + math.prod(shape)
            if stop > start:
                slices = self.slices(number, rank)
                pieces.append(Piece(number, start, stop, shape, slices))
        return pieces

    @cached_property
    def even(self) -> tuple[int, ...]:
        """The packed entries of which every rank has equally many consecutive elements."""
        return tuple(
            number
            for number in self.packed
            if self.entries[number].joins_without_copy(self.ranks)
        )


class Piece(NamedTuple):
    """A rank's shard of an entry: where it is in the rank's row of a buffer, and in the whole tensor."""

    number: int
    start: int
    stop: int
    shape: tuple[int, ...]
    slices: tuple[slice, ...]
