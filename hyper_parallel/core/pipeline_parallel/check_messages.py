# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the sends and receives of a schedule, in words.

r0: 0F0 0SEND_F0 0B0      rank 0, index 1 (0SEND_F0) is unmatched: rank 1 lacks 1RECV_F0
r1: 1F0 1B0               rank 1 lacks 1SEND_B0, and rank 0 lacks 0RECV_B0
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from hyper_parallel.core.pipeline_parallel.action import (
    MESSAGES,
    SENDS,
    Message,
    MetaStep,
    computations,
    message_of,
)
from hyper_parallel.core.pipeline_parallel.deadlock import Place
from hyper_parallel.core.pipeline_parallel.orders import (
    Order,
    Product,
    Schedule,
    index_products,
)


def find_message_problems(schedule: Schedule) -> Iterator[str]:
    """Sends and receives that are foreign, doubled, missing, out of order, too early or too late."""
    if not schedule.has_messages:
        return
    expected = _expect_messages(schedule)
    ends: dict[MetaStep, Place] = {}
    for place, step in _message_ends(schedule):
        foreign = _describe_foreign(schedule, expected, place, step)
        if foreign:
            yield foreign
        elif step in ends:
            yield f"{place} is done already by {ends[step]}"
        ends.setdefault(step, place)
    yield from _find_missing(schedule, expected, ends)
    yield from _find_swapped(schedule)
    for rank, order in enumerate(schedule.orders):
        yield from _find_misplaced(rank, order)


def _expect_messages(schedule: Schedule) -> set[Message]:
    """What the computations hand over to other ranks."""
    expected: set[Message] = set()
    for order in schedule.orders:
        for step in order:
            for part in computations(step):
                expected.update(schedule.messages_after(part))
    return expected


def _message_ends(schedule: Schedule) -> Iterator[tuple[Place, MetaStep]]:
    for rank, order in enumerate(schedule.orders):
        for index, step in enumerate(order):
            if step.type in MESSAGES:
                yield Place(rank, index, step), step


def _describe_foreign(
    schedule: Schedule, expected: set[Message], place: Place, step: MetaStep
) -> str | None:
    message = message_of(step)
    if message not in expected:
        return f"{place}: no computation hands this to another rank"
    source, target = schedule.ends_of(message)
    owner = source if step.type in SENDS else target
    if owner != place.rank:
        return f"{place}: stage {step.stage_index} belongs to rank {owner}"
    return None


def _find_missing(
    schedule: Schedule, expected: Iterable[Message], ends: dict[MetaStep, Place]
) -> Iterator[str]:
    for message in sorted(expected):
        source, target = schedule.ends_of(message)
        lacks_send = f"rank {source} lacks {message.send()}"
        lacks_receive = f"rank {target} lacks {message.receive()}"
        send, receive = ends.get(message.send()), ends.get(message.receive())
        if send is None and receive is None:
            yield f"{lacks_send}, and {lacks_receive}"
        elif send is None:
            yield f"{receive} is unmatched: {lacks_send}"
        elif receive is None:
            yield f"{send} is unmatched: {lacks_receive}"


def _find_swapped(schedule: Schedule) -> Iterator[str]:
    """Pairs of ranks of which one sends in another order than the other receives."""
    sends: dict[tuple[int, int], list[tuple[Place, Message]]] = defaultdict(list)
    receives: dict[tuple[int, int], list[tuple[Place, Message]]] = defaultdict(list)
    for place, step in _message_ends(schedule):
        message = message_of(step)
        queues = sends if step.type in SENDS else receives
        queues[schedule.ends_of(message)].append((place, message))
    for ranks, sent in sends.items():
        for send, receive in zip(sent, receives[ranks], strict=False):
            if send[1] != receive[1]:
                yield f"{receive[0]} would receive what {send[0]} sends"
                break


def _find_misplaced(rank: int, order: Order) -> Iterator[str]:
    """Sends before their computation, and receives after the computation that needs them."""
    made = index_products(order)
    for index, step in enumerate(order):
        if step.type not in MESSAGES:
            continue
        is_send = step.type in SENDS
        at, computation = made.get(_own_product(step), (index, step))
        place = Place(rank, index, step)
        if is_send and at > index:
            yield f"{place} comes before {computation} at index {at}"
        if not is_send and at < index:
            yield f"{place} comes after {computation} at index {at}"


def _own_product(step: MetaStep) -> Product:
    """What the computation makes whose result a send sends, or that needs what a receive brings."""
    message = message_of(step)
    stage = message.source if step.type in SENDS else message.target
    return Product("F" if message.is_forward else "B", stage, message.micro)
