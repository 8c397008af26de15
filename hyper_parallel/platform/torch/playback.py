# SPDX-License-Identifier: Apache-2.0
"""In what order a tape is played, so that hardly more than one parameter is held at a time.

Steps that draw keep their order: the generator is one. Everything else waits until it is needed, and what is wanted is
finished as soon as its last number has been drawn. So a parameter that is scaled at the end of a long constructor is
done before the next one is begun; one that is drawn in several goes, with others between, is held that long.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple, Protocol


class Step(Protocol):
    """What the order depends on: the storages that a step touches, and whether it is about random numbers."""

    @property
    def reads(self) -> frozenset[int]: ...

    @property
    def writes(self) -> frozenset[int]: ...

    @property
    def fresh(self) -> frozenset[int]:
        """Of those that it writes, the ones of which nothing older remains."""

    @property
    def draws(self) -> bool: ...


class Move(NamedTuple):
    """A step of the tape, the wanted storages that it completes and the storages that nobody touches after it."""

    step: int
    done: frozenset[int]
    dropped: frozenset[int]


def ordered(steps: Sequence[Step], wanted: Set[int]) -> Iterator[Move]:
    """All steps that draw and those that the wanted storages need, in the order in which they should be run."""
    needed = _needed(steps, wanted)
    before = _dependencies(steps, needed)
    last_draw = _find_last_draws(steps, needed, before)
    finals = {number: i for i in needed for number in steps[i].writes & wanted}
    targets = {*finals.values(), *(i for i in needed if steps[i].draws)}
    order: dict[int, None] = {}
    for target in sorted(targets, key=lambda i: (last_draw[i], i)):
        order.update(dict.fromkeys(sorted(_closure(target, before, order))))
    lives = _lives(steps, needed)
    touches = Counter(life for i in needed for life in lives[i])
    for i in order:
        touches.subtract(lives[i])
        dropped = frozenset(
            number for number, life in lives[i] if not touches[number, life]
        )
        yield Move(
            i,
            frozenset(
                number for number in steps[i].writes & wanted if finals[number] == i
            ),
            dropped,
        )


def _needed(steps: Sequence[Step], wanted: Set[int]) -> list[int]:
    live, found = set(wanted), []
    for i in reversed(range(len(steps))):
        step = steps[i]
        if step.draws or not step.writes.isdisjoint(live):
            found.append(i)
            live = (live - step.fresh) | step.reads
    return found[::-1]


def _dependencies(steps: Sequence[Step], needed: Sequence[int]) -> dict[int, set[int]]:
    """For each step those that must come before it: who wrote what it touches, and who read what it writes."""
    before: dict[int, set[int]] = {}
    touching: dict[int, set[int]] = defaultdict(
        set
    )  # the last writer and those who have read since
    writer: dict[int, int] = {}
    for i in needed:
        reads, writes = steps[i].reads, steps[i].writes
        before[i] = {writer[number] for number in reads if number in writer}
        for number in writes:
            before[i] |= touching[number]
            touching[number], writer[number] = {i}, i
        for number in reads - writes:
            touching[number].add(i)
    return before


def _find_last_draws(
    steps: Sequence[Step], needed: Sequence[int], before: dict[int, set[int]]
) -> dict[int, int]:
    """For each step the last one that draws, among it and all that must come before it."""
    last_draw: dict[int, int] = {}
    for i in needed:
        earlier = (last_draw[j] for j in before[i])
        last_draw[i] = i if steps[i].draws else max(earlier, default=-1)
    return last_draw


def _closure(
    target: int, before: dict[int, set[int]], done: dict[int, None]
) -> set[int]:
    found, todo = set(), [target]
    while todo:
        i = todo.pop()
        if i not in found and i not in done:
            found.add(i)
            todo += before[i]
    return found


def _lives(
    steps: Sequence[Step], needed: Sequence[int]
) -> dict[int, list[tuple[int, int]]]:
    """For each step the (storage, life) that it touches; a life begins where nothing older remains."""
    life: Counter[int] = Counter()
    found = {}
    for i in needed:
        life.update(steps[i].fresh)
        found[i] = [
            (number, life[number]) for number in steps[i].reads | steps[i].writes
        ]
    return found
