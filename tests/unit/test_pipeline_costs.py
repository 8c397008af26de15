# SPDX-License-Identifier: Apache-2.0
"""The simulator: the published tables to the digit, the formulas on a grid of sizes, and bounds for any times."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import bubble, cases, is_full, message_count, peaks, schedules

from hyper_parallel.core.pipeline_parallel.messages import add_messages
from hyper_parallel.core.pipeline_parallel.orders import product_of
from hyper_parallel.core.pipeline_parallel.schedules import SCHEDULES, build_schedule
from hyper_parallel.core.pipeline_parallel.simulate import Times, simulate
from hyper_parallel.core.pipeline_parallel.text import parse_text
from hyper_parallel.core.pipeline_parallel.validate import peak_activations
from hyper_parallel.platform.error_codes import code_of

# 4 ranks, 8 micro batches, equal times:
# makespan, makespan bubble, span bubble of each rank, rate, peak of each rank, messages
EQUAL_TIMES = """
GPipe                  33    9    9 6 3 0        .2727  8 8 8 8          48
1F1B                   33    9    9 6 3 0        .2727  4 3 2 1          48
Interleaved1F1B        28.5  4.5  4.5 3 1.5 0    .1579  5.5 4.5 3.5 2.5  112
LoopedBFS              28.5  4.5  4.5 3 1.5 0    .1579  8 8 8 8          112
ZB-H1                  27    3    3 2 1 0        .1111  4 4 4 4          48
ZB-H2                  27    3    0 0 0 0        .1111  7 7 7 7          48
InterleavedZeroBubble  25.5  1.5  1.5 1 .5 0     .0588  4 4 4 4          112
ZBV                    25.5  1.5  0 0 0 0        .0588  4 4 4 4          96
V-Half                 26.5  2.5  2.5 1.5 1.5 1  .0943  3 3 3 3          96
V-Min                  29.5  5.5  5.5 4.5 3.5 3  .1864  2 2 2 2          96
DualPipeV              25.5  1.5  1.5 1 .5 0     .0588  4.5 4.5 4.5 4.5  96
DualPipeV/atomic       27    3    3 2.5 2 1.5    .1111  4.5 4.5 4.5 4.5  96
DualPipe               25    1    1 0 0 1        .0400  5 5 5 5          48
DualPipe/atomic        26    2    2 1 1 2        .0769  5 5 5 5          48
"""

# Makespan bubble, and the span bubble of rank 0, for F, I and W of
UNEQUAL_TIMES = ((1, 1, 1), (1, 1.2, 0.8), (1, 1, 0.8), (1, 1.5, 0.5))
UNEQUAL = """
1F1B                   9 9      9 9        8.4 8.4  9 9
Interleaved1F1B        4.5 4.5  4.5 4.5    4.2 4.2  4.5 4.5
ZB-H1                  3 3      4.2 4.2    3.6 3.6  6 6
ZB-H2                  3 0      3 1.8      3 1.2    4.5 4.5
InterleavedZeroBubble  1.5 1.5  2.1 2.1    1.8 1.8  3 3
ZBV                    1.5 0    1.8 1.2    1.5 .6   3 3
DualPipeV              1.5 1.5  2.1 2.1    1.8 1.8  3.25 3.25
V-Half                 2.5 2.5  3.9 3.9    3 3      7 7
V-Min                  5.5 5.5  10.4 10.4  7 7      17.75 17.75
"""
# Makespan bubbles with full activation checkpointing: F=1, I=2, W=1.
CHECKPOINTING = {
    "1F1B": 12, "Interleaved1F1B": 6, "ZB-H1": 6, "ZB-H2": 3, "InterleavedZeroBubble": 3, "ZBV": 3,
    "DualPipeV": 4, "V-Half": 9, "V-Min": 22.5,
}  # fmt: skip

# (ranks, micro batches): makespan bubble and highest peak, equal times
OTHER_SIZES = {
    (2, 4): {"1F1B": (3, 2), "Interleaved1F1B": (1.5, 2.5), "ZB-H1": (1, 2), "ZB-H2": (1, 3),
             "ZBV": (0.5, 2), "DualPipeV": (0.5, 2.5)},
    (4, 16): {"1F1B": (9, 4), "Interleaved1F1B": (4.5, 5.5), "ZB-H1": (3, 4), "ZB-H2": (3, 7),
              "ZBV": (1.5, 4), "DualPipeV": (1.5, 4.5)},
    (8, 16): {"1F1B": (21, 8), "Interleaved1F1B": (10.5, 11.5), "ZB-H1": (7, 8), "ZB-H2": (7, 15),
              "ZBV": (3.5, 8), "DualPipeV": (3.5, 8.5), "V-Half": (8.5, 5), "V-Min": (13.5, 4)},
    (5, 10): {"V-Half": (5.5, 3), "V-Min": (7.5, 3)},
    (6, 12): {"V-Half": (5.5, 4), "V-Min": (8.5, 3)},
}  # fmt: skip
OTHER_SIZES[8, 32] = OTHER_SIZES[8, 16]
RATES = {
    ("V-Half", 8, 16): 0.1504, ("V-Half", 8, 32): 0.0813, ("V-Half", 5, 10): 0.1549,
    ("V-Half", 6, 12): 0.1325, ("V-Min", 8, 16): 0.2195, ("V-Min", 8, 32): 0.1233,
    ("V-Min", 5, 10): 0.2, ("V-Min", 6, 12): 0.191,
}  # fmt: skip


def rows(table):
    return [line.split() for line in table.strip().splitlines()]


@pytest.mark.parametrize("row", rows(EQUAL_TIMES), ids=lambda row: row[0])
def test_costs_for_equal_times(row):
    name, *figures = row
    name, _, atomic = name.partition("/")
    result = simulate(build_schedule(name, 4, 8), atomic_pairs=bool(atomic))
    found = [result.makespan, result.makespan_bubble, *result.span_bubbles]
    assert found == [Fraction(figure) for figure in figures[:6]]
    assert f"{float(result.rate):.4f}"[1:] == figures[6]
    assert list(result.peaks) == [Fraction(figure) for figure in figures[7:11]]
    assert result.messages == int(figures[11])
    assert result.busy == (24,) * 4


@pytest.mark.parametrize("row", rows(UNEQUAL), ids=lambda row: row[0])
def test_costs_for_unequal_times(row):
    name, *figures = row
    found = []
    for times in UNEQUAL_TIMES:
        result = simulate(build_schedule(name, 4, 8), Times(*times), atomic_pairs=False)
        found += [result.makespan_bubble, result.span_bubbles[0]]
    assert found == [Fraction(figure) for figure in figures]


@pytest.mark.parametrize("name", CHECKPOINTING)
def test_costs_with_activation_checkpointing(name):
    result = simulate(build_schedule(name, 4, 8), Times(1, 2, 1), atomic_pairs=False)
    assert result.makespan_bubble == CHECKPOINTING[name]
    assert result.busy == (32,) * 4


def test_costs_of_other_sizes():
    for (p, m), known in OTHER_SIZES.items():
        for name, figures in known.items():
            result = simulate(build_schedule(name, p, m), atomic_pairs=False)
            assert (result.makespan_bubble, max(result.peaks)) == figures
            if name in ("ZB-H2", "ZBV"):
                assert max(result.span_bubbles) == 0
            rate = RATES.get((name, p, m))
            assert rate is None or round(float(result.rate), 4) == rate
    assert simulate(build_schedule("V-Min", 8, 16)).peaks[0] == Fraction(7, 2)


# A thinned grid of sizes; every bubble for two ratios of times.
GRID = [
    *cases((1, 2, 3, 4), (1, 2, 3, 5, 8), (1, 2, 3)),
    *cases((5, 8), (4, 10, 17), (2,)),
    *cases((6,), (12, 14), (4,)),
    *cases((12,), (24,), (2,)),
]


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubbles_follow_the_formulas(name):
    compared = 0
    for known, p, m, v in GRID:
        if known != name or not is_full(name, p, m):
            continue
        for times in ((1, 1, 1), (2, 2, 1) if "Dual" in name else (4, 5, 3)):
            expected = bubble(name, p, v, *times)
            if expected is None:
                continue
            result = simulate(build_schedule(name, p, m, v), Times(*times))
            assert max(result.span_bubbles) == expected[0], (p, m, v, times)
            if expected[1] == "both":
                assert result.makespan_bubble == expected[0], (p, m, v, times)
            compared += 1
    assert compared > 5 or name.startswith("V-")


@pytest.mark.parametrize("name", SCHEDULES)
def test_peaks_follow_the_formulas(name):
    compared = 0
    for known, p, m, v in GRID:
        if known == name:
            found = peak_activations(build_schedule(name, p, m, v))
            if is_full(name, p, m) or SCHEDULES[name].style == "loop":
                assert found == peaks(name, p, m, v), (p, m, v)
                compared += 1
            else:
                assert all(
                    a <= b for a, b in zip(found, peaks(name, p, m, v), strict=True)
                )
    assert compared > 4


times = st.fractions(0, 9, max_denominator=7)


@settings(max_examples=40, deadline=None)
@given(schedules(most_ranks=6, most_micros=12), st.tuples(times, times, times), times)
def test_no_run_beats_the_lower_bounds(schedule, computation, message):
    forward, inputs, weight = computation
    result = simulate(schedule, Times(*computation, message=message))
    assert result.makespan >= max(result.busy)
    borders = message_count(schedule) // (2 * schedule.micro_batches)
    backward = inputs if schedule.splits_backward else inputs + weight
    chain = (forward + backward) * schedule.stages / schedule.chunks
    assert result.makespan >= chain + 2 * borders * message
    assert sum(result.busy) == (
        sum(computation) * schedule.micro_batches * schedule.ranks
    )
    assert min(result.span_bubbles) >= 0


@settings(max_examples=30, deadline=None)
@given(schedules(most_ranks=6, most_micros=12), st.tuples(times, times, times))
def test_messages_in_the_orders_change_no_time(schedule, computation):
    schedule = schedule.unpaired()
    plain = simulate(schedule, Times(*computation))
    explicit = simulate(add_messages(schedule), Times(*computation))
    assert explicit.makespan == plain.makespan
    assert explicit.span_bubbles == plain.span_bubbles


@settings(max_examples=30, deadline=None)
@given(schedules(most_ranks=4, most_micros=8), times, times)
def test_ends_are_longest_paths(schedule, forward, message):
    """An oracle of another kind: the longest path to each action, without clocks and events."""
    schedule = schedule.unpaired()
    result = simulate(schedule, Times(forward, 2, 1, message))
    cost = {"F": forward, "I": 2, "W": 1, "B": 3}
    place, ends = {}, {}
    for rank, order in enumerate(schedule.orders):
        for index, step in enumerate(order):
            place[product_of(step)] = (rank, index)

    def length(rank, index):
        if (rank, index) not in ends:
            step = schedule.orders[rank][index]
            paths = [length(rank, index - 1)] if index else [0]
            for need in schedule.needs(step):
                other = place[need]
                paths.append(length(*other) + message * (other[0] != rank))
            own = cost[step.type.value] / Fraction(schedule.chunks)
            ends[rank, index] = max(paths) + own
        return ends[rank, index]

    for rank, spans in enumerate(result.timeline):
        assert [span.end for span in spans] == [
            length(rank, index) for index in range(len(spans))
        ]


def test_with_equal_times_no_rendezvous_send_waits():
    for name, p, m, v in cases((2, 3, 4), (4, 8), (1, 2)):
        schedule = build_schedule(name, p, m, v).unpaired()
        waiting = simulate(schedule, rendezvous=True)
        assert waiting.makespan == simulate(schedule).makespan, (name, p, m, v)


def test_messages_take_time():
    schedule = build_schedule("1F1B", 4, 1)
    assert simulate(schedule, Times(message=Fraction(1, 2))).makespan == 12 + 6 * 0.5
    chain = simulate(schedule, Times(message=Fraction(1, 2)), rendezvous=True)
    assert chain.makespan == 12 + 6 * 0.5
    many = build_schedule("1F1B", 2, 4)
    slow = Times(message=2)
    assert (
        simulate(many, slow).makespan < simulate(many, slow, rendezvous=True).makespan
    )


def test_times_per_stage_and_of_pairs():
    schedule = build_schedule("GPipe", 2, 1)
    result = simulate(schedule, Times([1, 5], [2, 3], [0, 1]))
    assert result.makespan == 1 + 5 + 4 + 2
    assert [span.end for span in result.timeline[1]] == [6, 10]
    fast = Times(1, 1, 1, pair=Fraction(5, 2))
    pairs = build_schedule("DualPipeV", 4, 8)
    assert simulate(pairs, fast).makespan < simulate(pairs).makespan
    # The published formula, of the last rank: it runs the most pairs.
    result = simulate(pairs, fast)
    assert result.makespan - result.busy[-1] == Fraction(3, 2) * (
        Fraction(5, 2) + 2 - 3
    )


def test_an_idle_rank_and_floats_are_exact():
    result = simulate(build_schedule("1F1B", 1, 3), Times(0.1, 0.2, 0.3))
    assert result.makespan == Fraction(18, 10)
    assert result.rate == 0


@pytest.mark.parametrize(
    ("times", "code"),
    [
        (Times(forward=[1, 2, 3]), "HP472"),
        (Times(weight=-1), "HP473"),
        (Times(message=float("inf")), "HP473"),
        (Times(input=float("nan")), "HP473"),
    ],
)
def test_bad_times_are_refused(times, code):
    with pytest.raises(ValueError) as caught:
        simulate(build_schedule("1F1B", 2, 2), times)
    assert code_of(caught.value) == code


def test_a_deadlock_is_told_and_not_waited_for():
    schedule = parse_text("r0: 0F0 0B0 0F1 0B1\nr1: 1F0 1F1 1B0 1B1")
    with pytest.raises(ValueError, match=r"rank 0, index 1 \(0B0\) waits for") as error:
        simulate(schedule)
    assert code_of(error.value) == "HP471"
