# SPDX-License-Identifier: Apache-2.0
"""The generators: sequences for 4 ranks and 8 micro batches, names, sizes, and every size in the validator."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from schedule_cases import cases, message_count, schedules

from hyper_parallel.core.pipeline_parallel.action import MetaStepType, flatten
from hyper_parallel.core.pipeline_parallel.messages import add_messages
from hyper_parallel.core.pipeline_parallel.schedules import (
    SCHEDULES,
    build_schedule,
    find_schedule,
    round_sizes,
)
from hyper_parallel.core.pipeline_parallel.validate import validate
from hyper_parallel.platform.error_codes import code_of

SEQUENCES = Path(__file__).with_name("pipeline_sequences.txt").read_text()


def sequence(name):
    """The lines of a schedule in the file of sequences."""
    part = SEQUENCES.split(f"[{name}]\n")[1].split("\n[")[0]
    return part.strip().splitlines()


@pytest.mark.parametrize("name", SCHEDULES)
def test_sequences_are_the_published_ones(name):
    schedule = build_schedule(name, 4, 8).unpaired()
    assert str(schedule).splitlines() == sequence(name)


def test_pairs_are_one_action():
    for name, count in {"DualPipeV": 25, "DualPipe": 12}.items():
        orders = build_schedule(name, 4, 8).orders
        pairs = [step for order in orders for step in order if step.sub_steps]
        assert all(step.type is MetaStepType.OVERLAP_F_B for step in pairs)
        assert len(pairs) == count


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("1f1b", "1F1B"), ("Schedule1F1B", "1F1B"), ("Interleaved1F1B", "Interleaved1F1B"),
        ("interleaved", "Interleaved1F1B"), ("interleaved-1f1b", "Interleaved1F1B"),
        ("LoopedBFS", "LoopedBFS"), ("ScheduleLoopedBFS", "LoopedBFS"), ("gpipe", "GPipe"),
        ("InterleavedZeroBubble", "InterleavedZeroBubble"), ("zb_h1", "ZB-H1"), ("ZB1P", "ZB-H1"),
        ("zb-h2", "ZB-H2"), ("ZBVZeroBubble", "ZBV"), ("zbv", "ZBV"), ("vhalf", "V-Half"),
        ("V-MIN", "V-Min"), ("dualpipe", "DualPipe"), ("DualPipeV", "DualPipeV"),
    ],
)  # fmt: skip
def test_schedules_have_names(name, known):
    assert find_schedule(name)[0] == known


def test_names_do_not_overlap():
    for name, kind in SCHEDULES.items():
        assert {find_schedule(n)[0] for n in (name, *kind.other_names)} == {name}


def refusal(*args):
    with pytest.raises(ValueError) as caught:
        build_schedule(*args)
    return code_of(caught.value), str(caught.value)


def test_what_a_schedule_cannot_take_is_refused():
    code, text = refusal("zero", 4, 8)
    assert (code, "GPipe, 1F1B" in text) == ("HP460", True)
    code, text = refusal("DualPipe", 4, 7)
    assert (code, "got 7; nearest: 6 or 8" in text) == ("HP461", True)
    code, text = refusal("DualPipe", 3, 8)
    assert (code, "ranks" in text, "nearest: 2 or 4" in text) == ("HP461", True, True)
    code, text = refusal("1F1B", 4, 0)
    assert (code, "nearest: 1 " in text) == ("HP461", True)
    assert refusal("1F1B", -2, 8)[0] == "HP461"
    assert refusal("ZBV", 4, 8, 3)[0] == "HP463"
    assert refusal("Interleaved1F1B", 4, 8, 0)[0] == "HP463"


def test_rounds_differ_by_at_most_one_micro_batch():
    assert round_sizes(4, 8) == [4, 4]
    assert round_sizes(4, 11) == [6, 5]
    assert round_sizes(4, 3) == [3]
    for ranks in range(1, 9):
        for micros in range(1, 40):
            sizes = round_sizes(ranks, micros)
            assert sum(sizes) == micros
            assert max(sizes) - min(sizes) <= 1


def test_table_says_what_orders_are():
    for name, kind in SCHEDULES.items():
        schedule = build_schedule(name, 4, 8)
        assert schedule.splits_backward == kind.splits_backward
        assert (schedule.name, schedule.style) == (name, kind.style)
        assert schedule.chunks == (kind.chunks or 2)


def test_one_chunk_of_interleaved_zero_bubble_is_zb_h1():
    for p, m in ((1, 1), (3, 2), (4, 8), (5, 7)):
        one = build_schedule("InterleavedZeroBubble", p, m, 1)
        assert one.orders == build_schedule("ZB-H1", p, m).orders


def test_fewer_micro_batches_leave_the_others_in_place():
    for name in ("ZBV", "DualPipeV"):
        full = build_schedule(name, 4, 8).unpaired()
        part = build_schedule(name, 4, 3).unpaired()
        for long, short in zip(full.orders, part.orders, strict=True):
            kept = {str(step) for step in short if step.type is MetaStepType.FWD}
            forwards = [str(s) for s in long if str(s) in kept]
            assert forwards == [str(s) for s in short if str(s) in kept]


# A thinned grid: all ranks to 4 with some micro batches to 9, and a few sizes up to 16, 64 and 4 chunks.
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size_passes_the_validator(name):
    small = [*cases((1, 2, 3), (1, 2, 3, 5, 8), (1, 2)), *cases((4,), (3, 9), (2, 3))]
    large = list(cases((5, 8), (4, 11), (3,))) + list(cases((6,), (13,), (4,)))
    edge = list(cases((16,), (10,), (2,))) + list(cases((2,), (64,), (2,)))
    for known, *sizes in (*small, *large, *edge):
        if known == name:
            schedule = add_messages(build_schedule(name, *sizes))
            assert validate(schedule).messages == message_count(schedule)


@settings(max_examples=25, deadline=None)
@given(schedules(most_ranks=10, most_micros=32))
def test_any_size_passes_the_validator(schedule):
    report = validate(schedule)
    assert report == validate(add_messages(schedule))
    assert report.messages == message_count(schedule)


def test_forward_only_schedules_run():
    for name, p, m, v in cases((1, 2, 4), (1, 4, 8), (2,)):
        schedule = build_schedule(name, p, m, v).forward_only()
        validate(add_messages(schedule))
        steps = [step for order in schedule.orders for step in flatten(order)]
        assert {step.type for step in steps} == {MetaStepType.FWD}
        assert len(steps) == schedule.stages * m
