# SPDX-License-Identifier: Apache-2.0
"""The exchange of heads for positions between neighbours (Ulysses), on plain shards outside the graph.

    exchange = Exchange(group, heads, queries, keys)
    query = exchange.start_query(query).finish()         (batch, heads of this rank, positions of the group, head_dim)
    query = exchange.return_query(query).finish()        and back

What goes one way in forward goes the other way in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.context_parallel import early
from hyper_parallel.core.context_parallel.division import Division, Heads, Joined
from hyper_parallel.core.dtensor.geometry import Span, Spans
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.pending import Pending, start_all_to_all

platform = get_platform()
HEADS, SEQUENCE = 1, 2  # dims


@dataclass(frozen=True)
class Exchange:
    """What each rank of a group sends: of queries (and outputs), and of keys (and values)."""

    group: Any
    index: int
    heads: Heads
    queries: Joined
    keys: Joined

    @classmethod
    def of(cls, division: Division, heads: Heads) -> Exchange:
        """The exchange between the neighbours of a division."""
        group = platform.create_group(list(division.inner))
        keys = division.joined_keys(division.outer_index)
        queries = division.joined_queries()
        return cls(group, division.inner_index, heads, queries, keys)

    def start_query(self, query: Any) -> Pending:
        """Every position of this rank's heads."""
        started = early.take(query, self.heads.degree)
        if started is not None:
            return _ordered(started, self.queries)
        return self._start(query, self.queries, self.heads.query_sizes)

    def return_query(self, query: Any) -> Pending:
        """The reverse: every head of this rank's positions."""
        return self._return(query, self.queries, self.heads.query_sizes)

    def start_key(self, key: Any) -> Pending:
        """Every position of the heads that this rank's queries need."""
        spans = self.heads.key_spans
        started = early.take(key, self.heads.degree)
        if started is not None:
            return _ordered(started, self.keys)
        pending = self._start(_repeat(key, spans), self.keys, self.heads.key_sizes)
        partners = self.heads.partners(self.index)
        if partners is None:
            return pending
        each = [(partner, 1) for partner in partners]
        return Pending(None, lambda: _pick(pending.finish(), HEADS, each))

    def return_key(self, grad: Any) -> Pending:
        """The gradient of this rank's keys, summed over all ranks that had them."""
        partners = self.heads.partners(self.index)
        if partners is not None:
            each = [(partner, 1) for partner in partners]
            grad = _sum(grad, each, self.heads.key_sizes[self.index])
        pending = self._return(grad, self.keys, self.heads.key_sizes)
        spans, count = self.heads.key_spans, self.heads.keys
        return Pending(None, lambda: _sum(pending.finish(), spans, count))

    def _start(self, x: Any, joined: Joined, sizes: Sequence[int]) -> Pending:
        pending = start_all_to_all(
            platform, x, SEQUENCE, HEADS, joined.sizes, sizes, self.group
        )
        return _ordered(pending, joined)

    def _return(self, x: Any, joined: Joined, sizes: Sequence[int]) -> Pending:
        x = _pick(x, SEQUENCE, joined.reverse)
        return start_all_to_all(
            platform, x, HEADS, SEQUENCE, sizes, joined.sizes, self.group
        )


def _ordered(pending: Pending, joined: Joined) -> Pending:
    """The positions of several ranks in ascending order."""
    return Pending(None, lambda: _pick(pending.finish(), SEQUENCE, joined.order))


def _pick(x: Any, dim: int, spans: Spans | Sequence[Span] | None) -> Any:
    """Parts of a tensor along a dim, one after the other; the tensor itself if there is nothing to pick."""
    if spans is None:
        return x
    before = (slice(None),) * dim
    pieces = [x[(*before, slice(start, start + size))] for start, size in spans]
    return platform.cat(pieces, dim) if pieces else x


def _repeat(x: Any, spans: Spans) -> Any:
    """The heads of each rank one after the other."""
    is_whole = sum(size for _, size in spans) == x.shape[HEADS]
    return x if is_whole else _pick(x, HEADS, spans)


def _sum(x: Any, spans: Spans | Sequence[Span], count: int) -> Any:
    """The reverse of picking these heads out of so many: what was picked several times is added up."""
    if sum(size for _, size in spans) == count:
        return x
    shape = list(x.shape)
    shape[HEADS] = count
    total = platform.zeros(tuple(shape), dtype=x.dtype, device=x.device)
    begin = 0
    for start, size in spans if 0 not in shape else ():
        where = (slice(None), slice(start, start + size))
        total[where] = total[where] + x[:, begin : begin + size]
        begin += size
    return total
