# SPDX-License-Identifier: Apache-2.0
"""Adds sends and receives, and the actions of fully sharded parameters, to the computations of a schedule.

    add_messages(build_schedule("GPipe", ranks=2, micro_batches=2))
    r0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    r1: 1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1

The computations of all ranks are sorted by the time at which they end if all take equal times.
Then they are taken one after the other: each is appended to its rank's order, and each tensor that
it hands to another rank is appended to both orders at once, as a send and as a receive. So all
orders are parts of one sequence, in which both ends of a message are one event. That is why between
two ranks messages are sent and received in the same order, and no rank waits in a cycle, whether or
not sends wait for their receives. A receive comes before the computation that its rank runs
at the time of the send, so that with equal times no send waits.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from hyper_parallel.core.pipeline_parallel.action import (
    SENDS,
    MetaStep,
    MetaStepType,
    computations,
)
from hyper_parallel.core.pipeline_parallel.orders import Order, Schedule
from hyper_parallel.core.pipeline_parallel.timeline import Costs, run_orders


def add_messages(schedule: Schedule, skips: Sequence[tuple[int, int]] = ()) -> Schedule:
    """The schedule with sends and receives; unchanged if it has them.

    ``skips`` are pairs of stages of which the first hands a tensor directly to the second, in
    addition to the chain of all stages. Stages of one rank hand tensors over without a message.
    """
    if skips:
        schedule = dataclasses.replace(schedule, skips=tuple(skips))
    if schedule.has_messages:
        return schedule
    orders: list[list[MetaStep]] = [[] for _ in schedule.orders]
    for rank, step in _sort_by_end(schedule):
        orders[rank].append(step)
        _append_messages(schedule, orders, rank, step)
    return schedule.with_orders(tuple(map(tuple, orders)))


def _sort_by_end(schedule: Schedule) -> list[tuple[int, MetaStep]]:
    unit = (1,) * schedule.stages
    costs = Costs({"F": unit, "I": unit, "W": unit, "B": (2,) * schedule.stages})
    ends = sorted(
        (span.end, rank, index)
        for rank, spans in enumerate(run_orders(schedule, costs))
        for index, span in enumerate(spans)
    )
    return [(rank, schedule.orders[rank][index]) for _, rank, index in ends]


def _append_messages(
    schedule: Schedule, orders: list[list[MetaStep]], rank: int, step: MetaStep
) -> None:
    for part in computations(step):
        for message in schedule.messages_after(part):
            _, target = schedule.ends_of(message)
            orders[rank].append(message.send())
            orders[target].append(message.receive())


# --- fully sharded parameters


def add_parameter_actions(schedule: Schedule, prefetch: int = 1) -> Schedule:
    """The schedule with one UNSHARD, REDUCE_GRAD and RESHARD of every stage of every rank.

    Parameters stay gathered over all micro batches. A stage is gathered before the first use of
    the stage that is used ``prefetch`` stages earlier. Its gradients are reduced after its last
    backward, or the last part of it for parameters, and the sends that follow.
    """
    orders = tuple(_lay_around(order, prefetch) for order in schedule.orders)
    return schedule.with_orders(orders)


def _lay_around(order: Order, prefetch: int) -> Order:
    first, last = _find_uses(order)
    before: dict[int, list[MetaStep]] = defaultdict(list)
    after: dict[int, list[MetaStep]] = defaultdict(list)
    stages = list(first)
    for number, stage in enumerate(stages):
        is_early = number <= prefetch
        index = 0 if is_early else first[stages[number - prefetch]]
        before[index].append(MetaStep(None, MetaStepType.FSDP_UNSHARD, stage))
    for stage, (index, has_gradient) in last.items():
        if has_gradient:
            after[index].append(MetaStep(None, MetaStepType.FSDP_REDUCE_GRAD, stage))
        after[index].append(MetaStep(None, MetaStepType.FSDP_RESHARD, stage))
    laid: list[MetaStep] = []
    for index, step in enumerate(order):
        laid += [*before[index], step, *after[index]]
    return tuple(laid)


def _find_uses(
    order: Order,
) -> tuple[dict[int, int], dict[int, tuple[int, bool]]]:
    """Stage -> the index of its first use; and of its last, and whether that is a backward."""
    first: dict[int, int] = {}
    last: dict[int, tuple[int, bool]] = {}
    for index, step in enumerate(order):
        for part in computations(step):
            assert part.stage_index is not None
            first.setdefault(part.stage_index, index)
            last[part.stage_index] = (index, part.type is not MetaStepType.FWD)
    return first, {
        stage: (_skip_sends(order, index), is_backward)
        for stage, (index, is_backward) in last.items()
    }


def _skip_sends(order: Order, index: int) -> int:
    while index + 1 < len(order) and order[index + 1].type in SENDS:
        index += 1
    return index
