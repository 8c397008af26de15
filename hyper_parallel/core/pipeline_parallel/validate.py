# SPDX-License-Identifier: Apache-2.0
"""Proves that a schedule can run: every computation once and in order, messages that match, no deadlock.

    validate(schedule)      Report(peaks=(4, 3, 2, 1), messages=48)
    ValueError: mine: invalid order: rank 2, index 5 (2B1) comes before 2F1 at index 9

It takes any orders, with or without sends and receives: those of ``build_schedule``, those of a
file, and those of a user's program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from hyper_parallel.core.pipeline_parallel.action import (
    MetaStep,
    MetaStepType,
    backward,
    computations,
    forward,
)
from hyper_parallel.core.pipeline_parallel.check_messages import find_message_problems
from hyper_parallel.core.pipeline_parallel.deadlock import (
    Place,
    describe_waits,
    find_deadlock,
)
from hyper_parallel.core.pipeline_parallel.orders import (
    Order,
    Product,
    Schedule,
    count_live,
    count_messages,
    index_products,
)
from hyper_parallel.platform.error_codes import coded

# The codes of schedules that cannot run; any other error is one of the question.
CANNOT_RUN = ("HP464", "HP465", "HP466", "HP467")

_UNSHARD = MetaStepType.FSDP_UNSHARD
_RESHARD = MetaStepType.FSDP_RESHARD
_REDUCE = MetaStepType.FSDP_REDUCE_GRAD
_MAKES_GRADIENT = (MetaStepType.BWD, MetaStepType.BWD_WEIGHT)


@dataclass(frozen=True)
class Report:
    """What a valid schedule costs: the peak of live activations per rank, and its messages.

    One unit of activations is those of one micro batch for all layers of a rank.
    """

    peaks: tuple[Fraction, ...]
    messages: int


def validate(
    schedule: Schedule,
    limit: Fraction | float | None = None,
    *,
    blocking_receives: bool = True,
) -> Report:
    """The costs of a schedule; raises ValueError, with a code, if it cannot run.

    ``limit`` is the most activations that a rank may hold. Without ``blocking_receives``, receives
    may stand earlier than a rank could wait for them, as in a runtime that only posts them there.
    """
    name = schedule.name
    if problems := _join(find_compute_problems(schedule)):
        raise coded(ValueError, "HP464", f"{name}: invalid computations: {problems}")
    if problems := _join(find_order_problems(schedule)):
        raise coded(ValueError, "HP465", f"{name}: invalid order: {problems}")
    if problems := _join(find_message_problems(schedule)):
        raise coded(ValueError, "HP466", f"{name}: invalid messages: {problems}")
    if problems := _join(find_deadlocks(schedule, blocking_receives)):
        raise coded(ValueError, "HP467", f"{name}: deadlock {problems}")
    report = Report(peak_activations(schedule), count_messages(schedule))
    _check_limit(schedule, report.peaks, limit)
    return report


def find_problems(schedule: Schedule) -> list[str]:
    """Everything that is wrong with a schedule, in words; empty if it can run."""
    checks = (
        find_compute_problems,
        find_order_problems,
        find_message_problems,
        find_deadlocks,
    )
    for find in checks:  # a later check relies on what an earlier one has found right
        if problems := list(find(schedule)):
            return problems
    return []


def peak_activations(schedule: Schedule) -> tuple[Fraction, ...]:
    """The most activations that each rank holds; one unit is those of all its layers."""
    chunks = schedule.chunks
    return tuple(Fraction(count_live(order), chunks) for order in schedule.orders)


def _check_limit(
    schedule: Schedule,
    peaks: Sequence[Fraction],
    limit: Fraction | float | None,
) -> None:
    for rank, peak in enumerate(peaks):
        if limit is not None and peak > limit:
            raise coded(
                ValueError,
                "HP470",
                f"{schedule.name}: rank {rank} holds the activations of {float(peak):g} micro batches, "
                f"over the limit of {float(limit):g}",
            )


def _join(problems: Iterable[str], shown: int = 3) -> str:
    """The first problems, and how many more there are; "" if there are none."""
    problems = list(problems)
    more = len(problems) - shown
    ending = f"; and {more} more" if more > 0 else ""
    return "; ".join(problems[:shown]) + ending


# --- every computation once, on its rank


def find_compute_problems(schedule: Schedule) -> Iterator[str]:
    """Computations that are foreign to their rank, doubled or missing."""
    if len(schedule.orders) != schedule.ranks:
        yield f"there are orders for {len(schedule.orders)} ranks, expected {schedule.ranks}"
        return
    first: dict[tuple[str, int, int], Place] = {}
    for place, step in _computations(schedule):
        foreign = _describe_foreign(schedule, place, step)
        if foreign:
            yield foreign
            continue
        for key in _keys(step):
            if key in first:
                yield f"{place} is done already by {first[key]}"
                break
            first[key] = place
    yield from _find_missing(schedule, first)


def _computations(schedule: Schedule) -> Iterator[tuple[Place, MetaStep]]:
    for rank, order in enumerate(schedule.orders):
        for index, step in enumerate(order):
            for part in computations(step):
                yield Place(rank, index, step), part


def _keys(step: MetaStep) -> list[tuple[str, int, int]]:
    """What a computation does: a whole backward does both parts."""
    stage, micro = step.stage_index, step.micro_index
    assert stage is not None
    assert micro is not None
    kinds = "IW" if step.type is MetaStepType.BWD else step.type.value
    return [(kind, stage, micro) for kind in kinds]


def _describe_foreign(schedule: Schedule, place: Place, step: MetaStep) -> str | None:
    stage, micro = step.stage_index, step.micro_index
    if stage is None or not 0 <= stage < schedule.stages:
        return f"{place}: there are {schedule.stages} stages"
    if micro is None or not 0 <= micro < schedule.micro_batches:
        return f"{place}: there are {schedule.micro_batches} micro batches"
    owner = schedule.mapping.rank_of(stage, micro)
    if owner != place.rank:
        return f"{place}: stage {stage} belongs to rank {owner}"
    if step.type is not MetaStepType.FWD and not schedule.has_backward:
        return f"{place}: the schedule is for forwards only"
    return None


def _find_missing(
    schedule: Schedule, done: Iterable[tuple[str, int, int]]
) -> Iterator[str]:
    done = set(done)
    for stage in range(schedule.stages):
        for micro in range(schedule.micro_batches):
            rank = schedule.mapping.rank_of(stage, micro)
            if ("F", stage, micro) not in done:
                yield f"rank {rank} lacks {forward(stage, micro)}"
            if schedule.has_backward:
                yield from _find_missing_backward(rank, stage, micro, done)


def _find_missing_backward(
    rank: int, stage: int, micro: int, done: set[tuple[str, int, int]]
) -> Iterator[str]:
    missing = [kind for kind in "IW" if (kind, stage, micro) not in done]
    if len(missing) == 2:
        yield f"rank {rank} lacks {backward(stage, micro)}"
    elif missing:
        yield f"rank {rank} lacks {stage}{missing[0]}{micro}"


# --- what a computation needs comes before it


def find_order_problems(schedule: Schedule) -> Iterator[str]:
    """Computations that come before what they need, where a rank makes that itself."""
    for rank, order in enumerate(schedule.orders):
        made = index_products(order)
        for index, step in enumerate(order):
            place = Place(rank, index, step)
            yield from _find_late_needs(schedule, made, place, step)
        yield from _find_parameter_problems(rank, order)


def _find_late_needs(
    schedule: Schedule,
    made: dict[Product, tuple[int, MetaStep]],
    place: Place,
    step: MetaStep,
) -> Iterator[str]:
    for part in computations(step):
        for need in schedule.needs(part):
            index, maker = made.get(need, (-1, part))
            if index >= place.position:
                yield f"{place} comes before {maker} at index {index}"


def _find_parameter_problems(rank: int, order: Order) -> Iterator[str]:
    """Uses of a stage whose parameters are not gathered, and gradients reduced too early."""
    gathered: dict[int | None, bool] = {
        step.stage_index: False for step in order if step.type is _UNSHARD
    }
    reduced: dict[int | None, int] = {}
    for index, step in enumerate(order):
        if step.type in (_UNSHARD, _RESHARD):
            gathered[step.stage_index] = step.type is _UNSHARD
        if step.type is _REDUCE:
            reduced[step.stage_index] = index
        place = Place(rank, index, step)
        for part in computations(step):
            stage = part.stage_index
            if not gathered.get(stage, True):
                yield f"{place} is not between UNSHARD and RESHARD"
            if part.type in _MAKES_GRADIENT and stage in reduced:
                yield f"{place} comes after {stage}REDUCE_GRAD at index {reduced[stage]}"


# --- deadlocks


def find_deadlocks(schedule: Schedule, blocking_receives: bool = True) -> Iterator[str]:
    """The ranks that wait for each other in a cycle, whether or not sends wait for receives."""
    cases = [("whether or not sends wait", False)]
    if schedule.has_messages:
        cases.append(("if sends wait for their receives", True))
    for case, rendezvous in cases:
        waits = find_deadlock(
            schedule, rendezvous=rendezvous, blocking_receives=blocking_receives
        )
        if waits:
            yield f"{case}: {describe_waits(waits)}"
            return
