# SPDX-License-Identifier: Apache-2.0
"""``hyper-parallel verify``: one step of a recipe on one process and on a mesh, compared.

It exits with 0 where they agree, with 1 where they part or the step fails, with 2 where the recipe or the mesh is bad.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hyper_parallel.cli.checkpoints import application
from hyper_parallel.cli.failures import WRONG, BadInputError, Debug, told

if TYPE_CHECKING:
    from hyper_parallel.verification import Report

_EPILOG = """
Examples:

    hyper-parallel verify demo.yaml --mesh dp=2,tp=2

    hyper-parallel verify demo.yaml --mesh tp=4 precision=float64 data.batch=2

    torchrun --nproc-per-node 4 $(which hyper-parallel) verify demo.yaml --mesh dp=2,tp=2
"""


@application.command(epilog=_EPILOG)
@told
def verify(
    recipe: Annotated[Path, typer.Argument(help="A recipe: a YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys of it, changed."),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Axes and their sizes, as dp=2,tp=2; else those of the recipe."
        ),
    ] = None,
    step: Annotated[
        int, typer.Option(min=0, help="The step whose batch is taken.")
    ] = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="The allowed difference, in units of the largest element; else by dtype."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds for all of it.")
    ] = 600.0,
    table: Annotated[
        bool,
        typer.Option(
            "--table", help="List every gradient with its largest difference."
        ),
    ] = False,
    debug: Debug = False,  # noqa: ARG001 - for the decorator
) -> None:
    """Compares one step on a mesh with the same on one process: loss, every gradient; names where they part first."""
    report = _report(
        recipe, [*(overrides or []), *_mesh_keys(mesh)], step, tolerance, timeout
    )
    from hyper_parallel.platform import get_platform

    if get_platform().get_rank() == 0:
        typer.echo(str(report))
        for text in ([report.table()] if table else []) + [report.ledger.table()]:
            typer.echo(f"\n{text}")
    get_platform().destroy_process_group()
    if not report.ok:
        raise typer.Exit(WRONG)


def _mesh_keys(mesh: str | None) -> list[str]:
    """The mesh as keys of a recipe; an axis that is not named has one rank."""
    if mesh is None:
        return []
    from hyper_parallel.planning.roles import ROLES

    pairs = {
        name.strip(): size.strip()
        for name, _, size in (part.partition("=") for part in mesh.split(","))
    }
    wrong = [
        name
        for name, size in pairs.items()
        if name not in ROLES or not size.isdigit() or int(size) < 1
    ]
    if wrong:
        raise BadInputError(
            f"--mesh: expected axes {', '.join(ROLES)} with their sizes, as dp=2,tp=2, got {mesh!r}"
        )
    return [f"mesh.{name}={pairs.get(name, 1)}" for name in ROLES]


def _report(
    path: Path, overrides: list[str], step: int, tolerance: float | None, timeout: float
) -> Report:
    from hyper_parallel.recipe import RecipeError, read_recipe

    try:
        recipe = read_recipe(path, overrides)
        if recipe.ranks == 1:
            raise BadInputError(
                f"{path}: the mesh has one rank; say how many, as --mesh dp=2,tp=2"
            )
        os.environ["HYPER_PARALLEL_PLATFORM"] = recipe.framework
        from hyper_parallel.ranks import RankError
        from hyper_parallel.verification.api import joined, on_new_ranks

        arguments = (str(path.resolve()), overrides, step, tolerance)
        try:
            return (
                on_rank(recipe.axes, arguments)
                if joined(recipe.ranks)
                else on_new_ranks(on_rank, recipe.axes, arguments, timeout)
            )
        except RankError as error:
            raise error.__cause__ or error from None
    except RecipeError as error:
        raise BadInputError(str(error), code=None) from error


def on_rank(
    axes: dict[str, int], arguments: tuple[str, list[str], int, float | None]
) -> Any:
    """The report of one rank."""
    path, overrides, step, tolerance = arguments
    from hyper_parallel.recipe import read_recipe
    from hyper_parallel.recipe.activations import keep_all_activations
    from hyper_parallel.recipe.build import build
    from hyper_parallel.recipe.pipeline import PipelineJob
    from hyper_parallel.recipe.pipeline_order import build_order
    from hyper_parallel.verification.api import compare, mesh_of
    from hyper_parallel.verification.stages import Part
    from hyper_parallel.verification.step import Task

    recipe, mesh = read_recipe(path, overrides), mesh_of(axes)

    def plain() -> Task:
        job = build(keep_all_activations(recipe), None)
        loss: Callable[..., Any] = job.loss
        if "pp" in axes:
            micros = build_order(recipe).micro_batches
            loss = job.loss_by_micro_batches(recipe.data_ranks, micros)
        return Task(job.model, job.batch(step, whole=True), loss)

    def parallel() -> Task:
        job = build(recipe, mesh)
        if not isinstance(job, PipelineJob):
            return Task(job.model, job.batch(step), job.loss)
        part = Part(job.modules, job.plan.stage_of, lambda: job.schedule.micro_batch)
        return Task(job.model, job.batch(step), job.run_micro_batches, part=part)

    return compare(plain, parallel, mesh, recipe.seed, tolerance)
