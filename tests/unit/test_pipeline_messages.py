# SPDX-License-Identifier: Apache-2.0
"""Sends, receives and parameter actions: where they are put, and that no order of them can hang."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from schedule_cases import cases, schedules

from hyper_parallel.core.pipeline_parallel.action import (
    MESSAGES,
    SENDS,
    MetaStep,
    MetaStepType,
    computations,
    message_of,
)
from hyper_parallel.core.pipeline_parallel.deadlock import find_deadlock
from hyper_parallel.core.pipeline_parallel.messages import (
    add_messages,
    add_parameter_actions,
)
from hyper_parallel.core.pipeline_parallel.schedules import build_schedule
from hyper_parallel.core.pipeline_parallel.validate import validate
from hyper_parallel.platform.error_codes import code_of


def per_pair(schedule):
    """(sending rank, receiving rank) -> the messages sent, and those received, in order."""
    sent, received = defaultdict(list), defaultdict(list)
    for order in schedule.orders:
        for step in order:
            if step.type in MESSAGES:
                message = message_of(step)
                queue = sent if step.type in SENDS else received
                queue[schedule.ends_of(message)].append(message)
    return sent, received


def test_a_small_schedule_with_messages():
    schedule = add_messages(build_schedule("1F1B", 2, 2))
    assert str(schedule).splitlines() == [
        "r0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "r1: 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


@settings(max_examples=25, deadline=None)
@given(schedules(most_ranks=6, most_micros=12))
def test_both_ends_have_the_same_order(schedule):
    lowered = add_messages(schedule)
    sent, received = per_pair(lowered)
    assert sent == received
    for rendezvous in (False, True):
        for blocking in (False, True):
            assert not find_deadlock(
                lowered, rendezvous=rendezvous, blocking_receives=blocking
            )
    for before, after in zip(schedule.orders, lowered.orders, strict=True):
        assert tuple(step for step in after if step.type not in MESSAGES) == before
    assert add_messages(lowered) == lowered


def test_stages_of_one_rank_need_no_messages():
    assert not add_messages(build_schedule("ZBV", 1, 3)).has_messages
    schedule = add_messages(build_schedule("ZBV", 2, 2))
    ends = {
        message_of(s) for order in schedule.orders for s in order if s.type in SENDS
    }
    assert {(e.source, e.target) for e in ends} == {(0, 1), (1, 0), (2, 3), (3, 2)}


def test_sends_follow_their_computation_and_receives_come_before():
    for name, p, m, v in cases((2, 3, 4), (1, 5), (2,)):
        schedule = add_messages(build_schedule(name, p, m, v))
        for order in schedule.orders:
            for index, step in enumerate(order):
                if step.type in SENDS:  # at once, but for other sends and receives
                    made = next(s for s in reversed(order[:index]) if computations(s))
                    stages = {part.stage_index for part in computations(made)}
                    assert step.stage_index in stages


@settings(max_examples=20, deadline=None)
@given(schedules(most_ranks=5, most_micros=8))
def test_skip_connections_have_messages_of_their_own(schedule):
    last = schedule.stages - 1
    if last < 2:
        return
    skips = [(0, last)] + ([(0, 2)] if last > 3 else [])
    lowered = add_messages(schedule, skips)
    plain = validate(schedule).messages
    crossing = [
        (source, target, micro)
        for source, target in skips
        for micro in range(schedule.micro_batches)
        if schedule.mapping.rank_of(source, micro)
        != schedule.mapping.rank_of(target, micro)
    ]
    assert validate(lowered).messages == plain + 2 * len(crossing)
    for source, target, micro in crossing:
        rank = schedule.mapping.rank_of(target, micro)
        receive = MetaStep.parse(f"{target}RECV_F{micro}<{source}")
        assert receive in lowered.orders[rank]


@pytest.mark.parametrize("skip", [(0, 1), (2, 0), (1, 1), (0, 4), (-1, 2)])
def test_bad_skip_connections_are_refused(skip):
    with pytest.raises(ValueError, match="skip connection") as caught:
        add_messages(build_schedule("1F1B", 4, 2), [skip])
    assert code_of(caught.value) == "HP469"


# --- parameters


def find(order, kind, stage):
    return [
        index
        for index, step in enumerate(order)
        if step.type is kind and step.stage_index == stage
    ]


def test_parameters_are_gathered_once_and_reduced_after_the_last_use():
    for name, p, m, v in cases((1, 2, 4), (1, 6), (1, 3)):
        schedule = add_messages(build_schedule(name, p, m, v))
        laid = add_parameter_actions(schedule)
        validate(laid)
        for rank, order in enumerate(laid.orders):
            for stage in {s for step in order for s in stages_of(step)}:
                assert stage in laid.mapping.stages_of(rank)
                uses = [i for i, step in enumerate(order) if stage in stages_of(step)]
                (gathered,) = find(order, MetaStepType.FSDP_UNSHARD, stage)
                (reduced,) = find(order, MetaStepType.FSDP_REDUCE_GRAD, stage)
                (freed,) = find(order, MetaStepType.FSDP_RESHARD, stage)
                assert gathered < min(uses) <= max(uses) < reduced < freed


def stages_of(step):
    return {part.stage_index for part in computations(step)}


def test_parameters_are_gathered_ahead():
    schedule = build_schedule("LoopedBFS", 2, 2, 3)
    for prefetch, expected in (
        (0, "0UNSHARD 0F0 0F1 2UNSHARD 2F0 2F1 4UNSHARD 4F0"),
        (1, "0UNSHARD 2UNSHARD 0F0 0F1 4UNSHARD 2F0 2F1 4F0"),
        (9, "0UNSHARD 2UNSHARD 4UNSHARD 0F0 0F1 2F0 2F1 4F0"),
    ):
        order = add_parameter_actions(schedule, prefetch).orders[0]
        assert " ".join(map(str, order)).startswith(expected)


def test_evaluation_reduces_no_gradients():
    schedule = add_messages(build_schedule("ZBV", 2, 3).forward_only())
    kinds = {step.type for o in add_parameter_actions(schedule).orders for step in o}
    assert MetaStepType.FSDP_RESHARD in kinds
    assert MetaStepType.FSDP_REDUCE_GRAD not in kinds
    assert MetaStepType.BWD_SEND not in kinds
