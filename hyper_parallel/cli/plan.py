# SPDX-License-Identifier: Apache-2.0
"""``hyper-parallel plan``: the plan that is found for a Hugging Face folder, without its weights and without ranks.

It exits with 0 if there is a plan, with 2 if the folder, the mesh or both together have none.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from hyper_parallel.cli.checkpoints import application
from hyper_parallel.cli.failures import BadInputError, Debug, told

_EPILOG = """
Examples:

    hyper-parallel plan llama-folder --mesh tp=2

    hyper-parallel plan llama-folder --mesh dp_shard=2,tp=2 --sequence-parallel --save plan.yaml

    hyper-parallel plan llama-folder --mesh tp=2 --load plan.yaml
"""


@application.command(epilog=_EPILOG)
@told
def plan(
    folder: Annotated[
        Path, typer.Argument(help="A Hugging Face folder: its config.json is read.")
    ],
    mesh: Annotated[str, typer.Option(help="Axes and their sizes, as dp=2,tp=2.")],
    sequence_parallel: Annotated[
        bool,
        typer.Option(
            "--sequence-parallel", help="Shard the sequence between the blocks."
        ),
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(help="Write the plan as YAML, in the form of a recipe."),
    ] = None,
    load: Annotated[
        Path | None,
        typer.Option(help="Check a plan that was saved, in the place of a new one."),
    ] = None,
    debug: Debug = False,  # noqa: ARG001 - for the decorator
) -> None:
    """Prints how a model of transformers lies on a mesh, without weights and without ranks."""
    os.environ["HYPER_PARALLEL_PLATFORM"] = "torch"
    axes = _parse_axes(mesh)
    from hyper_parallel.planning.plan import ParallelPlan

    try:
        model = _make_model(folder)
        if load is not None:
            found = ParallelPlan.load(load)
            found.check(model)
        else:
            found = _find(model, axes, sequence_parallel)
    except ValueError as error:
        raise BadInputError(str(error), code=None) from error
    typer.echo(str(found))
    if save is not None:
        found.save(save)


def _parse_axes(mesh: str) -> dict[str, int]:
    from hyper_parallel.planning.roles import ROLES

    pairs = [part.partition("=") for part in mesh.split(",")]
    axes = {name.strip(): size.strip() for name, _, size in pairs}
    if not all(
        name in ROLES and size.isdigit() and size != "0" for name, size in axes.items()
    ):
        raise BadInputError(
            f"--mesh: expected axes {', '.join(ROLES)} with their sizes, as dp=2,tp=2, got {mesh!r}"
        )
    return {name: int(axes[name]) for name in ROLES if name in axes}


def _make_model(folder: Path) -> Any:
    """The model of a folder without data."""
    if not (folder / "config.json").is_file():
        raise BadInputError(f"{folder} has no config.json")
    from hyper_parallel.planning.folder import make_model_without_data

    return make_model_without_data(folder)


def _find(model: Any, axes: dict[str, int], sequence_parallel: bool) -> Any:
    import numpy as np

    from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
    from hyper_parallel.planning import auto_plan

    ranks = np.arange(np.prod(list(axes.values()))).reshape(list(axes.values()))
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=tuple(axes))
    return auto_plan(model, mesh, sequence_parallel=sequence_parallel)
