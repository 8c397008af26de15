# SPDX-License-Identifier: Apache-2.0
"""Schedules as text and CSV: they come back as they were, and bad files are told row by row."""

import pytest
from hypothesis import given, settings
from schedule_cases import cases, schedules

from hyper_parallel.core.pipeline_parallel.action import CustomStepType, MetaStep
from hyper_parallel.core.pipeline_parallel.messages import (
    add_messages,
    add_parameter_actions,
)
from hyper_parallel.core.pipeline_parallel.picture import draw_grid, draw_svg
from hyper_parallel.core.pipeline_parallel.schedules import build_schedule
from hyper_parallel.core.pipeline_parallel.simulate import Times, simulate
from hyper_parallel.core.pipeline_parallel.text import (
    collect_orders,
    format_csv,
    parse_csv,
    parse_text,
    read_csv,
)
from hyper_parallel.core.pipeline_parallel.validate import validate
from hyper_parallel.platform.error_codes import code_of


@settings(max_examples=40, deadline=None)
@given(schedules(most_ranks=5, most_micros=8))
def test_what_is_printed_is_what_runs(schedule):
    schedule = add_messages(schedule)
    for again in (
        parse_text(str(schedule), schedule.name, schedule.style),
        parse_csv(format_csv(schedule), schedule.name, schedule.style),
    ):
        assert again == schedule
    plain = parse_csv(
        format_csv(schedule, compute_only=True), schedule.name, schedule.style
    )
    assert add_messages(plain) == schedule


def test_placements_are_found():
    for name, p, m, v in cases((2, 4), (4, 8), (2,)):
        schedule = build_schedule(name, p, m, v)
        again = parse_csv(format_csv(schedule, compute_only=True), name)
        assert (again.style, again.orders) == (schedule.style, schedule.orders)
        assert (again.stages, again.micro_batches) == (schedule.stages, m)


def test_the_forms_of_a_file():
    schedule = build_schedule("GPipe", 2, 1)
    assert (
        format_csv(schedule) == "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    )
    assert format_csv(schedule, compute_only=True) == "0F0,0B0\n1F0,1B0\n"
    laid = add_parameter_actions(add_messages(schedule))
    assert format_csv(laid, compute_only=True) == "0F0,0B0\n1F0,1B0\n"
    assert parse_csv(format_csv(laid), "GPipe") == laid


def test_idle_slots_and_spaces_are_left_out():
    schedule = parse_csv("0F0,, 0B0,\n ,1F0,1B0,,\n\n", "GPipe")
    assert schedule == build_schedule("GPipe", 2, 1)
    assert parse_text("rank 0: 0F0  0B0\n\n1F0 1B0", "GPipe") == schedule


def test_pairs_and_skip_connections_come_back():
    schedule = add_messages(build_schedule("DualPipeV", 2, 4), [(0, 2), (1, 3)])
    again = parse_csv(format_csv(schedule), "DualPipeV")
    assert again == schedule
    assert again.skips == ((0, 2), (1, 3))
    validate(again)


def test_evaluation_comes_back():
    schedule = add_messages(build_schedule("1F1B", 3, 2).forward_only())
    again = parse_csv(format_csv(schedule), "1F1B")
    assert (again, again.has_backward) == (schedule, False)


def test_types_of_the_user_come_back():
    swap = CustomStepType("SWAP_OUT")
    schedule = parse_text("r0: 0F0 0SWAP_OUT0 0B0", custom=[swap])
    assert schedule.orders[0][1] == MetaStep(0, swap, 0)
    validate(schedule)
    assert parse_csv(format_csv(schedule), custom=[swap]) == schedule
    assert simulate(schedule).makespan == 3


def refusal(parse, *args):
    with pytest.raises(ValueError) as caught:
        parse(*args)
    return code_of(caught.value), str(caught.value)


def test_bad_cells_are_told_by_row_and_column(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0\n1F0,,1G0\n")
    code, text = refusal(read_csv, path)
    assert code == "HP475"
    assert text.startswith(
        "mine.csv: row 2, column 3: '1G0' is not an action; expected"
    )
    assert text.count("hyper-parallel explain") == 1
    code, text = refusal(parse_text, "r0: 0F0 nothing", "mine.txt")
    assert text.startswith("mine.txt: row 1, word 2: 'nothing' is not an action")


def test_bad_files_are_told():
    code, text = refusal(parse_text, "r0: 0F0 0B0\nr2: 1F0 1B0", "mine.txt")
    assert (code, "expected the line of rank 1, got that of rank 2" in text) == (
        "HP474",
        True,
    )
    assert refusal(parse_csv, ",,\n", "mine.csv")[0] == "HP477"
    assert refusal(parse_csv, "", "mine.csv")[0] == "HP477"
    assert refusal(collect_orders, {1: []}, "mine")[0] == "HP476"
    assert refusal(parse_csv, "0F0,0B0", "mine.csv", "zigzag")[0] == "HP468"


def test_a_foreign_computation_of_a_file_is_named():
    code, text = refusal(validate, parse_csv("0F0,0B0\n1F0,1B0,0F1,0B1", "mine.csv"))
    assert code == "HP464"
    assert "rank 1, index 2 (0F1): stage 0 belongs to rank 0" in text


# --- pictures


def lines(result, width):
    return [
        ["".join(cell.text for cell in row).rstrip() for row in block]
        for block in draw_grid(result, width)
    ]


def test_the_grid_has_a_cell_per_tick():
    result = simulate(build_schedule("1F1B", 2, 2))
    assert lines(result, 100) == [
        ["0F0 0F1 ·   ·   0B0─────·   0B1─────", "·   1F0 1B0─────1F1 1B1─────·   ·"]
    ]
    assert [len(block) for block in lines(result, 20)] == [2, 2]
    assert lines(result, 20)[0] == ["0F0 0F1 ·   ·   0B0─", "·   1F0 1B0─────1F1"]


def test_the_grid_follows_measured_times():
    result = simulate(build_schedule("ZBV", 4, 8), Times(1.0137, 1.2031, 0.8419, 0.01))
    (block,) = draw_grid(result, 10**6)
    assert len(block) == 4
    assert max(len(row) for row in block) <= 400
    assert {cell.kind for row in block for cell in row} == {"", "F", "I", "W"}


def test_the_svg_shows_every_computation():
    import xml.etree.ElementTree as ET

    result = simulate(build_schedule("DualPipeV", 2, 4))
    picture = ET.fromstring(draw_svg(result))
    boxes = list(picture.iter("{http://www.w3.org/2000/svg}rect"))
    assert len(boxes) == sum(len(order) for order in result.schedule.orders)
    titles = [t.text for t in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[0] == "DualPipeV"
    assert "0F0 0-0.5" in titles
