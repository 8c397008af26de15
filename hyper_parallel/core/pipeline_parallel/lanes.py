# SPDX-License-Identifier: Apache-2.0
"""Schedules in which a rank runs two stages of opposite directions: ZBV, DualPipeV and DualPipe.

    rank 0 of 2, 4 micro batches:   down = stage 0, up = stage 3
    zbv: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 ...

In the lane that leads *down* a micro batch moves to later ranks, in the lane *up* to earlier ones.
Each phase yields a fixed number of actions, laid out for a full pipeline; with fewer micro batches
those of absent ones are dropped, which leaves every other action in its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from hyper_parallel.core.pipeline_parallel.action import (
    MetaStep,
    backward,
    backward_input,
    backward_weight,
    forward,
    overlap,
)

Steps = Iterator[MetaStep | None]


class _Lane:
    """A rank's work on one stage: every call gives the next micro batch's action of a kind.

    The actions of micro batches that are not there are None. Parts of backwards for parameters
    wait in a queue, which two lanes may share.
    """

    def __init__(
        self,
        stage: int,
        micros: range,
        weights: deque[MetaStep | None] | None = None,
    ) -> None:
        self._stage, self._micros = stage, micros
        self._weights = deque() if weights is None else weights
        self._forwards = self._backwards = 0

    def forward(self) -> MetaStep | None:
        self._forwards += 1
        return self._act(forward, self._forwards - 1)

    def backward(self) -> MetaStep | None:
        self._backwards += 1
        return self._act(backward, self._backwards - 1)

    def backward_input(self) -> MetaStep | None:
        self._weights.append(self._act(backward_weight, self._backwards))
        self._backwards += 1
        return self._act(backward_input, self._backwards - 1)

    def backward_weight(self) -> MetaStep | None:
        """The oldest that waits."""
        return self._weights.popleft()

    @property
    def waiting(self) -> int:
        return len(self._weights)

    def _act(
        self, make: Callable[[int, int], MetaStep], number: int
    ) -> MetaStep | None:
        if number >= len(self._micros):
            return None
        return make(self._stage, self._micros[number])


def _drop_absent(steps: Steps) -> Iterator[MetaStep]:
    return (step for step in steps if step is not None)


# --- ZBV


def zbv(
    rank: int,
    ranks: int,
    micro_batches: int,
    chunks: int,  # noqa: ARG001 - as all generators
) -> Iterator[MetaStep]:
    """Zero bubble on a V: with equal times no rank waits between its first and last action."""
    micros = range(micro_batches)
    down, up = _Lane(rank, micros), _Lane(2 * ranks - 1 - rank, micros)
    count = max(micro_batches, 2 * ranks - 1)
    return _drop_absent(_zbv(rank, ranks, count, down, up))


def _zbv(rank: int, ranks: int, count: int, down: _Lane, up: _Lane) -> Steps:
    behind = ranks - rank
    yield from _zbv_warmup(rank, behind, down, up)
    for number in range(count - ranks):
        if number < count - (ranks + behind - 1):
            yield down.forward()
        yield from (down.backward_input(), down.backward_weight())
        yield from (up.forward(), up.backward_input(), up.backward_weight())
    for _ in range(rank):
        yield from (down.backward_input(), up.backward_input())
    for _ in range(behind):
        yield from (down.backward_input(), down.backward_weight())
    for lane in (up, down):
        for _ in range(lane.waiting):
            yield lane.backward_weight()


def _zbv_warmup(rank: int, behind: int, down: _Lane, up: _Lane) -> Steps:
    for _ in range(2 * behind - 1):
        yield down.forward()
    for _ in range(rank):
        yield from (up.forward(), down.forward())
    for _ in range(behind):
        yield from (up.forward(), up.backward_input(), up.backward_weight())


# --- DualPipe, and its half that is a V


def dualpipev(
    rank: int,
    ranks: int,
    micro_batches: int,
    chunks: int,  # noqa: ARG001 - as all generators
) -> Iterator[MetaStep]:
    """A forward of one lane runs together with a backward of the other."""
    micros = range(micro_batches)
    weights: deque[MetaStep | None] = deque()
    down = _Lane(rank, micros, weights)
    up = _Lane(2 * ranks - 1 - rank, micros, weights)
    count = max(micro_batches, 2 * ranks)
    return _drop_absent(_dualpipe(rank, ranks, count, down, up))


def dualpipe(
    rank: int,
    ranks: int,
    micro_batches: int,
    chunks: int,  # noqa: ARG001 - as all generators
) -> Iterator[MetaStep]:
    """Two copies of the model in opposite directions; each end feeds half of the micro batches."""
    half = micro_batches // 2
    lanes = [(rank, range(half)), (ranks - 1 - rank, range(half, micro_batches))]
    depth = min(rank, ranks - 1 - rank)  # ranks between this one and the nearer end
    if depth != rank:
        lanes.reverse()
    weights: deque[MetaStep | None] = deque()
    down, up = (_Lane(stage, micros, weights) for stage, micros in lanes)
    count = max(half, ranks)
    return _drop_absent(_dualpipe(depth, ranks // 2, count, down, up))


def _dualpipe(rank: int, ranks: int, count: int, down: _Lane, up: _Lane) -> Steps:
    """The phases of a rank of a V over ``ranks`` ranks, with ``count`` micro batches per lane."""
    behind = ranks - rank - 1
    for _ in range(2 * behind):
        yield down.forward()
    for _ in range(rank + 1):
        yield from (down.forward(), up.forward())
    for _ in range(behind):
        yield from (up.backward_input(), up.backward_weight(), up.forward())
    for number in range(count - 2 * ranks + rank + 1):
        if number == 0 and behind == 0:  # apart, which makes the bubble smaller
            yield from (down.forward(), up.backward())
        else:
            yield _pair(down.forward(), up.backward())
        yield _pair(up.forward(), down.backward())
    for _ in range(behind):
        yield up.backward()
        yield _pair(up.forward(), down.backward())
    yield from _dualpipe_cooldown(rank, behind, down, up)


def _dualpipe_cooldown(rank: int, behind: int, down: _Lane, up: _Lane) -> Steps:
    """Backwards in turn, of which the second half are split, then what waits for its turn."""
    for number in range(2 * (rank + 1)):
        lane = down if number % 2 else up
        yield lane.backward() if number <= rank else lane.backward_input()
    for _ in range(behind):
        yield from (down.backward_weight(), down.backward_input())
    for _ in range(rank + 1):
        yield down.backward_weight()


def _pair(first: MetaStep | None, second: MetaStep | None) -> MetaStep | None:
    """Both together, or the one that is there."""
    if first is None or second is None:
        return first or second
    return overlap(first, second)
