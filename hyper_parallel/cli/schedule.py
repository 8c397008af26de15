# SPDX-License-Identifier: Apache-2.0
"""``hyper-parallel schedule``: draws a pipeline schedule and tells what it costs, or compares all of them.

It exits with 1 where the schedule of a file cannot run, with 2 where there is no such schedule.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hyper_parallel.cli.checkpoints import application
from hyper_parallel.cli.failures import WRONG, BadInputError, Debug, told
from hyper_parallel.core.pipeline_parallel.messages import add_messages
from hyper_parallel.core.pipeline_parallel.orders import Schedule
from hyper_parallel.core.pipeline_parallel.picture import COLORS, draw_grid, draw_svg
from hyper_parallel.core.pipeline_parallel.schedules import SCHEDULES, build_schedule
from hyper_parallel.core.pipeline_parallel.simulate import (
    Simulation,
    Times,
    simulate,
)
from hyper_parallel.core.pipeline_parallel.text import format_csv, read_csv
from hyper_parallel.core.pipeline_parallel.validate import CANNOT_RUN, validate
from hyper_parallel.platform.error_codes import code_of

_EPILOG = """
Examples:

    hyper-parallel schedule -p 4 -m 8

    hyper-parallel schedule 1F1B -p 4 -m 8

    hyper-parallel schedule interleaved -p 4 -m 8 --chunks 2 --messages

    hyper-parallel schedule ZBV -p 4 -m 8 --input 1.2 --weight 0.8 --svg zbv.svg

    hyper-parallel schedule my_orders.csv
"""

_WIDE = 240  # columns of what goes into a file or another program


@application.command(epilog=_EPILOG)
@told
def schedule(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A schedule, or a CSV file with one row of actions per rank; without it, all are compared."
        ),
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", "-p", help="Pipeline ranks.")] = 4,
    micro_batches: Annotated[
        int, typer.Option("--micro-batches", "-m", help="Micro batches per step.")
    ] = 8,
    chunks: Annotated[
        int | None,
        typer.Option(
            help="Stages per rank, for schedules that leave it open; 2 if not given."
        ),
    ] = None,
    forward: Annotated[
        float,
        typer.Option(help="Time of the forward of a micro batch on a rank's layers."),
    ] = 1.0,
    input_: Annotated[
        float, typer.Option("--input", help="Time of its gradients of inputs.")
    ] = 1.0,
    weight: Annotated[
        float, typer.Option(help="Time of its gradients of parameters.")
    ] = 1.0,
    message: Annotated[float, typer.Option(help="Time of a message.")] = 0.0,
    rendezvous: Annotated[
        bool,
        typer.Option("--rendezvous", help="A send waits for its receive."),
    ] = False,
    atomic_pairs: Annotated[
        bool,
        typer.Option(
            "--atomic-pairs",
            help="What a forward and a backward that run together make leaves when both are done.",
        ),
    ] = False,
    messages: Annotated[
        bool,
        typer.Option("--messages", help="Print the orders with sends and receives."),
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare all schedules.")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option(help="Write the picture to this file.")
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            help="Write the orders to this file, with --messages all of them."
        ),
    ] = None,
    debug: Debug = False,  # noqa: ARG001 - for the decorator
) -> None:
    """Draws a pipeline schedule and tells its bubble, its activations and its messages."""
    times = Times(forward, input_, weight, message)

    def run(asked: Schedule) -> Simulation:
        return simulate(asked, times, rendezvous=rendezvous, atomic_pairs=atomic_pairs)

    try:
        if name is None or compare:
            results = [run(one) for one in _build_all(ranks, micro_batches, chunks)]
            _console().print(_compare(results))
            return
        asked = _find(name, ranks, micro_batches, chunks)
        validate(add_messages(asked))
        result = run(asked)
    except ValueError as error:
        raise _explain_failure(error) from None
    _show(result, asked, messages=messages)
    if svg is not None:
        svg.write_text(draw_svg(result), encoding="utf-8")
    if csv is not None:
        csv.write_text(format_csv(asked, compute_only=not messages), encoding="utf-8")


def _find(name: str, ranks: int, micro_batches: int, chunks: int | None) -> Schedule:
    """The schedule of a name or a file; that of a file must be right before messages are added."""
    if not name.endswith(".csv"):
        return build_schedule(name, ranks, micro_batches, chunks)
    if not Path(name).is_file():
        raise BadInputError(f"there is no file {name}")
    asked = read_csv(name)
    validate(asked)
    return asked


def _explain_failure(error: ValueError) -> Exception:
    """A schedule that cannot run is an answer; any other error is one of what was asked."""
    code = code_of(error)
    if code in CANNOT_RUN:
        typer.echo(f"wrong: {error}")
        return typer.Exit(WRONG)
    return error if code is None else BadInputError(str(error), code=None)


def _console() -> Console:
    width = None if sys.stdout.isatty() else _WIDE
    return Console(highlight=False, soft_wrap=True, width=width)


# --- one schedule


def _show(result: Simulation, asked: Schedule, *, messages: bool) -> None:
    console = _console()
    for block in draw_grid(result, console.width - 6):
        for rank, row in enumerate(block):
            line = Text(f"r{rank:<3}")
            for cell in row:
                line.append(cell.text, COLORS.get(cell.kind, "dim"))
            line.rstrip()
            console.print(line)
        console.print()
    for line_text in _describe(result):
        console.print(line_text)
    if messages:
        console.print()
        console.print(str(add_messages(asked)), markup=False)


def _describe(result: Simulation) -> Iterator[str]:
    schedule = result.schedule
    ranks, batches = schedule.ranks, schedule.micro_batches
    yield f"{schedule.name}: {ranks} ranks, {schedule.stages} stages, {batches} micro batches"
    yield f"  makespan      {_number(result.makespan)}"
    yield f"  bubble        {_number(result.makespan_bubble)} ({float(result.rate):.1%} of the makespan)"
    yield f"  within spans  {_numbers(result.span_bubbles)}   idle between a rank's first and last action"
    yield f"  activations   {_numbers(result.peaks)}   micro batches of all layers of a rank, at most"
    yield f"  messages      {result.messages}"


def _number(value: Fraction) -> str:
    return f"{float(value):g}"


def _numbers(values: tuple[Fraction, ...]) -> str:
    return " ".join(map(_number, values))


# --- all schedules


def _build_all(
    ranks: int, micro_batches: int, chunks: int | None
) -> Iterator[Schedule]:
    """Every schedule that can have these sizes."""
    for name, kind in SCHEDULES.items():
        fits_ranks = ranks % kind.ranks_multiple == 0
        if fits_ranks and micro_batches % kind.micro_multiple == 0:
            stages = chunks if kind.chunks is None else None
            yield build_schedule(name, ranks, micro_batches, stages)


def _compare(results: list[Simulation]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule")
    for column in (
        "stages",
        "makespan",
        "bubble",
        "of makespan",
        "bubble in span",
        "activations",
        "messages",
    ):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            result.schedule.name,
            str(result.schedule.stages),
            _number(result.makespan),
            _number(result.makespan_bubble),
            f"{float(result.rate):.1%}",
            _number(max(result.span_bubbles)),
            _number(max(result.peaks)),
            str(result.messages),
        )
    return table
