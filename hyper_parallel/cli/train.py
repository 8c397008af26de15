# SPDX-License-Identifier: Apache-2.0
"""``hyper-parallel train``: trains from a recipe, on ranks of its own or on those of a launcher.

It exits with 0 when all steps are done, 1 where the run failed, 2 where the recipe is bad, 3 where a signal stopped it.
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from hyper_parallel.cli.checkpoints import application

_EPILOG = """
Examples:

    hyper-parallel train demo.yaml

    hyper-parallel train demo.yaml mesh.tp=2 optimizer.lr=3e-4 --nproc 4

    hyper-parallel train demo.yaml --resume auto
"""


@application.command(epilog=_EPILOG)
def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe: a YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys of it, changed."),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks on this machine; else as many as the mesh has."
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|FOLDER",
            help="Go on: from the newest checkpoint of the run, or of a folder.",
        ),
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Tell errors with all tracebacks.")
    ] = False,
) -> None:
    """Trains a model as a recipe says."""
    raise typer.Exit(run(recipe, overrides or [], nproc, resume, debug=debug))


def run(
    path: Path,
    overrides: list[str],
    nproc: int | None,
    resume: str | None,
    *,
    debug: bool = False,
) -> int:
    """What the command does; its exit code."""
    from hyper_parallel.recipe import RecipeError, read_recipe
    from hyper_parallel.recipe.launch import JobError, describe_failures, launch
    from hyper_parallel.recipe.rank import BAD_RECIPE, FAILED

    world_size = _find_world_size()
    try:
        recipe = read_recipe(path, overrides, world_size or nproc)
        if world_size is None and recipe.ranks > 1:
            return launch(recipe, overrides, resume)
        return _here(recipe, resume)
    except RecipeError as error:
        typer.echo(f"error: {error}", err=True)
        if debug:
            traceback.print_exc()
        return BAD_RECIPE
    except JobError as failure:
        if failure.recipe is not None:
            typer.echo(f"error: {failure.recipe}", err=True)
        else:
            lines = describe_failures(failure.failures, with_all_tracebacks=debug)
            typer.echo("\n".join(lines), err=True)
        return failure.exit_code
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        return FAILED


def _find_world_size() -> int | None:
    """The ranks of the job that a launcher has made this process part of; None without one."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return int(os.environ["MS_WORKER_NUM"]) if "MS_WORKER_NUM" in os.environ else None


def _here(recipe: Any, resume: str | None) -> int:
    """Trains in this process."""
    from hyper_parallel.recipe import RecipeError
    from hyper_parallel.recipe.rank import FAILED, FINISHED, STOPPED

    os.environ["HYPER_PARALLEL_PLATFORM"] = recipe.framework
    from hyper_parallel.platform import get_platform
    from hyper_parallel.recipe.training import train as train_here

    try:
        outcome = train_here(recipe, resume)
        get_platform().destroy_process_group()
    except RecipeError:
        raise
    except Exception:  # noqa: BLE001 - of the user's model, most often
        traceback.print_exc()
        return FAILED
    return STOPPED if outcome.stopped else FINISHED
