# SPDX-License-Identifier: Apache-2.0
"""The checks under the names that programs of HyperParallel know, with the results that they expect."""

import logging

import pytest

from hyper_parallel.core.pipeline_parallel.action import MetaStep, MetaStepType
from hyper_parallel.core.pipeline_parallel.fronts import (
    add_send_recv,
    detect_cycle_in_graph,
    generate_operations,
    parse_and_validate,
    validate_pipeline_execution,
)
from hyper_parallel.core.pipeline_parallel.messages import add_messages
from hyper_parallel.core.pipeline_parallel.schedules import build_schedule
from hyper_parallel.core.pipeline_parallel.text import format_csv

SEND = MetaStep(0, MetaStepType.FWD_SEND, 0)
RECV = MetaStep(0, MetaStepType.FWD_RECV, 1)


def orders(name, ranks, micro_batches, *, messages=True):
    schedule = build_schedule(name, ranks, micro_batches)
    if messages:
        schedule = add_messages(schedule)
    return dict(enumerate(map(list, schedule.orders)))


@pytest.mark.parametrize(
    ("name", "chunks", "style"),
    [("GPipe", 1, "loop"), ("Interleaved1F1B", 2, "loop"), ("ZBV", 2, "v")],
)
def test_right_orders_pass(name, chunks, style):
    plain = orders(name, 4, 8, messages=False)
    plain[1] = [None, *plain[1], None]
    added = add_send_recv(plain, 4 * chunks, 4, style)
    assert added == orders(name, 4, 8)
    result = validate_pipeline_execution(added, chunks, style)
    assert (result["has_errors"], result["error_messages"]) == (False, [])
    assert (result["has_cycle"], result["cycle_path"], result["cycle_ranks"]) == (
        False,
        None,
        None,
    )
    assert parse_and_validate(result["formatted_operations"]) == []
    assert parse_and_validate(added) == []


def test_other_placements_are_refused():
    with pytest.raises(ValueError, match="must be one of loop, v"):
        add_send_recv(orders("GPipe", 2, 2, messages=False), 2, 2, "zigzag")


def test_messages_have_one_name_at_both_ends():
    assert generate_operations({0: [SEND], 1: [RECV]}, chunk_num=1) == {
        "0": ["Send_Receive_(0)->(1)_micro0_1th"],
        "1": ["Send_Receive_(0)->(1)_micro0_1th"],
    }
    named = generate_operations(orders("Interleaved1F1B", 2, 2), 2)
    assert "Send_Receive_(0)->(1)_micro1_2th" in named["0"]
    assert set(named["0"]) == set(named["1"])
    assert generate_operations({0: [None], 1: []}, 1) == {}


def test_wrong_orders_are_returned_and_logged(caplog):
    wrong = orders("1F1B", 2, 2)
    wrong[0].remove(SEND)
    with caplog.at_level(logging.ERROR):
        result = validate_pipeline_execution(wrong, 1)
    assert result["has_errors"]
    (problem,) = [m for m in result["error_messages"] if "unmatched" in m]
    assert problem == "rank 1, index 0 (1RECV_F0) is unmatched: rank 0 lacks 0SEND_F0"
    assert problem in caplog.messages
    assert not result["has_cycle"]


def test_cycles_are_returned():
    crossed = {
        0: "0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2RECV_F1 2F1 2SEND_F0 2SEND_F1",
        1: "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3RECV_F1 3F1",
    }
    steps = {
        rank: list(map(MetaStep.parse, text.split())) for rank, text in crossed.items()
    }
    result = validate_pipeline_execution(steps, 2)
    assert result["has_cycle"]
    assert result["cycle_path"][0] == result["cycle_path"][-1]
    assert len(result["cycle_ranks"]) == len(result["cycle_path"]) - 1
    assert "if sends wait for their receives" in result["error_messages"][0]


def test_orders_that_cannot_be_read_are_returned():
    result = validate_pipeline_execution({0: [SEND], 1: [RECV]}, 1)
    assert result["error_messages"] == ["order_list: there is no computation"]
    result = validate_pipeline_execution({0: [SEND], 2: [RECV]}, 1)
    assert "expected an order for every rank" in result["error_messages"][0]


NAME = "Send_Receive_(1)->(2)_micro0_1th"


@pytest.mark.parametrize(
    ("data", "complete", "problem"),
    [
        ({"1": [NAME], "2": [NAME]}, True, None),
        ({"1": [NAME], "2": [NAME], "3": []}, True, None),
        ({"1": [NAME]}, True, "rank 1: Send_Receive_(1)->(2)_micro0_1th needs rank 2, which is missing"),
        ({"1": [NAME]}, False, None),
        ({"1": [NAME], "2": []}, False, "rank 1: Send_Receive_(1)->(2)_micro0_1th is missing on rank 2"),
        ({"1": "text"}, True, "the messages of rank 1 must be a list of strings"),
        ({"1": [1, 2]}, True, "the messages of rank 1 must be a list of strings"),
        ({"1": ["valid"]}, True, "rank 1: 'valid' does not name a message"),
        ([NAME], True, "expected a CSV, a text or a dict by rank, got list"),
        ("0F0,0B0\n1F0,1B0", True, None),
        ("r0: 0F0 0B0\nr1: 1F0 1B0", True, None),
        ("0F0,0B0\n1B0,1F0", True, "rank 1, index 0 (1B0) comes before 1F0 at index 1"),
        ("0F0,0X0", True, "row 1, column 2: '0X0' is not an action"),
        ({0: ["0F0", "0B0"], 1: ["1F0"]}, True, "rank 1 lacks 1B0"),
        ({0: ["0F0", "0B0"], 2: ["1F0"]}, True, "expected an order for every rank"),
    ],
)  # fmt: skip
def test_data_in_every_form(data, complete, problem):
    problems = parse_and_validate(data, complete)
    if problem is None:
        assert problems == []
    else:
        assert any(problem in one for one in problems), problems


def test_a_csv_of_ours_is_right():
    assert parse_and_validate(format_csv(build_schedule("DualPipe", 4, 8))) == []


@pytest.mark.parametrize(
    ("ranks", "path", "steps"),
    [
        ({}, None, None),
        ({"1": ["A"]}, None, None),
        ({"1": ["A", "B", "C"], "2": ["D", "E"]}, None, None),
        ({"1": list("ABCDEFGHI"), "2": list("ABCDEFGHI")}, None, None),
        ({"1": ["A", "A"]}, ["A", "A"], ["1 A -> A"]),
        ({"1": ["A", "B"], "2": ["B", "A"]}, ["A", "B", "A"], ["1 A -> B", "2 B -> A"]),
        ({"1": ["A", "B"], "2": ["B", "C"], "3": ["C", "B"]}, ["B", "C", "B"], ["2 B -> C", "3 C -> B"]),
        ({"1": ["A", "B", "C"], "2": ["D", "E", "D"]}, ["D", "E", "D"], ["2 D -> E", "2 E -> D"]),
    ],
)  # fmt: skip
def test_cycles_of_names(ranks, path, steps):
    assert detect_cycle_in_graph(ranks) == (path, steps)


def test_long_orders_are_searched_without_recursion():
    names = [str(number) for number in range(5000)]
    assert detect_cycle_in_graph({"0": names}) == (None, None)
    path, _ = detect_cycle_in_graph({"0": names, "1": [names[-1], names[0]]})
    assert len(path) == 5001
