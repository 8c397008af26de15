# SPDX-License-Identifier: Apache-2.0
"""Which blocks of (queries, keys) a rank computes, as values: no tensors, no ranks, no platform.

    CAUSAL.blocks(((4, 4),), ((0, 8),))      queries 4 to 7, keys 0 to 7
    (Block(queries=(0, 4), keys=(0, 4)), Block(queries=(0, 4), keys=(4, 4), after=0))

Positions are global: a rank says which spans of the sequence its queries and its keys come from, and gets blocks of
its local tensors, in which the spans are stored one after the other. A block is a rectangle in which every query sees
every key, or a band around a diagonal. A query that is in no block sees nothing, and its output is zero.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hyper_parallel.core.dtensor.geometry import Span, Spans
from hyper_parallel.core.dtensor.placement_types import Shard
from hyper_parallel.platform.error_codes import coded

# (start, stop, document): a part of a sequence; keys of a negative document are padding, which nobody sees.
Run = tuple[int, int, int]
Documents = tuple[tuple[Run, ...], ...]  # for each row of the batch, or one for all
SHORTEST_TILE = 128  # queries in a tile of a window


@dataclass(frozen=True)
class Block:
    """Queries and keys of a rank's local tensors, as spans; query i sees key j if i - before <= j <= i + after.

    i and j count from the beginning of the block; None is no limit. ``row``: of the batch, None for all.
    """

    queries: Span
    keys: Span
    before: int | None = None
    after: int | None = None
    row: int | None = None

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        return self.before is None and self.after is None

    @property
    def is_causal(self) -> bool:
        """Whether query i sees exactly the keys up to i."""
        return self.before is None and self.after == 0

    @property
    def work(self) -> int:
        """The number of pairs of a query and a key that it sees."""
        queries, keys = self.queries[1], self.keys[1]
        if self.is_full:
            return queries * keys
        before = queries if self.before is None else self.before
        after = keys if self.after is None else self.after
        seen = 0
        for query in range(queries):
            first, last = max(0, query - before), min(keys - 1, query + after)
            seen += max(0, last - first + 1)
        return seen


@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees, by their positions in the whole sequence.

    ``before``, ``after``: how many positions back and forward it sees; None is no limit, so ``after=0`` is causal.
    ``documents``: a query sees the keys of its own document only.
    """

    before: int | None = None
    after: int | None = None
    documents: Documents | None = None

    def blocks(self, queries: Spans, keys: Spans) -> tuple[Block, ...]:
        """The blocks of what lies at these spans of the sequence; none of them is empty."""
        return _find_blocks(self, queries, keys)

    def work(self, queries: Spans, keys: Spans) -> int:
        """The number of pairs of a query and a key that it sees, in one row of the batch."""
        return sum(block.work for block in self.blocks(queries, keys))


FULL = Visibility()
CAUSAL = Visibility(after=0)


@functools.lru_cache(maxsize=4096)
def _find_blocks(sight: Visibility, queries: Spans, keys: Spans) -> tuple[Block, ...]:
    found: list[Block] = []
    for at_query, at_key in itertools.product(_placed(queries), _placed(keys)):
        if sight.documents is None:
            found += _blocks_of_pair(sight, at_query, at_key)
        else:
            found += _blocks_in_documents(sight, at_query, at_key)
    return tuple(found)


@dataclass(frozen=True)
class _Placed:
    """A span of the sequence, and where it begins in the local tensor."""

    start: int
    stop: int
    local: int

    def within(self, start: int, stop: int) -> _Placed:
        """The part of it that lies between two positions; may be empty."""
        first = min(max(self.start, start), self.stop)
        last = max(first, min(self.stop, stop))
        return _Placed(first, last, self.local + first - self.start)

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def span(self) -> Span:
        """Where it lies in the local tensor."""
        return self.local, self.size


def _placed(spans: Spans) -> list[_Placed]:
    """The spans that are not empty, those that continue each other as one."""
    placed: list[_Placed] = []
    local = 0
    for offset, size in spans:
        if size and placed and placed[-1].stop == offset:
            placed[-1] = replace(placed[-1], stop=offset + size)
        elif size:
            placed.append(_Placed(offset, offset + size, local))
        local += size
    return placed


def _blocks_in_documents(
    sight: Visibility, queries: _Placed, keys: _Placed
) -> Iterator[Block]:
    """The blocks of each document by itself."""
    assert sight.documents is not None
    for row, runs in enumerate(sight.documents):
        for own, theirs in _pairs_in_documents(runs, queries, keys):
            for block in _blocks_of_pair(sight, own, theirs):
                yield block if len(sight.documents) == 1 else replace(block, row=row)


def _pairs_in_documents(
    runs: Sequence[Run], queries: _Placed, keys: _Placed
) -> Iterator[tuple[_Placed, _Placed]]:
    """Queries and keys of one document; not of all pairs of runs, for a sequence may hold thousands."""
    keys_of: dict[int, list[_Placed]] = {}
    for start, stop, document in runs:
        part = keys.within(start, stop)
        if part.size and document >= 0:
            keys_of.setdefault(document, []).append(part)
    for start, stop, document in runs:
        own = queries.within(start, stop)
        for theirs in keys_of.get(document, ()) if own.size else ():
            yield own, theirs


def _blocks_of_pair(
    sight: Visibility, queries: _Placed, keys: _Placed
) -> Iterator[Block]:
    if not queries.size or not keys.size:
        return
    if sight.before is None:
        yield from _blocks_without_window(sight.after, queries, keys)
        return
    # Tiles of queries keep the masks small, and most of what a window hides is in no tile at all.
    step = max(SHORTEST_TILE, sight.before + (sight.after or 0) + 1)
    for start in range(queries.start, queries.stop, step):
        tile = queries.within(start, start + step)
        last = keys.stop if sight.after is None else tile.stop + sight.after
        seen = keys.within(tile.start - sight.before, last)
        yield from _block_of_tile(sight, tile, seen)


def _blocks_without_window(
    after: int | None, queries: _Placed, keys: _Placed
) -> Iterator[Block]:
    """What all queries see, and what lies on the diagonal."""
    if after is None:
        yield Block(queries.span, keys.span)
        return
    # Queries that see the first key, and the keys that the first of these queries sees.
    queries = queries.within(keys.start - after, queries.stop)
    border = queries.start + after
    seen_by_all = keys.within(keys.start, border)
    if queries.size and seen_by_all.size:
        yield Block(queries.span, seen_by_all.span)
    diagonal = keys.within(border, queries.stop + after)
    if queries.size and diagonal.size:
        yield Block(queries.span, diagonal.span, after=0)


def _block_of_tile(
    sight: Visibility, queries: _Placed, keys: _Placed
) -> Iterator[Block]:
    if not queries.size or not keys.size:
        return
    assert sight.before is not None
    # The limits from the beginning of the block, and only where they hide something.
    ahead = queries.start - keys.start
    before, after = sight.before - ahead, None
    if sight.after is not None:
        after = sight.after + ahead
    hides_before = queries.size - 1 - before > 0
    hides_after = after is not None and after < keys.size - 1
    yield Block(
        queries.span,
        keys.span,
        before if hides_before else None,
        after if hides_after else None,
    )


# --- documents


def documents_of_lengths(borders: Sequence[int], size: int) -> Documents:
    """Documents one after the other, from their cumulative lengths (0, 5, 9); what comes after the last is padding."""
    borders = [int(border) for border in borders]
    ascending = all(a <= b for a, b in itertools.pairwise(borders))
    if not borders or borders[0] != 0 or not ascending or borders[-1] > size:
        raise coded(
            ValueError,
            "HP804",
            "cu_seqlens: expected cumulative lengths that begin with 0, do not descend and end at the "
            f"length of the sequence, {size}, or before it; got {borders}",
        )
    ends = [*itertools.pairwise(borders)]
    runs = [(start, stop, i) for i, (start, stop) in enumerate(ends) if stop > start]
    return (tuple(runs),)


def documents_of_ids(rows: Iterable[Sequence[int]]) -> Documents:
    """Documents from the number of each position's document, for each row of the batch; negative is padding."""
    found = []
    for row in rows:
        runs, start = [], 0
        for number, group in itertools.groupby(row):
            stop = start + sum(1 for _ in group)
            runs.append((start, stop, int(number)))
            start = stop
        found.append(tuple(runs))
    return tuple(found) if len(set(found)) > 1 else tuple(found[:1])


# --- balance


def work_of_ranks(
    placement: Shard, size: int, ranks: int, sight: Visibility = CAUSAL
) -> list[int]:
    """How many pairs of a query and a key each rank computes, of a sequence of this size that is placed like this."""
    everything = ((0, size),)
    return [
        sight.work(placement.spans(size, ranks, index), everything)
        for index in range(ranks)
    ]


def imbalance(
    placement: Shard, size: int, ranks: int, sight: Visibility = CAUSAL
) -> float:
    """The work of the busiest rank over that of the average rank; 1 where all have the same.

    Causal attention on 4 ranks: 1.75 for ``Shard`` of a long sequence, 1 for ``ZigzagShard``.
    """
    work = work_of_ranks(placement, size, ranks, sight)
    return max(work) * ranks / sum(work) if sum(work) else 1.0
