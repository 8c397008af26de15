# SPDX-License-Identifier: Apache-2.0
"""Sizes of pipeline schedules for tests, and what published formulas say about their costs."""

from fractions import Fraction

from hypothesis import strategies as st

from hyper_parallel.core.pipeline_parallel.schedules import (
    SCHEDULES,
    build_schedule,
    round_sizes,
)


def cases(ranks, micro_batches, chunks=(1, 2, 3, 4)):
    """(name, ranks, micro batches, chunks) of every schedule that has one of these sizes."""
    for name, kind in SCHEDULES.items():
        for p in ranks:
            for m in micro_batches:
                if p % kind.ranks_multiple or m % kind.micro_multiple:
                    continue
                for v in chunks if kind.chunks is None else (kind.chunks,):
                    yield name, p, m, v


@st.composite
def schedules(draw, most_ranks=8, most_micros=24):
    """Any schedule of these sizes, without messages."""
    name = draw(st.sampled_from(list(SCHEDULES)))
    kind = SCHEDULES[name]
    ranks = draw(st.integers(1, most_ranks // kind.ranks_multiple))
    micros = draw(st.integers(1, most_micros // kind.micro_multiple))
    chunks = draw(st.integers(1, 4)) if kind.chunks is None else None
    return build_schedule(
        name, ranks * kind.ranks_multiple, micros * kind.micro_multiple, chunks
    )


def bubble(name, p, v, forward, inputs, weight):
    """The bubble of the published formula: within the makespan, and within each rank's span."""
    whole = inputs + weight
    if name in ("GPipe", "1F1B"):
        return (p - 1) * (forward + whole), "both"
    if name in ("Interleaved1F1B", "LoopedBFS"):
        return Fraction((p - 1) * (forward + whole), v), "both"
    if name in ("ZB-H1", "InterleavedZeroBubble"):
        return Fraction((p - 1) * (forward + inputs - weight), v), "both"
    if name == "ZB-H2":
        return max(0, (p - 1) * (forward + inputs - 2 * weight)), "span"
    if name == "ZBV" and forward == inputs == weight:
        return 0, "span"
    # For pairs that run one after the other. Only if F = I >= W: otherwise it is a bound or an estimate.
    if name == "DualPipe" and forward == inputs >= weight:
        return (p // 2 - 1) * (forward + 2 * whole - 3 * weight), "both"
    if name == "DualPipeV" and forward == inputs >= weight:
        return Fraction((p - 1) * (forward + 2 * whole - 3 * weight), 2), "both"
    return None


def is_full(name, p, m):
    """Whether there are enough micro batches for the formulas of the schedule."""
    if name in ("GPipe", "1F1B"):
        return True
    least = {
        "ZB-H2": 2 * p - 1,
        "ZBV": 2 * p - 1,
        "DualPipe": 2 * p,
        "DualPipeV": 2 * p,
    }
    return m >= least.get(name, p + 1 if name == "V-Half" else p)


def peaks(name, p, m, v):
    """The activations of every rank; one unit is those of one micro batch for its layers."""
    first = round_sizes(p, m)[0]
    by_rank = {
        "GPipe": lambda r: m,
        "LoopedBFS": lambda r: m,
        "1F1B": lambda r: min(m, p - r),
        "Interleaved1F1B": lambda r: min(
            m, Fraction((v - 1) * first + 2 * (p - 1 - r) + 1, v)
        ),
        "ZB-H1": lambda r: min(m, p),
        "ZB-H2": lambda r: min(m, 2 * p - 1),
        "InterleavedZeroBubble": lambda r: min(m, Fraction((v - 1) * first + p, v)),
        "ZBV": lambda r: p,
        "V-Half": lambda r: (p + 2) // 2,
        "V-Min": lambda r: (p + 4) // 3 - Fraction(r == 0 and p % 3 == 2, 2),
        "DualPipe": lambda r: p + 1,
        "DualPipeV": lambda r: p + Fraction(1, 2),
    }[name]
    return tuple(by_rank(rank) for rank in range(p))


def message_count(schedule):
    """Messages of a step: two for every micro batch and border between ranks."""
    borders = {
        "loop": schedule.stages - 1,
        "v": schedule.stages - 2,
        "bidirectional": schedule.stages - 1,
    }[schedule.style]
    return 2 * schedule.micro_batches * borders if schedule.ranks > 1 else 0
