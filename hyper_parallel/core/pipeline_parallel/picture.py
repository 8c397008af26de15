# SPDX-License-Identifier: Apache-2.0
"""Pictures of a simulated schedule: a grid of characters for a terminal, and an SVG.

    r0 │0F0 0F1 0F2 0F3 ·   ·   ·   0B0 ─── ...
    r1 │·   1F0 1F1 1F2 ...

A cell is a tick, the longest time that divides all others. An action begins with its name, goes
on in lines, and dots are idle time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from html import escape
from typing import NamedTuple

from hyper_parallel.core.pipeline_parallel.action import (
    MetaStep,
    MetaStepType,
    computations,
)
from hyper_parallel.core.pipeline_parallel.simulate import Simulation, TimedStep

MOST_TICKS = 400  # beyond that, cells are as long as the shortest action

# The color of each kind of action, by its name in texts.
COLORS = {
    "F": "#6fa8dc",
    "B": "#93c47d",
    "I": "#93c47d",
    "W": "#f6b26b",
    "OVERLAP_F_B": "#8e7cc3",
    "OVERLAP_B_F": "#8e7cc3",
}


class Cell(NamedTuple):
    """Some characters of a row, and the kind of action that they stand for; "" is idle time."""

    text: str
    kind: str


def draw_grid(result: Simulation, width: int = 100) -> list[list[list[Cell]]]:
    """Blocks of rows of cells: a row per rank, as many ticks in a block as ``width`` allows."""
    tick = _choose_tick(result)
    columns = max(1, math.ceil(result.makespan / tick))
    steps = [span for spans in result.timeline for span in spans]
    cell = 1 + max(len(_label(one.step)) for one in steps if computations(one.step))
    rows = [_draw_row(spans, tick, columns, cell) for spans in result.timeline]
    per_block = max(1, width // cell)
    starts = range(0, columns, per_block)
    return [[row[start : start + per_block] for row in rows] for start in starts]


def _choose_tick(result: Simulation) -> Fraction:
    steps = [span for spans in result.timeline for span in spans]
    times = {time for one in steps for time in (one.start, one.end)} - {0}
    lengths = [one.end - one.start for one in steps if one.end > one.start]
    if not times:
        return Fraction(1)
    denominator = math.lcm(*(time.denominator for time in times))
    tick = Fraction(math.gcd(*(int(time * denominator) for time in times)), denominator)
    return tick if result.makespan <= MOST_TICKS * tick else min(lengths)


def _draw_row(
    spans: Sequence[TimedStep], tick: Fraction, columns: int, width: int
) -> list[Cell]:
    row = [Cell("·".ljust(width), "")] * columns
    for start, end, step in spans:
        if not computations(step) or start == end:
            continue
        kind = step.type.value
        first, stop = (
            round(start / tick),
            max(round(end / tick), round(start / tick) + 1),
        )
        for column in range(first, min(stop, columns)):
            row[column] = Cell("─" * width, kind)
        if first < columns:
            row[first] = Cell(
                _label(step).ljust(width, "─" if stop > first + 1 else " "), kind
            )
    return row


def _label(step: MetaStep) -> str:
    return "&".join(map(str, step.sub_steps)) if step.sub_steps else str(step)


# --- SVG


def draw_svg(result: Simulation, width: int = 1200, height: int = 28) -> str:
    """A picture of the timeline, ``width`` pixels wide, with a row of ``height`` pixels per rank."""
    scale = (width - 40) / float(result.makespan or 1)
    total = height * len(result.timeline) + 30
    size = f'width="{width}" height="{total}"'
    font = f'font-family="sans-serif" font-size="{height * 0.4:g}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>',
        f"<title>{escape(result.schedule.name)}</title>",
    ]
    for rank, spans in enumerate(result.timeline):
        top = rank * height + 4
        lines.append(f'<text x="2" y="{top + height * 0.6:g}">r{rank}</text>')
        lines += _draw_spans(spans, scale, top, height - 4)
    figures = (
        f"{result.schedule.name}: makespan {float(result.makespan):g}, "
        f"bubble {float(result.makespan_bubble):g} ({float(result.rate):.1%})"
    )
    lines.append(f'<text x="32" y="{total - 10}">{escape(figures)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _draw_spans(
    spans: Sequence[TimedStep], scale: float, top: int, height: int
) -> Iterator[str]:
    for start, end, step in spans:
        if not computations(step) or start == end:
            continue
        left, length = 32 + float(start) * scale, float(end - start) * scale
        color = COLORS.get(step.type.value, "#cccccc")
        yield (
            f"<g><title>{escape(str(step))} {float(start):g}-{float(end):g}</title>"
            f'<rect x="{left:.2f}" y="{top}" width="{length:.2f}" height="{height}" '
            f'fill="{color}" fill-opacity="{_opacity(step)}" stroke="white"/>'
            f'<text x="{left + length / 2:.2f}" y="{top + height * 0.65:.1f}" '
            f'text-anchor="middle">{_short(step)}</text></g>'
        )


def _short(step: MetaStep) -> str:
    """The micro batches of an action."""
    parts = step.sub_steps or (step,)
    return "+".join(str(part.micro_index) for part in parts)


def _opacity(step: MetaStep) -> str:
    is_input = step.type is MetaStepType.BWD_INPUT
    return "0.6" if is_input else "1"
