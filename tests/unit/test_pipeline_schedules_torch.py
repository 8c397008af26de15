# SPDX-License-Identifier: Apache-2.0
"""torch's own generators as an independent oracle of the orders, and its reader of our files."""

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as theirs

from hyper_parallel.core.pipeline_parallel.action import MESSAGES
from hyper_parallel.core.pipeline_parallel.messages import add_messages
from hyper_parallel.core.pipeline_parallel.schedules import (
    SCHEDULES,
    build_schedule,
    round_sizes,
)
from hyper_parallel.core.pipeline_parallel.text import collect_orders, format_csv
from hyper_parallel.core.pipeline_parallel.validate import validate

SIZES = [(p, m) for p in (1, 2, 3, 4, 6) for m in (1, 2, 3, 4, 6, 8, 9, 12, 16)]


def stub(kind, p, m, v):
    """An object of torch's class with what its generator reads, made without stages and groups."""
    made = object.__new__(kind)
    rounds = max(1, m // p)
    vars(made).update(
        pp_group_size=p,
        n_local_stages=v,
        num_stages=p * v,
        _num_stages=p * v,
        _n_microbatches=m,
        _stages=[SimpleNamespace(stage_index=i) for i in range(v)],
        number_of_rounds=rounds,
        microbatches_per_round=m // rounds,
    )
    return made


def torch_orders(kind, p, m, v):
    schedule = stub(kind, p, m, v)
    return [
        [str(step) for step in schedule._calculate_single_rank_operations(rank) if step]
        for rank in range(p)
    ]


def our_orders(name, p, m, v):
    return [list(map(str, order)) for order in build_schedule(name, p, m, v).orders]


def compare(name, kind, v, takes):
    compared = 0
    for p, m in SIZES:
        if takes(p, m):
            assert our_orders(name, p, m, v) == torch_orders(kind, p, m, v), (p, m)
            compared += 1
    assert compared > 10


def has_even_rounds(p, m):
    """What torch takes; ours has rounds of different sizes otherwise."""
    return len(set(round_sizes(p, m))) == 1


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS"]
)
def test_looped_orders_are_torchs(name, v):
    takes = (lambda p, m: True) if name == "LoopedBFS" else has_even_rounds
    compare(name, getattr(theirs, f"Schedule{name}"), v, takes)


def test_orders_on_a_v_are_torchs():
    compare("ZBV", theirs.ScheduleZBVZeroBubble, 2, lambda p, m: True)
    compare("DualPipeV", theirs.ScheduleDualPipeV, 2, lambda p, m: m >= 2 * p)


def printed_by_torch(kind, p, m):
    """What torch prints for the schedules that it runs by other code."""
    orders = stub(kind, p, m, 1)._get_pipeline_order()
    steps = [[str(step) for step in orders[rank] if step] for rank in range(p)]
    return [[step for step in order if "REDUCE" not in step] for order in steps]


def test_gpipe_is_torchs():
    for p, m in SIZES:
        assert our_orders("GPipe", p, m, 1) == printed_by_torch(
            theirs.ScheduleGPipe, p, m
        )


def test_1f1b_is_torchs():
    """torch 2.13 prints the forwards of its last rank one too high, and refuses m < p."""
    for p, m in SIZES:
        if p <= m:
            *ours, last = our_orders("1F1B", p, m, 1)
            *found, found_last = printed_by_torch(theirs.Schedule1F1B, p, m)
            assert ours == found
            shifted = [
                f"{p - 1}F{int(step.split('F')[1]) + 1}" if "F" in step else step
                for step in last
            ]
            assert found_last in (shifted, last)


@pytest.mark.parametrize("name", SCHEDULES)
def test_names_of_torch_are_known(name):
    if hasattr(theirs, f"Schedule{name}"):
        assert build_schedule(f"Schedule{name}", 2, 4).name == name


def test_torch_reads_our_files():
    for name in SCHEDULES:
        schedule = add_messages(build_schedule(name, 2, 4))
        for line, order in zip(
            format_csv(schedule).splitlines(), schedule.orders, strict=True
        ):
            steps = map(theirs._Action.from_str, line.split(","))
            assert [str(step) for step in steps] == [str(step) for step in order]


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBV"])
def test_torchs_messages_pass_the_validator_and_are_as_many(name):
    """Sends and receives that torch adds to our orders are right, in the strictest case too."""
    schedule = build_schedule(name, 4, 8)
    rank_of = {s: schedule.mapping.rank_of(s) for s in range(schedule.stages)}
    compute = {
        rank: [theirs._Action.from_str(str(step)) for step in order]
        for rank, order in enumerate(schedule.orders)
    }
    lowered = theirs._add_send_recv(compute, rank_of.__getitem__, schedule.stages)
    again = collect_orders(
        [_parse(lowered[rank]) for rank in range(4)], name, schedule.style
    )
    assert validate(again).messages == validate(add_messages(schedule)).messages
    assert sum(step.type in MESSAGES for order in again.orders for step in order) == (
        2 * validate(schedule).messages
    )


def _parse(steps):
    from hyper_parallel.core.pipeline_parallel.action import MetaStep

    return [MetaStep.parse(str(step)) for step in steps if step]
