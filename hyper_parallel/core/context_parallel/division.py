# SPDX-License-Identifier: Apache-2.0
"""How ranks share a sequence and the heads of attention on it, as values.

    division = Division(ranks=(0, 1, 2, 3), index=1, queries=spans, keys=spans, degree=2)
    division.inner, division.outer          (0, 1), (1, 3)

Neighbours exchange heads for positions: each of ``degree`` ranks then has all positions of these ranks, of its heads.
Between such groups keys and values are gathered or rotate. Degree 1 exchanges no heads, and with all ranks in one
group no keys move.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from hyper_parallel.core.dtensor.geometry import Span, Spans
from hyper_parallel.platform.error_codes import coded


@dataclass(frozen=True)
class Division:
    """``ranks`` in the order of the sequence, and for each the spans of its queries and of its keys.

    ``index``: this rank's. ``rotates``: keys and values go round in place of being gathered.
    """

    ranks: tuple[int, ...]
    index: int
    queries: tuple[Spans, ...]
    keys: tuple[Spans, ...]
    degree: int = 1
    rotates: bool = False

    def __post_init__(self) -> None:
        if self.degree < 1 or len(self.ranks) % self.degree:
            raise coded(
                ValueError,
                "HP802",
                f"context parallel: {len(self.ranks)} ranks cannot exchange heads in groups of {self.degree}; the "
                "degree must divide the number of ranks",
            )

    @property
    def inner(self) -> tuple[int, ...]:
        """The ranks that exchange heads with this one."""
        start = self.index - self.inner_index
        return self.ranks[start : start + self.degree]

    @property
    def inner_index(self) -> int:
        return self.index % self.degree

    @property
    def outer(self) -> tuple[int, ...]:
        """The ranks whose keys this rank needs, after the exchange."""
        return self.ranks[self.inner_index :: self.degree]

    @property
    def outer_index(self) -> int:
        return self.index // self.degree

    def joined_queries(self) -> Joined:
        """What a rank has of the queries after the exchange."""
        return join(self._of_group(self.queries, self.outer_index))

    def joined_keys(self, outer_index: int) -> Joined:
        """What the rank of this group has of the keys after the exchange."""
        return join(self._of_group(self.keys, outer_index))

    def _of_group(self, spans: tuple[Spans, ...], group: int) -> tuple[Spans, ...]:
        return spans[group * self.degree : (group + 1) * self.degree]


@dataclass(frozen=True)
class Joined:
    """Spans of several ranks that are joined in ascending order.

    ``sizes``: how much each rank has. ``order``: where the pieces of the joined tensor lie in the tensors of the ranks,
    one after the other; None if they are in order already.
    """

    spans: Spans
    sizes: tuple[int, ...]
    order: tuple[Span, ...] | None

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def reverse(self) -> tuple[Span, ...] | None:
        """Where the pieces of the ranks' tensors lie in the joined one."""
        if self.order is None:
            return None
        begins = itertools.accumulate((size for _, size in self.order), initial=0)
        pieces = zip(self.order, begins, strict=False)
        return tuple((begin, size) for (_, size), begin in sorted(pieces))


@functools.lru_cache(maxsize=4096)
def join(spans_of: tuple[Spans, ...]) -> Joined:
    """The spans of several ranks as one tensor, its positions in ascending order."""
    sizes = tuple(sum(size for _, size in spans) for spans in spans_of)
    pieces, local = [], 0
    for start, size in itertools.chain(*spans_of):
        if size:
            pieces.append((start, size, local))
        local += size
    ascending = sorted(pieces)
    order = tuple((at, size) for _, size, at in ascending)
    spans = merge_neighbours(tuple((start, size) for start, size, _ in ascending))
    return Joined(spans, sizes, None if ascending == pieces else order)


def merge_neighbours(spans: Spans) -> Spans:
    """The spans with those that continue each other as one."""
    merged: list[Span] = []
    for start, size in spans:
        if merged and sum(merged[-1]) == start:
            merged[-1] = merged[-1][0], merged[-1][1] + size
        else:
            merged.append((start, size))
    return tuple(merged)


@dataclass(frozen=True)
class Heads:
    """Which heads each of ``degree`` ranks has after the exchange.

    Heads of queries are divided evenly. Where there are fewer heads of keys than ranks, or they do not divide evenly,
    every rank gets those that its queries need: some go to several ranks.
    """

    queries: int
    keys: int
    degree: int

    def __post_init__(self) -> None:
        if self.queries % self.degree:
            raise coded(
                ValueError,
                "HP801",
                f"context parallel: {self.queries} heads of queries cannot be divided among the {self.degree} ranks "
                "that exchange heads; choose a degree that divides the heads, or one of 1, for which any number of "
                "heads will do",
            )
        if not self.keys or self.queries % self.keys:
            raise coded(
                ValueError,
                "HP801",
                f"context parallel: {self.keys} heads of keys cannot serve {self.queries} heads of queries evenly",
            )

    @property
    def query_sizes(self) -> tuple[int, ...]:
        return (self.queries // self.degree,) * self.degree

    @property
    def key_spans(self) -> Spans:
        """The heads of keys that each rank needs."""
        share, group = self.queries // self.degree, self.queries // self.keys
        spans = []
        for rank in range(self.degree):
            first, last = rank * share // group, ((rank + 1) * share - 1) // group
            spans.append((first, last - first + 1))
        return tuple(spans)

    @property
    def key_sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.key_spans)

    def partners(self, rank: int) -> tuple[int, ...] | None:
        """For each of a rank's heads of queries its head of keys; None if equally many heads share each."""
        share, group = self.queries // self.degree, self.queries // self.keys
        first, count = self.key_spans[rank]
        partners = [(rank * share + head) // group - first for head in range(share)]
        even = [head * count // share for head in range(share)]
        return None if share % count == 0 and partners == even else tuple(partners)


def check_heads(parts: Iterable[Iterable[Spans]], degree: int) -> None:
    """Raises a ValueError if ranks with any of these heads of queries and keys cannot exchange them."""
    for spans_of_both in parts:
        heads, of_keys = (sum(size for _, size in spans) for spans in spans_of_both)
        if heads:
            Heads(heads, of_keys, degree)
