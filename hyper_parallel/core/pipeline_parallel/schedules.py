# SPDX-License-Identifier: Apache-2.0
"""The pipeline schedules: each is a generator of one rank's actions, and a line of the table at the foot.

    build_schedule("1F1B", ranks=2, micro_batches=2).orders
    ((0F0, 0F1, 0B0, 0B1), (1F0, 1B0, 1F1, 1B1))

A generator takes (rank, ranks, micro_batches, chunks) and yields computations only; ``add_messages``
adds sends and receives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from hyper_parallel.core.pipeline_parallel.action import (
    MetaStep,
    MetaStepType,
    backward,
    backward_input,
    backward_weight,
    forward,
)
from hyper_parallel.core.pipeline_parallel.lanes import dualpipe, dualpipev, zbv
from hyper_parallel.core.pipeline_parallel.orders import Schedule
from hyper_parallel.core.pipeline_parallel.v_schedules import v_half, v_min
from hyper_parallel.platform.error_codes import coded

Generator = Callable[[int, int, int, int], Iterable[MetaStep]]
Steps = Iterator[MetaStep]


# --- all forwards, then all backwards


def gpipe(rank: int, ranks: int, micro_batches: int, chunks: int) -> Steps:  # noqa: ARG001 - as all generators
    """All forwards, then all backwards in the same order."""
    for micro in range(micro_batches):
        yield forward(rank, micro)
    for micro in range(micro_batches):
        yield backward(rank, micro)


def looped_bfs(rank: int, ranks: int, micro_batches: int, chunks: int) -> Steps:
    """Each chunk runs all micro batches before the next one; backward is the mirror image."""
    forwards = [
        (chunk * ranks + rank, micro)
        for chunk in range(chunks)
        for micro in range(micro_batches)
    ]
    for stage, micro in forwards:
        yield forward(stage, micro)
    for stage, micro in reversed(forwards):
        yield backward(stage, micro)


# --- one forward, one backward


def one_f_one_b(rank: int, ranks: int, micro_batches: int, chunks: int) -> Steps:
    """As few forwards as the last rank needs to begin, then a forward and a backward in turn."""
    return _interleave(rank, ranks, micro_batches, chunks, lead=1)


def interleaved_1f1b(rank: int, ranks: int, micro_batches: int, chunks: int) -> Steps:
    """1F1B over several chunks, with twice the lead of a rank over the next, so that none waits."""
    return _interleave(rank, ranks, micro_batches, chunks, lead=2)


def interleaved_zero_bubble(
    rank: int, ranks: int, micro_batches: int, chunks: int
) -> Steps:
    """Interleaved with the lead of 1F1B; parameters' gradients wait, longer on later ranks."""
    steps = _interleave(rank, ranks, micro_batches, chunks, lead=1)
    return _split_backwards(steps, delay=rank)


def zb_h2(rank: int, ranks: int, micro_batches: int, chunks: int) -> Steps:
    """Zero bubble with twice the lead, and twice the memory, of ZB-H1."""
    steps = _interleave(rank, ranks, micro_batches, chunks, lead=2)
    return _split_backwards(steps, delay=2 * rank)


def _interleave(
    rank: int, ranks: int, micro_batches: int, chunks: int, lead: int
) -> Steps:
    """Warm-up forwards, then a forward and a backward in turn, then the backwards that are left.

    ``lead``: how many more forwards than the next rank this one runs before its first backward.
    """
    stages = range(rank, ranks * chunks, ranks)
    forwards = list(_in_rounds(stages, ranks, micro_batches))
    backwards = list(_in_rounds(stages[::-1], ranks, micro_batches))
    first_round = round_sizes(ranks, micro_batches)[0]
    warmup = (chunks - 1) * first_round + lead * (ranks - 1 - rank)
    for stage, micro in forwards[:warmup]:
        yield forward(stage, micro)
    steady = forwards[warmup:]
    for ahead, behind in zip(steady, backwards, strict=False):
        yield forward(*ahead)
        yield backward(*behind)
    for stage, micro in backwards[len(steady) :]:
        yield backward(stage, micro)


def round_sizes(ranks: int, micro_batches: int) -> list[int]:
    """How many micro batches each round has; they differ by at most one, larger ones first."""
    rounds = max(1, micro_batches // ranks)
    size, extra = divmod(micro_batches, rounds)
    return [size + (number < extra) for number in range(rounds)]


def _in_rounds(
    stages: Iterable[int], ranks: int, micro_batches: int
) -> Iterator[tuple[int, int]]:
    """Stage and micro batch: in every round, each stage in turn runs the round's micro batches."""
    first = 0
    for size in round_sizes(ranks, micro_batches):
        for stage in stages:
            for micro in range(first, first + size):
                yield stage, micro
        first += size


def _split_backwards(steps: Iterable[MetaStep], delay: int) -> Steps:
    """Splits every backward; its part for parameters comes ``delay`` backwards later."""
    pending: deque[MetaStep] = deque()
    for step in steps:
        if step.type is not MetaStepType.BWD:
            yield step
            continue
        assert step.stage_index is not None
        assert step.micro_index is not None
        yield backward_input(step.stage_index, step.micro_index)
        pending.append(backward_weight(step.stage_index, step.micro_index))
        if len(pending) > delay:
            yield pending.popleft()
    yield from pending


# --- the table


@dataclass(frozen=True)
class ScheduleKind:
    """A line of the table.

    ``chunks`` is the number of stages per rank; None: any. The number of ranks and of micro
    batches must be multiples of ``ranks_multiple`` and ``micro_multiple``.
    """

    generate: Generator
    style: str = "loop"
    chunks: int | None = 1
    splits_backward: bool = False
    ranks_multiple: int = 1
    micro_multiple: int = 1
    other_names: tuple[str, ...] = ()


SCHEDULES = {
    "GPipe": ScheduleKind(gpipe),
    "1F1B": ScheduleKind(one_f_one_b),
    "Interleaved1F1B": ScheduleKind(
        interleaved_1f1b, chunks=None, other_names=("interleaved",)
    ),
    "LoopedBFS": ScheduleKind(looped_bfs, chunks=None, other_names=("bfs",)),
    "ZB-H1": ScheduleKind(
        interleaved_zero_bubble, splits_backward=True, other_names=("ZB1P",)
    ),
    "ZB-H2": ScheduleKind(zb_h2, splits_backward=True, other_names=("ZB2P",)),
    "InterleavedZeroBubble": ScheduleKind(
        interleaved_zero_bubble,
        chunks=None,
        splits_backward=True,
        other_names=("InterleavedZB",),
    ),
    "ZBV": ScheduleKind(
        zbv, "v", chunks=2, splits_backward=True, other_names=("ZBVZeroBubble",)
    ),
    "V-Half": ScheduleKind(v_half, "v", chunks=2, splits_backward=True),
    "V-Min": ScheduleKind(v_min, "v", chunks=2, splits_backward=True),
    "DualPipe": ScheduleKind(
        dualpipe,
        "bidirectional",
        splits_backward=True,
        ranks_multiple=2,
        micro_multiple=2,
    ),
    "DualPipeV": ScheduleKind(dualpipev, "v", chunks=2, splits_backward=True),
}


def find_schedule(name: str) -> tuple[str, ScheduleKind]:
    """The name in the table, and the line, of a schedule by any of its names."""
    wanted = _plain(name)
    for known, kind in SCHEDULES.items():
        if wanted in map(_plain, (known, *kind.other_names)):
            return known, kind
    raise coded(
        ValueError,
        "HP460",
        f"unknown pipeline schedule {name!r}; there are {', '.join(SCHEDULES)}",
    )


def _plain(name: str) -> str:
    """A name without case, hyphens, and the word that torch's classes begin with."""
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    return plain.removeprefix("schedule")


def build_schedule(
    name: str, ranks: int, micro_batches: int, chunks: int | None = None
) -> Schedule:
    """The computations of every rank in a schedule; ``chunks`` is the number of stages per rank."""
    known, kind = find_schedule(name)
    chunks = _choose_chunks(known, kind, chunks)
    _check_size(known, "ranks", ranks, kind.ranks_multiple)
    _check_size(known, "micro batches", micro_batches, kind.micro_multiple)
    orders = tuple(
        tuple(kind.generate(rank, ranks, micro_batches, chunks))
        for rank in range(ranks)
    )
    return Schedule(known, ranks, micro_batches, ranks * chunks, orders, kind.style)


def _choose_chunks(name: str, kind: ScheduleKind, chunks: int | None) -> int:
    if chunks is None:
        return kind.chunks or 2
    if chunks >= 1 and kind.chunks in (None, chunks):
        return chunks
    expected = "at least 1" if kind.chunks is None else str(kind.chunks)
    raise coded(
        ValueError,
        "HP463",
        f"{name} has {expected} stages per rank, got {chunks}",
    )


def _check_size(name: str, what: str, size: int, multiple: int) -> None:
    if size >= multiple and size % multiple == 0:
        return
    below, above = size // multiple * multiple, -(-size // multiple) * multiple
    nearest = sorted({max(multiple, below), max(multiple, above)})
    expected = "positive" if multiple == 1 else f"a positive multiple of {multiple}"
    raise coded(
        ValueError,
        "HP461",
        f"{name}: the number of {what} must be {expected}, got {size}; "
        f"nearest: {' or '.join(map(str, nearest))}",
    )
