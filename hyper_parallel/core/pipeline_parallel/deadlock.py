# SPDX-License-Identifier: Apache-2.0
"""Finds out whether the ranks of a schedule can wait for each other for ever.

    r0: 0F0 0RECV_B0 0SEND_F0 0B0       rank 0, index 1 (0RECV_B0) waits for rank 1, index 3
    r1: 1RECV_F0 1F0 1B0 1SEND_B0       (1SEND_B0); rank 1, index 0 (1RECV_F0) waits for rank 0,
                                        index 2 (0SEND_F0)

A buffered send never waits; a rendezvous send waits until its receive is reached. A blocking receive
waits for its send; any other only posts a buffer, and the computation that needs the tensor waits.
Rendezvous sends with blocking receives are the strictest case: what passes there passes everywhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

from hyper_parallel.core.pipeline_parallel.action import (
    RECEIVES,
    SENDS,
    Message,
    MetaStep,
    computations,
    message_of,
)
from hyper_parallel.core.pipeline_parallel.orders import (
    Product,
    Schedule,
    message_to,
    product_of,
)


class Place(NamedTuple):
    """An action in the order of a rank."""

    rank: int
    position: int
    action: MetaStep

    def __str__(self) -> str:
        return f"rank {self.rank}, index {self.position} ({self.action})"


class Wait(NamedTuple):
    """An action that cannot start before another one; None: one that no rank runs."""

    place: Place
    awaited: Place | None

    def __str__(self) -> str:
        awaited = self.awaited or "an action that no rank runs"
        return f"{self.place} waits for {awaited}"


def find_deadlock(
    schedule: Schedule, *, rendezvous: bool = True, blocking_receives: bool = True
) -> tuple[Wait, ...]:
    """The cycle of waiting ranks that a run ends in; empty if all ranks finish."""
    walk = _Walk(schedule, rendezvous, blocking_receives)
    walk.advance_all()
    return walk.find_cycle()


def describe_waits(waits: Iterable[Wait]) -> str:
    """The waits in words."""
    return "; ".join(map(str, waits))


class _Walk:
    """Runs the orders of all ranks without times, each as far as it can go."""

    def __init__(
        self,
        schedule: Schedule,
        rendezvous: bool,
        blocking_receives: bool,
    ) -> None:
        self._schedule, self._rendezvous = schedule, rendezvous
        self._blocking_receives = blocking_receives
        self._orders = schedule.orders
        self._heads = [0] * len(schedule.orders)
        self._made: dict[Product, Place] = {}
        self._sends: dict[Message, Place] = {}
        self._receives: dict[Message, Place] = {}
        self._done: set[Hashable] = set()
        for rank, order in enumerate(schedule.orders):
            for index, step in enumerate(order):
                self._locate(step, Place(rank, index, step))

    def _locate(self, step: MetaStep, place: Place) -> None:
        if step.type in SENDS:
            self._sends[message_of(step)] = place
        elif step.type in RECEIVES:
            self._receives[message_of(step)] = place
        for part in computations(step):
            self._made[product_of(part)] = place

    def advance_all(self) -> None:
        """Runs until every rank has finished or waits."""
        moved = True
        while moved:
            moved = False
            for rank in range(len(self._orders)):
                while self._advance(rank):
                    moved = True

    def _advance(self, rank: int) -> bool:
        """Runs the next action of a rank, if it can."""
        if self._heads[rank] >= len(self._orders[rank]):
            return False
        step = self._orders[rank][self._heads[rank]]
        waits, other_end = self._check(rank, step)
        if waits:
            return False
        self._heads[rank] += 1
        if other_end is not None:
            self._heads[other_end.rank] += 1
        if step.type in RECEIVES:
            self._done.add(step)
        if step.type in SENDS or other_end is not None:
            self._done.add(message_of(step))
        self._done.update(map(product_of, computations(step)))
        return True

    def _check(self, rank: int, step: MetaStep) -> tuple[bool, Place | None]:
        """Whether the next action of a rank waits, and for which; else the one that runs with it."""
        if step.type in SENDS:
            return self._check_send(message_of(step))
        if step.type in RECEIVES:
            return self._check_receive(message_of(step))
        for awaited in self._find_missing(rank, step):
            return True, awaited
        return False, None

    def _check_send(self, message: Message) -> tuple[bool, Place | None]:
        if not self._rendezvous:
            return False, None
        receive = self._receives.get(message)
        if self._blocking_receives:
            return self._check_meeting(receive)
        waits = message.receive() not in self._done
        return waits, receive if waits else None

    def _check_receive(self, message: Message) -> tuple[bool, Place | None]:
        if not self._blocking_receives:
            return False, None
        send = self._sends.get(message)
        if self._rendezvous:
            return self._check_meeting(send)
        waits = message not in self._done
        return waits, send if waits else None

    def _check_meeting(self, other: Place | None) -> tuple[bool, Place | None]:
        """Both ends of a message run together, when both are next on their ranks."""
        return other is None or self._heads[other.rank] != other.position, other

    def _find_missing(self, rank: int, step: MetaStep) -> Iterator[Place | None]:
        """Where that is made or sent which a computation needs and does not have yet."""
        for part in computations(step):
            for need in self._schedule.needs(part):
                owner = self._schedule.mapping.rank_of(need.stage, need.micro)
                if owner == rank or not self._schedule.has_messages:
                    if need not in self._done:
                        yield self._made.get(need)
                    continue
                message = message_to(part, need)
                if message not in self._done:
                    yield self._sends.get(message)

    def find_cycle(self) -> tuple[Wait, ...]:
        """Follows the first rank that waits to the one it waits for, until one comes again."""
        stuck = [
            rank
            for rank, order in enumerate(self._orders)
            if self._heads[rank] < len(order)
        ]
        if not stuck:
            return ()
        path: dict[int, Wait] = {}
        rank: int | None = stuck[0]
        while rank is not None and rank not in path:
            wait = self._wait_of(rank)
            path[rank] = wait
            rank = None if wait.awaited is None else wait.awaited.rank
        waits = list(path.values())
        return tuple(waits if rank is None else waits[list(path).index(rank) :])

    def _wait_of(self, rank: int) -> Wait:
        index = self._heads[rank]
        step = self._orders[rank][index]
        _, awaited = self._check(rank, step)
        return Wait(Place(rank, index, step), awaited)
