# SPDX-License-Identifier: Apache-2.0
"""V-Half and V-Min: a V whose memory is chosen first, as a block of passes that repeats every six slots.

    V-Min, rank 0 of 4: F of stage 0 in slot 0, F of stage 7 in slot 7, its I in 8, I of stage 0 in 15;
    micro batch k comes 6 * k slots later. The two W go into the slots that are left.

A block fixes how long activations live, and so the memory. Repeated alone it would leave slots
empty at both ends, so passes of the warm-up and the cool-down are moved to earlier slots, as far
as their inputs and the memory of the block allow (Qi et al., arXiv 2405.15362).
"""

from __future__ import annotations

import bisect
import functools
import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hyper_parallel.core.pipeline_parallel.action import (
    MetaStep,
    backward_input,
    backward_weight,
    forward,
)

PERIOD = 6

# The kinds of passes, in the order in which a micro batch meets them on a rank. Even ones move to
# later ranks, odd ones to earlier ranks. W stands for those of both stages.
F_DOWN, F_UP, I_UP, I_DOWN, W = range(5)

Slots = list[list[int]]  # kind -> the slot of each micro batch, of one rank


def v_half(
    rank: int,
    ranks: int,
    micro_batches: int,
    chunks: int,  # noqa: ARG001 - as all generators
) -> Iterator[MetaStep]:
    """About half of the activations of 1F1B."""
    return iter(_schedule(_half_offsets, ranks, micro_batches)[rank])


def v_min(
    rank: int,
    ranks: int,
    micro_batches: int,
    chunks: int,  # noqa: ARG001 - as all generators
) -> Iterator[MetaStep]:
    """About a third of the activations of 1F1B; meant for equal times of F, I and W."""
    return iter(_schedule(_min_offsets, ranks, micro_batches)[rank])


def _half_offsets(rank: int, ranks: int) -> tuple[int, int, int, int]:
    extra = 3 if ranks % 2 == 0 else 0
    f_up = 3 * ranks - 2 - rank
    i_up = 3 * ranks + extra + 2 * rank - 1
    return 2 * rank, f_up, i_up, 6 * ranks + extra - 2 - rank


def _min_offsets(rank: int, ranks: int) -> tuple[int, int, int, int]:
    extra = 2 if ranks % 3 == 0 else 0
    f_up = 2 * ranks - 1 - rank
    i_up = 2 * ranks + extra + rank
    return rank, f_up, i_up, 4 * ranks + extra - 1 - rank


@functools.lru_cache(maxsize=64)
def _schedule(
    offsets: Callable[[int, int], tuple[int, int, int, int]],
    ranks: int,
    micro_batches: int,
) -> list[list[MetaStep]]:
    """The actions of all ranks; all generators of one schedule share them."""
    grid = [_repeat(offsets(rank, ranks), micro_batches) for rank in range(ranks)]
    for slots in grid:
        slots.append(_free_slots_after(slots))
    grid = _close_gaps(_move_earlier(grid))
    grid = _move_earlier([slots[:W] for slots in grid])
    return [_actions(rank, ranks, slots) for rank, slots in enumerate(grid)]


def _repeat(offsets: tuple[int, int, int, int], micro_batches: int) -> Slots:
    return [
        list(range(offset, offset + PERIOD * micro_batches, PERIOD))
        for offset in offsets
    ]


def _free_slots_after(slots: Slots) -> list[int]:
    """The slots of W: each takes the first free slot after an I that has none yet."""
    ready = sorted(slots[I_UP] + slots[I_DOWN])
    taken = set(slots[F_DOWN] + slots[F_UP] + ready)
    chosen: list[int] = []
    for slot in ready:
        first = max(slot, chosen[-1] if chosen else -1) + 1
        while first in taken:
            first += 1
        chosen.append(first)
    return chosen


# --- moving passes to earlier slots


@dataclass(frozen=True, order=True)
class _Pass:
    slot: int
    rank: int
    kind: int
    micro: int


def _all_passes(grid: list[Slots]) -> list[_Pass]:
    """All passes by slot, then rank."""
    return sorted(
        _Pass(slot, rank, kind, micro)
        for rank, slots in enumerate(grid)
        for kind, row in enumerate(slots)
        for micro, slot in enumerate(row)
    )


def _move_earlier(grid: list[Slots]) -> list[Slots]:
    """Moves passes into earlier free slots where inputs and the memory of the block allow.

    The repeating middle is left alone: it begins when the first micro batch is back on rank 0, and
    ends when the last one enters some rank. Where the W are not placed yet, they count as run in
    free slots, and only what follows the middle moves.
    """
    has_weights = len(grid[0]) > W
    limit = max(_peak(slots) for slots in grid)
    last = len(grid[0][F_DOWN]) - 1
    taken: list[set[int]] = [set() for _ in grid]
    phase = "begin"
    for one in _all_passes(grid):
        if phase == "begin" and (one.kind, one.rank) == (I_DOWN, 0):
            phase = "middle"
        slot = one.slot
        if phase == "middle":
            phase = "end" if (one.kind, one.micro) == (F_DOWN, last) else phase
        elif has_weights or phase == "end":
            slot = _earliest_slot(grid, one, taken[one.rank], limit)
        grid[one.rank][one.kind][one.micro] = slot
        taken[one.rank].add(slot)
    return grid


def _earliest_slot(grid: list[Slots], one: _Pass, taken: set[int], limit: int) -> int:
    slots = grid[one.rank]
    row = slots[one.kind]
    for slot in range(_ready_after(grid, one) + 1, one.slot):
        if slot in taken:
            continue
        row[one.micro] = slot
        fits = _peak(slots) <= limit
        row[one.micro] = one.slot
        if fits:
            return slot
    return one.slot


def _ready_after(grid: list[Slots], one: _Pass) -> int:
    """The slot in which the last of a pass's inputs is made."""
    slots, kind, micro = grid[one.rank], one.kind, one.micro
    made = [slots[kind][micro - 1]] if micro else [-1]
    if kind == W:
        return max(*made, sorted(slots[I_UP] + slots[I_DOWN])[micro])
    before = one.rank - 1 if kind in (F_DOWN, I_UP) else one.rank + 1
    if 0 <= before < len(grid):
        made.append(grid[before][kind][micro])
    if kind > F_DOWN:
        made.append(slots[kind - 1][micro])
    return max(made)


def _peak(slots: Slots) -> int:
    """The most activations, in chunks, that a rank holds."""
    forwards = slots[F_DOWN] + slots[F_UP]
    weights = slots[W] if len(slots) > W else _free_slots_after(slots)
    live = peak = 0
    changes = heapq.merge(
        sorted((slot, 1) for slot in forwards), ((slot, -1) for slot in weights)
    )
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak


# --- from slots to orders


def _close_gaps(grid: list[Slots]) -> list[Slots]:
    """The same order with every pass in the first slot that its inputs and its rank allow."""
    closed: list[Slots] = [[[0] * len(row) for row in slots] for slots in grid]
    latest = [-1] * len(grid)
    for one in _all_passes(grid):
        ready = -1 if one.kind == W else _ready_after(closed, one)
        latest[one.rank] = max(latest[one.rank], ready) + 1
        closed[one.rank][one.kind][one.micro] = latest[one.rank]
    return closed


def _actions(rank: int, ranks: int, slots: Slots) -> list[MetaStep]:
    """The order of a rank; in a free slot the W of the upper stage goes first."""
    down, up = rank, 2 * ranks - 1 - rank
    makers = [
        (F_DOWN, forward, down),
        (F_UP, forward, up),
        (I_UP, backward_input, up),
        (I_DOWN, backward_input, down),
    ]
    placed = [
        (slot, make(stage, micro))
        for kind, make, stage in makers
        for micro, slot in enumerate(slots[kind])
    ]
    placed += _weights(slots, down, up)
    return [step for _, step in sorted(placed, key=lambda pair: pair[0])]


def _weights(slots: Slots, down: int, up: int) -> Iterator[tuple[int, MetaStep]]:
    done_up = done_down = 0
    for slot in _free_slots_after(slots):
        if done_up < bisect.bisect_left(slots[I_UP], slot):
            yield slot, backward_weight(up, done_up)
            done_up += 1
        else:
            yield slot, backward_weight(down, done_down)
            done_down += 1
