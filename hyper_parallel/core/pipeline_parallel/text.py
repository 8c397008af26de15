# SPDX-License-Identifier: Apache-2.0
"""Schedules as text and as CSV, with or without sends and receives, in torch's form of both.

    format_csv(schedule)                 0F0,0SEND_F0,0RECV_B0,0B0
                                         1RECV_F0,1F0,1B0,1SEND_B0
    format_csv(schedule, compute_only=True)   0F0,0B0
                                              1F0,1B0
    parse_csv("0F0,0B0\\n1F0,1B0")         the schedule again

A file has one row per rank; empty cells are idle slots and are left out. What a file does not say,
the number of stages and of micro batches and the placement of stages, follows from its actions.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hyper_parallel.core.pipeline_parallel.action import (
    MESSAGES,
    CustomStepType,
    MetaStep,
    MetaStepType,
    computations,
    message_of,
)
from hyper_parallel.core.pipeline_parallel.mapping import STYLES
from hyper_parallel.core.pipeline_parallel.messages import add_messages
from hyper_parallel.core.pipeline_parallel.orders import Order, Schedule
from hyper_parallel.core.pipeline_parallel.validate import find_compute_problems
from hyper_parallel.platform.error_codes import coded, without_hint

_ROW = re.compile(r"\s*(?:r(?:ank)?\s*(\d+)\s*:)?(.*)")
Custom = Iterable[CustomStepType]


def format_csv(schedule: Schedule, *, compute_only: bool = False) -> str:
    """One row per rank: all actions, with messages, or computations only."""
    has_all = not compute_only
    orders = add_messages(schedule).orders if has_all else schedule.orders
    rows = orders if has_all else map(_only_computations, orders)
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def _only_computations(order: Order) -> Order:
    return tuple(step for step in order if computations(step))


def parse_csv(
    text: str, name: str = "schedule", style: str | None = None, custom: Custom = ()
) -> Schedule:
    """The schedule of a CSV text; ``name`` begins messages, ``style`` is as in ``Schedule``."""
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    orders = [
        _parse_row(name, rank, row, "column", custom) for rank, row in enumerate(rows)
    ]
    return collect_orders(orders, name, style)


def read_csv(
    path: str | Path, style: str | None = None, custom: Custom = ()
) -> Schedule:
    """The schedule of a CSV file."""
    path = Path(path)
    return parse_csv(path.read_text(encoding="utf-8"), path.name, style, custom)


def parse_text(
    text: str, name: str = "schedule", style: str | None = None, custom: Custom = ()
) -> Schedule:
    """The schedule that prints as ``text``: one line per rank, perhaps with ``r0:`` before it."""
    orders: list[list[MetaStep]] = []
    for line in filter(str.strip, text.splitlines()):
        match = _ROW.fullmatch(line)
        assert match is not None
        rank = len(orders)
        if match[1] is not None and int(match[1]) != rank:
            raise coded(
                ValueError,
                "HP474",
                f"{name}: expected the line of rank {rank}, got that of rank {match[1]}",
            )
        orders.append(_parse_row(name, rank, match[2].split(), "word", custom))
    return collect_orders(orders, name, style)


def _parse_row(
    name: str, rank: int, cells: Sequence[str], unit: str, custom: Custom
) -> list[MetaStep]:
    order = []
    for number, cell in enumerate(cells, 1):
        if not cell.strip():
            continue
        try:
            order.append(MetaStep.parse(cell, custom))
        except ValueError as error:
            raise coded(
                ValueError,
                "HP475",
                f"{name}: row {rank + 1}, {unit} {number}: {without_hint(error)} (row {rank + 1} is rank {rank})",
            ) from None
    return order


# --- what the actions say about the schedule


def collect_orders(
    orders: Sequence[Iterable[MetaStep | None]]
    | Mapping[int, Iterable[MetaStep | None]],
    name: str = "schedule",
    style: str | None = None,
    stages: int | None = None,
) -> Schedule:
    """The schedule of these orders, one per rank; None is an idle slot and is left out.

    Without ``style`` or ``stages``, those under which the orders are right, if there are any.
    """
    if isinstance(orders, Mapping):
        _check_ranks(name, orders)
        orders = [orders[rank] for rank in range(len(orders))]
    rows = tuple(tuple(step for step in row if step is not None) for row in orders)
    steps = [step for row in rows for step in row]
    stage_count, micro_count, has_backward = _measure(name, steps)
    ranks = len(rows)
    if stages is None:
        stages = -(-stage_count // ranks) * ranks
    skips = tuple(sorted(_find_skips(steps)))
    schedule = Schedule(
        name, ranks, micro_count, stages, rows, style or "loop", skips, has_backward
    )
    return schedule if style else _choose_style(schedule)


def _check_ranks(name: str, orders: Mapping[int, object]) -> None:
    if set(orders) != set(range(len(orders))):
        raise coded(
            ValueError,
            "HP476",
            f"{name}: expected an order for every rank from 0 to {len(orders) - 1}, got {sorted(orders)}",
        )


def _measure(name: str, steps: Iterable[MetaStep]) -> tuple[int, int, bool]:
    """The numbers of stages and micro batches, and whether there is a backward."""
    stage = micro = -1
    has_backward = False
    for step in steps:
        for part in computations(step):
            stage = max(stage, part.stage_index or 0)
            micro = max(micro, part.micro_index or 0)
            has_backward |= part.type is not MetaStepType.FWD
    if micro < 0:
        raise coded(ValueError, "HP477", f"{name}: there is no computation")
    return stage + 1, micro + 1, has_backward


def _find_skips(steps: Iterable[MetaStep]) -> set[tuple[int, int]]:
    skips = set()
    for step in steps:
        if step.type in MESSAGES and step.peer_stage is not None:
            message = message_of(step)
            first, last = sorted((message.source, message.target))
            skips.add((first, last))
    return skips


def _choose_style(schedule: Schedule) -> Schedule:
    """The placement of stages under which the computations are right, or the fewest are wrong."""
    counts = {}
    for style in filter(functools.partial(_fits, schedule), STYLES):
        placed = dataclasses.replace(schedule, style=style)
        problems = len(list(find_compute_problems(placed)))
        if problems == 0:
            return placed
        if style != "bidirectional":  # which few intend: not to be guessed from faults
            counts[style] = problems
    return dataclasses.replace(schedule, style=min(counts, key=lambda s: counts[s]))


def _fits(schedule: Schedule, style: str) -> bool:
    ranks, stages = schedule.ranks, schedule.stages
    if style == "v":
        return stages == 2 * ranks
    return style == "loop" or (stages == ranks and ranks % 2 == 0)
