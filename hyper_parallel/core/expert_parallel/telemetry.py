# SPDX-License-Identifier: Apache-2.0
"""What experts have to do, from Python: tokens by expert and rank, imbalance, what was dropped, what travelled.

with watch_experts() as load:
    model(x)
print(load.tokens_per_expert, load.imbalance, load.dropped, load.nbytes)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.platform import get_platform

platform = get_platform()


@dataclass(frozen=True)
class ExpertCall:
    """One call of experts with this rank's tokens.

    ``counts``: rows for each expert of all ranks, after ``dropped`` ones were left out. ``ranks``: among which experts
    are shared. ``nbytes``: of the rows that went to other ranks; as many bytes of results come back.
    """

    counts: tuple[int, ...]
    ranks: int
    dropped: int
    nbytes: int

    @property
    def rows_per_rank(self) -> tuple[int, ...]:
        """How many rows each rank that shares the experts got from this one."""
        size = len(self.counts) // self.ranks
        starts = range(0, len(self.counts), size)
        return tuple(sum(self.counts[start : start + size]) for start in starts)


@dataclass
class ExpertLoad:
    """The calls of experts within ``watch_experts``, without those of recomputation."""

    calls: list[ExpertCall] = field(default_factory=list)

    @property
    def tokens_per_expert(self) -> tuple[int, ...]:
        """This rank's rows for each expert, over all calls, which must have equally many experts."""
        return tuple(map(sum, zip(*(call.counts for call in self.calls), strict=True)))

    @property
    def tokens_per_rank(self) -> tuple[int, ...]:
        """This rank's rows for each rank, over all calls."""
        rows = (call.rows_per_rank for call in self.calls)
        return tuple(map(sum, zip(*rows, strict=True)))

    @property
    def imbalance(self) -> float:
        """The rows of the busiest expert over the average; 1 is balanced."""
        counts = self.tokens_per_expert
        return max(counts) * len(counts) / max(1, sum(counts)) if counts else 1.0

    @property
    def dropped(self) -> int:
        """How many rows exceeded the capacity of their expert."""
        return sum(call.dropped for call in self.calls)

    @property
    def nbytes(self) -> int:
        """The bytes of rows that went to other ranks in forward, and of results that came back."""
        return sum(2 * call.nbytes for call in self.calls)

    def sum_over(self, mesh: DeviceMesh) -> tuple[int, ...]:
        """The tokens per expert of all ranks of a mesh of one axis; a collective call."""
        own = platform.tensor(list(self.tokens_per_expert))
        total = platform.all_reduce(own.to(platform.device()), mesh.get_group())
        return tuple(total.tolist())


_WATCHING: list[ExpertLoad] = []


@contextmanager
def watch_experts() -> Iterator[ExpertLoad]:
    """Records every call of experts on any thread of this rank within the context."""
    load = ExpertLoad()
    _WATCHING.append(load)
    try:
        yield load
    finally:
        _WATCHING[:] = [one for one in _WATCHING if one is not load]


def note_call(rows: Any, counts: Any, dropped: int, mesh: DeviceMesh | None) -> None:
    """Tells those who watch of rows on their way to their experts."""
    if not _WATCHING or is_recomputing():
        return
    told = tuple(int(count) for count in counts.tolist())
    ranks = 1 if mesh is None else mesh.size()
    call = ExpertCall(told, ranks, dropped, 0)
    if mesh is not None:
        away = sum(told) - call.rows_per_rank[mesh.get_local_rank()]
        size = platform.get_element_size(rows) * int(rows.shape[1])
        call = ExpertCall(told, ranks, dropped, away * size)
    for load in _WATCHING:
        load.calls.append(call)


def is_recomputing() -> bool:
    """Whether a backward runs in this thread: a forward within it is a recomputation."""
    return platform.backward_number() != -1
