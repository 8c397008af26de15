# SPDX-License-Identifier: Apache-2.0
"""Simulates a schedule: timeline, makespan, bubbles, activations and messages for given times.

    result = simulate(build_schedule("1F1B", 4, 8), Times(forward=1, input=1, weight=1))
    result.makespan, result.makespan_bubble, result.peaks, result.messages
    (33, 9, (4, 3, 2, 1), 48)

All figures are exact fractions: a float stands for the decimal number that it prints as.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from hyper_parallel.core.pipeline_parallel.action import MetaStep, computations
from hyper_parallel.core.pipeline_parallel.messages import add_messages
from hyper_parallel.core.pipeline_parallel.orders import Schedule, count_messages
from hyper_parallel.core.pipeline_parallel.timeline import Costs, run_orders
from hyper_parallel.core.pipeline_parallel.validate import peak_activations
from hyper_parallel.platform.error_codes import coded

Time = Fraction | float | int


@dataclass(frozen=True)
class Times:
    """How long computations take.

    ``forward``, ``input`` and ``weight`` are the times of a micro batch for all layers of a rank,
    of which each chunk takes an equal part; or one time for every stage. ``message`` is the time of
    a message, and ``pair`` that of a forward and a whole backward that overlap, for all layers of a
    rank (None: the sum of their times).
    """

    forward: Time | Sequence[Time] = 1
    input: Time | Sequence[Time] = 1
    weight: Time | Sequence[Time] = 1
    message: Time = 0
    pair: Time | None = None


class TimedStep(NamedTuple):
    """An action with the times at which it starts and ends."""

    start: Fraction
    end: Fraction
    step: MetaStep


@dataclass(frozen=True)
class Simulation:
    """A run of a schedule.

    ``makespan`` is the time from the first action of any rank to the last one. ``makespan_bubble``
    is how much of it the busiest rank is idle; ``span_bubbles`` is, for each rank, its idle time
    between its own first and last action. ``peaks`` is in activations of one micro batch for all
    layers of a rank.
    """

    schedule: Schedule
    timeline: tuple[tuple[TimedStep, ...], ...]
    peaks: tuple[Fraction, ...]
    messages: int

    @cached_property
    def makespan(self) -> Fraction:
        """The time from the first action of any rank to the last."""
        ends = [spans[-1].end for spans in self.timeline if spans]
        return max(ends, default=Fraction(0))

    @cached_property
    def busy(self) -> tuple[Fraction, ...]:
        """The time that each rank computes."""
        return tuple(
            sum((span.end - span.start for span in _computing(spans)), Fraction(0))
            for spans in self.timeline
        )

    @cached_property
    def makespan_bubble(self) -> Fraction:
        """The idle time of the busiest rank within the makespan."""
        return self.makespan - max(self.busy)

    @cached_property
    def span_bubbles(self) -> tuple[Fraction, ...]:
        """The idle time of each rank between its own first and last action."""
        bubbles = []
        for spans, busy in zip(self.timeline, self.busy, strict=True):
            own = _computing(spans)
            length = own[-1].end - own[0].start if own else Fraction(0)
            bubbles.append(length - busy)
        return tuple(bubbles)

    @property
    def rate(self) -> Fraction:
        """The part of the makespan that is bubble."""
        return self.makespan_bubble / self.makespan if self.makespan else Fraction(0)


def simulate(
    schedule: Schedule,
    times: Times | None = None,
    *,
    rendezvous: bool = False,
    atomic_pairs: bool = True,
) -> Simulation:
    """Runs a schedule with the given times.

    With ``rendezvous`` a send occupies its rank until the message has arrived; otherwise ranks
    compute while messages travel. With ``atomic_pairs`` both results of a pair leave when the pair
    is finished; otherwise the two parts run one after the other, and each result leaves at once.
    """
    times = times or Times()
    if not atomic_pairs:
        schedule = schedule.unpaired()
    if rendezvous:
        schedule = add_messages(schedule)
    unit, costs = _to_ticks(schedule, times, rendezvous=rendezvous)
    timeline = tuple(
        tuple(TimedStep(start * unit, end * unit, step) for start, end, step in spans)
        for spans in run_orders(schedule, costs)
    )
    peaks = peak_activations(schedule)
    return Simulation(schedule, timeline, peaks, count_messages(schedule))


def _computing(spans: Sequence[TimedStep]) -> list[TimedStep]:
    return [span for span in spans if computations(span.step)]


def _to_ticks(
    schedule: Schedule, times: Times, *, rendezvous: bool
) -> tuple[Fraction, Costs]:
    """The time of a tick, and all times in ticks: the loop adds whole numbers only."""
    forward = _per_stage(schedule, "forward", times.forward)
    inputs = _per_stage(schedule, "input", times.input)
    weights = _per_stage(schedule, "weight", times.weight)
    message = _exact("message", times.message)
    pair = None if times.pair is None else _exact("pair", times.pair) / schedule.chunks
    all_times = [*forward, *inputs, *weights, message, pair or Fraction(0)]
    ticks = math.lcm(*(time.denominator for time in all_times))

    def scaled(row: Sequence[Fraction]) -> tuple[int, ...]:
        return tuple(int(time * ticks) for time in row)

    whole = [a + b for a, b in zip(inputs, weights, strict=True)]
    compute = {
        "F": scaled(forward),
        "I": scaled(inputs),
        "W": scaled(weights),
        "B": scaled(whole),
    }
    pair_ticks = None if pair is None else int(pair * ticks)
    costs = Costs(compute, int(message * ticks), pair_ticks, rendezvous)
    return Fraction(1, ticks), costs


def _per_stage(
    schedule: Schedule, name: str, time: Time | Sequence[Time]
) -> list[Fraction]:
    if not isinstance(time, Sequence):
        return [_exact(name, time) / schedule.chunks] * schedule.stages
    if len(time) != schedule.stages:
        raise coded(
            ValueError,
            "HP472",
            f"expected one time of {name} for each of {schedule.stages} stages, got {len(time)}",
        )
    return [_exact(name, one) for one in time]


def _exact(name: str, time: Time) -> Fraction:
    exact = Fraction(str(time)) if math.isfinite(time) else Fraction(-1)
    if exact < 0:
        raise coded(
            ValueError,
            "HP473",
            f"the time of {name} must be a finite number and not negative, got {time}",
        )
    return exact
