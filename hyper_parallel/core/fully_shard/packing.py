# SPDX-License-Identifier: Apache-2.0
"""Where packed tensors are in the rows of a collective: views, made once for each memory that serves it.

Example::

    packing = Packing(plan)
    packing.pieces_in(row, rank)        that rank's packed shards, in the order of plan.pieces[rank]
    packing.targets_in(rows)            one row per rank: where the pieces of a whole tensor go
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from hyper_parallel.core.fully_shard.plan import Plan
from hyper_parallel.platform import get_platform

platform = get_platform()


class Targets(NamedTuple):
    """Where gradients go in rows: evenly divided ones all at once, others piece by piece; and the marks behind them."""

    even: list[tuple[int, Any]]
    pieces: list[tuple[int, tuple[slice, ...], Any]]
    marks: Any


class Packing:
    """The views of a plan's packed entries.

    Sums of this rank's shards come in one flat tensor: those that were sent directly, then its row.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        sizes = [math.prod(plan.shard_shape(number)) for number in plan.direct]
        self.starts = [sum(sizes[:position]) for position in range(len(sizes) + 1)]
        self._pieces: dict[int, tuple[Any, list[Any]]] = {}
        self._targets: dict[int, tuple[Any, Targets]] = {}

    def pieces_in(self, row: Any, rank: int) -> list[Any]:
        """The packed shards of a rank in its row."""
        known, views = self._pieces.get(id(row), (None, []))
        if known is not row:
            views = self._make_pieces(row, rank)
            if platform.releases_saved_tensors:  # else memory is another each time
                self._pieces[id(row)] = row, views
        return views

    @cached_property
    def sums(self) -> list[tuple[slice, tuple[int, ...]]]:
        """Where the sum of each entry is in the flat tensor, and its shape."""
        plan, row_start = self.plan, self.starts[-1]
        places = []
        for number in range(len(plan.entries)):
            shape = plan.shard_shape(number)
            if number in plan.direct:
                start = self.starts[plan.direct.index(number)]
            else:
                start = row_start + plan.offsets[number]
            places.append((slice(start, start + math.prod(shape)), shape))
        return places

    def targets_in(self, rows: Any) -> Targets:
        """The places of gradients in rows, one for each rank."""
        known, targets = self._targets.get(id(rows), (None, None))
        if known is not rows or targets is None:
            targets = self._make_targets(rows)
            if platform.releases_saved_tensors:
                self._targets[id(rows)] = rows, targets
        return targets

    def _make_pieces(self, row: Any, rank: int) -> list[Any]:
        pieces = self.plan.pieces[rank]
        return [row[one.start : one.stop].reshape(one.shape) for one in pieces]

    def _make_targets(self, rows: Any) -> Targets:
        plan = self.plan
        even = []
        for number in plan.even:
            start = plan.offsets[number]
            stop = start + plan.largest_shard(number)
            even.append((number, rows[:, start:stop]))
        pieces = [
            (
                one.number,
                one.slices,
                rows[rank, one.start : one.stop].reshape(one.shape),
            )
            for rank in range(plan.ranks)
            for one in plan.pieces[rank]
            if one.number not in plan.even
        ]
        return Targets(even, pieces, rows[:, plan.row :])


def pair_gradients(
    targets: Targets, gradients: Sequence[Any], ranks: int
) -> tuple[list[Any], list[Any]]:
    """(targets, sources) of the copies that pack gradients."""
    filled = [target for _, target in targets.even]
    sources = [gradients[number].reshape(ranks, -1) for number, _ in targets.even]
    filled += [target for _, _, target in targets.pieces]
    sources += [gradients[number][slices] for number, slices, _ in targets.pieces]
    return filled, sources
