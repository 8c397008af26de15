# SPDX-License-Identifier: Apache-2.0
"""The validator: faults of every kind, planted in right schedules, are refused and named."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import schedules

from hyper_parallel.core.pipeline_parallel.action import MESSAGES, MetaStep, message_of
from hyper_parallel.core.pipeline_parallel.deadlock import find_deadlock
from hyper_parallel.core.pipeline_parallel.messages import (
    add_messages,
    add_parameter_actions,
)
from hyper_parallel.core.pipeline_parallel.schedules import build_schedule
from hyper_parallel.core.pipeline_parallel.text import parse_text
from hyper_parallel.core.pipeline_parallel.validate import find_problems, validate
from hyper_parallel.platform.error_codes import code_of

parse = MetaStep.parse


def edited(schedule, rank, edit):
    """The schedule with the order of a rank changed by a function of a list."""
    orders = [list(order) for order in schedule.orders]
    edit(orders[rank])
    return schedule.with_orders(tuple(map(tuple, orders)))


def replace(index, text):
    def edit(order):
        order[index] = parse(text)

    return edit


def insert(index, text):
    return lambda order: order.insert(index, parse(text))


def remove(index):
    return lambda order: order.pop(index)


def swap(one, other):
    def edit(order):
        order[one], order[other] = order[other], order[one]

    return edit


def refusal(schedule, **options):
    with pytest.raises(ValueError) as caught:
        validate(schedule, **options)
    return code_of(caught.value), str(caught.value)


# 1F1B, 3 ranks, 3 micro batches:
# r0: 0F0 0F1 0F2 0B0 0B1 0B2      r1: 1F0 1F1 1B0 1F2 1B1 1B2      r2: 2F0 2B0 2F1 2B1 2F2 2B2
COMPUTATIONS = [
    (0, remove(4), "HP464", "rank 0 lacks 0B1"),
    (1, remove(1), "HP464", "rank 1 lacks 1F1"),
    (0, insert(5, "0F1"), "HP464", "rank 0, index 5 (0F1) is done already by rank 0, index 1 (0F1)"),
    (0, insert(6, "0W1"), "HP464", "rank 0, index 6 (0W1) is done already by rank 0, index 4 (0B1)"),
    (0, insert(6, "1F0"), "HP464", "rank 0, index 6 (1F0): stage 1 belongs to rank 1"),
    (1, insert(0, "7F0"), "HP464", "rank 1, index 0 (7F0): there are 3 stages"),
    (1, insert(0, "1F9"), "HP464", "rank 1, index 0 (1F9): there are 3 micro batches"),
    (2, replace(1, "2I0"), "HP464", "rank 2 lacks 2W0"),
    (2, replace(1, "2W0"), "HP464", "rank 2 lacks 2I0"),
    (1, swap(0, 2), "HP465", "rank 1, index 0 (1B0) comes before 1F0 at index 2"),
    (2, swap(2, 3), "HP465", "rank 2, index 2 (2B1) comes before 2F1 at index 3"),
    (1, insert(0, "(1F0;1B0)OVERLAP_F_B"), "HP464", "rank 1, index 1 (1F0) is done already by rank 1, index 0 ("),
    (0, swap(0, 2), None, ""),
    (0, swap(2, 3), None, ""),
    (0, swap(2, 4), "HP467", "waits for"),
    (2, swap(1, 5), "HP465", "rank 2, index 1 (2B2) comes before 2F2 at index 4"),
]  # fmt: skip


@pytest.mark.parametrize(("rank", "edit", "code", "text"), COMPUTATIONS)
def test_faults_of_computations(rank, edit, code, text):
    schedule = edited(build_schedule("1F1B", 3, 3), rank, edit)
    if code is None:  # another order that can run
        validate(schedule)
        assert validate(add_messages(schedule)).messages == 12
        return
    found, message = refusal(schedule)
    assert (found, text in message) == (code, True), message


def test_weights_come_after_inputs():
    schedule = build_schedule("ZB-H1", 2, 2)  # r1: 1F0 1I0 1F1 1I1 1W0 1W1
    code, text = refusal(edited(schedule, 1, swap(1, 4)))
    assert code == "HP465"
    assert "rank 1, index 1 (1W0) comes before 1I0 at index 4" in text


def test_local_hand_overs_have_an_order():
    schedule = build_schedule("ZBV", 1, 2)
    code, text = refusal(edited(schedule, 0, swap(0, 1)))
    assert (code, "rank 0, index 0 (1F0) comes before 0F0 at index 1" in text) == (
        "HP465",
        True,
    )


# r0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
# r1: 1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1
MESSAGE_FAULTS = [
    (0, remove(1), "HP466", "rank 1, index 0 (1RECV_F0) is unmatched: rank 0 lacks 0SEND_F0"),
    (1, remove(0), "HP466", "rank 0, index 1 (0SEND_F0) is unmatched: rank 1 lacks 1RECV_F0"),
    (0, insert(3, "0SEND_F0"), "HP466", "rank 0, index 3 (0SEND_F0) is done already by rank 0, index 1 (0SEND_F0)"),
    (1, insert(1, "1RECV_F0"), "HP466", "rank 1, index 1 (1RECV_F0) is done already by rank 1, index 0 (1RECV_F0)"),
    (1, insert(8, "1SEND_F0"), "HP466", "rank 1, index 8 (1SEND_F0): no computation hands this to another rank"),
    (1, insert(8, "0SEND_F0"), "HP466", "rank 1, index 8 (0SEND_F0): stage 0 belongs to rank 0"),
    (0, insert(0, "0RECV_B5"), "HP466", "rank 0, index 0 (0RECV_B5): no computation hands this to another rank"),
    (0, swap(0, 1), "HP466", "rank 0, index 0 (0SEND_F0) comes before 0F0 at index 1"),
    (0, swap(4, 5), "HP466", "rank 0, index 5 (0RECV_B0) comes after 0B0 at index 4"),
    (0, swap(4, 6), "HP466", "rank 0, index 4 (0RECV_B1) would receive what rank 1, index 4 (1SEND_B0) sends"),
    (1, swap(0, 1), "HP466", "rank 1, index 0 (1RECV_F1) would receive what rank 0, index 1 (0SEND_F0) sends"),
    (0, replace(1, "0SEND_F1"), "HP466", "rank 0, index 3 (0SEND_F1) is done already by rank 0, index 1 (0SEND_F1)"),
]  # fmt: skip


@pytest.mark.parametrize(("rank", "edit", "code", "text"), MESSAGE_FAULTS)
def test_faults_of_messages(rank, edit, code, text):
    schedule = edited(add_messages(build_schedule("1F1B", 2, 2)), rank, edit)
    found, message = refusal(schedule)
    assert found == code
    problems = find_problems(schedule)
    assert any(text in problem for problem in problems), problems
    assert message.startswith("1F1B: invalid messages: ")


def test_all_messages_missing_on_both_sides():
    schedule = add_messages(build_schedule("1F1B", 2, 1))
    schedule = edited(edited(schedule, 0, remove(1)), 1, remove(0))
    assert find_problems(schedule) == [
        "rank 0 lacks 0SEND_F0, and rank 1 lacks 1RECV_F0"
    ]


def test_a_cycle_of_computations_is_told():
    schedule = parse_text("r0: 0F0 0B0 0F1 0B1\nr1: 1F0 1F1 1B0 1B1", "mine")
    code, text = refusal(schedule)
    assert code == "HP467"
    assert text.startswith(
        "mine: deadlock whether or not sends wait: rank 0, index 1 (0B0) waits for rank 1, index 2 (1B0); "
        "rank 1, index 1 (1F1) waits for rank 0, index 2 (0F1) "
    )


# Both ranks send before they receive.
SENDS_FIRST = """
r0: 0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2RECV_F1 2F1 2SEND_F0 2SEND_F1
r1: 1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3RECV_F1 3F1
"""
# A receive stands earlier than its rank could wait for it.
EARLY = """
r0: 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0B1
r1: 1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1
"""


def test_rendezvous_sends_wait_for_receives():
    schedule = parse_text(SENDS_FIRST)
    for blocking in (False, True):
        assert not find_deadlock(schedule, rendezvous=False, blocking_receives=blocking)
        waits = find_deadlock(schedule, rendezvous=True, blocking_receives=blocking)
        assert list(map(str, waits)) == [
            "rank 0, index 3 (0SEND_F1) waits for rank 1, index 3 (1RECV_F1)",
            "rank 1, index 2 (1SEND_F0) waits for rank 0, index 4 (2RECV_F0)",
        ]
    code, text = refusal(schedule)
    assert (code, "deadlock if sends wait for their receives: rank 0" in text) == (
        "HP467",
        True,
    )


def test_receives_that_only_post_may_stand_early():
    schedule = parse_text(EARLY)
    code, text = refusal(schedule)
    assert code == "HP467"
    assert "rank 0, index 2 (0RECV_B0) waits for rank 1, index 5 (1SEND_B0)" in text
    assert validate(schedule, blocking_receives=False).messages == 4


def test_parameters_are_gathered_where_they_are_used():
    schedule = add_parameter_actions(build_schedule("1F1B", 1, 1))
    # r0: 0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD
    code, text = refusal(edited(schedule, 0, swap(0, 1)))
    assert code == "HP465"
    assert "rank 0, index 0 (0F0) is not between UNSHARD and RESHARD" in text
    _, text = refusal(edited(schedule, 0, swap(2, 4)))
    assert "rank 0, index 4 (0B0) is not between UNSHARD and RESHARD" in text
    _, text = refusal(edited(schedule, 0, swap(2, 3)))
    assert "rank 0, index 3 (0B0) comes after 0REDUCE_GRAD at index 2" in text


def test_limits_of_activations():
    schedule = build_schedule("Interleaved1F1B", 4, 8)
    assert validate(schedule, limit=5.5).peaks[0] == 5.5
    code, text = refusal(schedule, limit=5)
    assert (code, "rank 0 holds the activations of 5.5 micro batches" in text) == (
        "HP470",
        True,
    )


def test_evaluation_has_no_backward():
    schedule = build_schedule("GPipe", 2, 2).forward_only()
    assert validate(schedule).messages == 2
    code, text = refusal(edited(schedule, 1, insert(2, "1B0")))
    assert (
        code,
        "rank 1, index 2 (1B0): the schedule is for forwards only" in text,
    ) == (
        "HP464",
        True,
    )


def test_ranks_without_orders():
    schedule = build_schedule("GPipe", 3, 2)
    code, text = refusal(schedule.with_orders(schedule.orders[:2]))
    assert (code, "there are orders for 2 ranks, expected 3" in text) == ("HP464", True)


def test_many_problems_are_counted():
    schedule = build_schedule("GPipe", 2, 8)
    _, text = refusal(schedule.with_orders(((), ())))
    assert "rank 0 lacks 0F0; rank 0 lacks 0B0; rank 0 lacks 0F1; and 29 more" in text
    assert len(find_problems(schedule.with_orders(((), ())))) == 32


@settings(max_examples=60, deadline=None)
@given(schedules(most_ranks=4, most_micros=6), st.data())
def test_no_fault_passes(schedule, data):
    """An action less, an action twice, and both ends of a message in other orders are all found."""
    schedule = add_messages(schedule)
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    order = schedule.orders[rank]
    index = data.draw(st.integers(0, len(order) - 1))
    step = order[index]
    for edit in (remove(index), lambda o: o.insert(index, step)):
        problems = find_problems(edited(schedule, rank, edit))
        assert any(f"rank {rank}" in problem for problem in problems)
    messages = [i for i, s in enumerate(order) if s.type in MESSAGES]
    same = [i for i in messages if order[i].type is step.type and i != index]
    if step.type in MESSAGES and same:
        other = data.draw(st.sampled_from(same))
        changed = edited(schedule, rank, swap(index, other))
        ends = {i: schedule.ends_of(message_of(order[i])) for i in (index, other)}
        if ends[index] == ends[other]:
            assert find_problems(changed)
