# SPDX-License-Identifier: Apache-2.0
"""When every action of a schedule starts and ends, in whole ticks: the one event loop.

    run_orders(build_schedule("1F1B", 2, 1), Costs({"F": (1, 1), "B": (2, 2)}))
    r0: 0F0 0-1, 0B0 4-6      r1: 1F0 1-2, 1B0 2-4

Orders without messages are run as if everything were handed over at once, or after the time of a
message. In orders with messages a send and a receive happen where they stand; a receive only posts
a buffer, and the computation that needs the tensor waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hyper_parallel.core.pipeline_parallel.action import (
    PAIRS,
    RECEIVES,
    SENDS,
    Message,
    MetaStep,
    computations,
    message_of,
)
from hyper_parallel.core.pipeline_parallel.deadlock import (
    describe_waits,
    find_deadlock,
)
from hyper_parallel.core.pipeline_parallel.orders import (
    Product,
    Schedule,
    message_to,
    product_of,
)
from hyper_parallel.platform.error_codes import coded


class Span(NamedTuple):
    """An action and the ticks at which it starts and ends."""

    start: int
    end: int
    step: MetaStep


@dataclass(frozen=True)
class Costs:
    """Ticks of every computation.

    ``compute`` has F, B, I and W for every stage, by the name of the type in texts; ``pair`` is
    the time of a forward and a backward that overlap (None: the sum of both). With ``rendezvous`` a
    send occupies its rank until the receive is posted and the message has arrived.
    """

    compute: Mapping[str, Sequence[int]]
    message: int = 0
    pair: int | None = None
    rendezvous: bool = False

    def of(self, step: MetaStep) -> int:
        """The ticks of one action; those that compute nothing take none."""
        if step.type in PAIRS and self.pair is not None:
            return self.pair
        ticks = 0
        for part in computations(step):
            assert part.stage_index is not None
            ticks += self.compute[part.type.value][part.stage_index]
        return ticks


def run_orders(schedule: Schedule, costs: Costs) -> tuple[tuple[Span, ...], ...]:
    """The spans of every rank's actions, in order."""
    run = _Run(schedule, costs)
    run.advance_all()
    return tuple(map(tuple, run.spans))


class _Run:
    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule, self._costs = schedule, costs
        self.spans: list[list[Span]] = [[] for _ in schedule.orders]
        self._clocks = [0] * len(schedule.orders)
        self._made: dict[Product, int] = {}
        self._posted: dict[Message, int] = {}
        self._arrived: dict[Message, int] = {}

    def advance_all(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.spans)):
                while self._advance(rank):
                    moved = True
        orders = self._schedule.orders
        if any(len(o) > len(s) for o, s in zip(orders, self.spans, strict=True)):
            self._raise_deadlock()

    def _raise_deadlock(self) -> None:
        waits = find_deadlock(
            self._schedule,
            rendezvous=self._costs.rendezvous,
            blocking_receives=False,
        )
        raise coded(
            ValueError,
            "HP471",
            f"{self._schedule.name} cannot be simulated: {describe_waits(waits)}",
        )

    def _advance(self, rank: int) -> bool:
        """Runs the next action of a rank, if what it needs is there."""
        spans, order = self.spans[rank], self._schedule.orders[rank]
        if len(spans) >= len(order):
            return False
        step = order[len(spans)]
        if step.type in RECEIVES:
            self._posted[message_of(step)] = self._clocks[rank]
            span: Span | None = Span(self._clocks[rank], self._clocks[rank], step)
        elif step.type in SENDS:
            span = self._send(rank, step)
        else:
            span = self._compute(rank, step)
        if span is None:
            return False
        self._clocks[rank] = span.end
        spans.append(span)
        return True

    def _send(self, rank: int, step: MetaStep) -> Span | None:
        message, now = message_of(step), self._clocks[rank]
        if not self._costs.rendezvous:
            self._arrived[message] = now + self._costs.message
            return Span(now, now, step)
        posted = self._posted.get(message)
        if posted is None:
            return None
        end = max(now, posted) + self._costs.message
        self._arrived[message] = end
        return Span(now, end, step)

    def _compute(self, rank: int, step: MetaStep) -> Span | None:
        start = self._clocks[rank]
        parts = computations(step)
        for time in self._times_of_needs(rank, parts):
            if time is None:
                return None
            start = max(start, time)
        end = start + self._costs.of(step)
        for part in parts:
            self._made[product_of(part)] = end
        return Span(start, end, step)

    def _times_of_needs(
        self, rank: int, parts: Sequence[MetaStep]
    ) -> Iterable[int | None]:
        """When each input of a computation is there; None: not yet known."""
        for part in parts:
            for need in self._schedule.needs(part):
                yield self._time_of(rank, part, need)

    def _time_of(self, rank: int, part: MetaStep, need: Product) -> int | None:
        source = self._schedule.mapping.rank_of(need.stage, need.micro)
        if source == rank:
            return self._made.get(need)
        if self._schedule.has_messages:
            return self._arrived.get(message_to(part, need))
        made = self._made.get(need)
        return None if made is None else made + self._costs.message
