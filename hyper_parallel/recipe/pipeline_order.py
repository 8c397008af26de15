# SPDX-License-Identifier: Apache-2.0
"""The pipeline schedule that a recipe names, and what is wrong with it; without a framework.

build_order(recipe)                 the computations of every rank
"""

from __future__ import annotations

from collections.abc import Iterator

from hyper_parallel.core.pipeline_parallel.orders import Schedule
from hyper_parallel.core.pipeline_parallel.schedules import build_schedule
from hyper_parallel.core.pipeline_parallel.text import read_csv
from hyper_parallel.recipe.errors import Problem
from hyper_parallel.recipe.schema import Recipe


def build_order(recipe: Recipe) -> Schedule:
    """The computations of every rank in the recipe's schedule."""
    wanted = recipe.pipeline
    if wanted.schedule.endswith(".csv"):
        return read_csv(recipe.input_path(wanted.path))
    count = wanted.micro_batches or recipe.rows_of_rank
    ranks = recipe.axes["pp"]
    return build_schedule(wanted.schedule, ranks, count, wanted.stages_per_rank)


def check_order(recipe: Recipe) -> Iterator[Problem]:
    """Whether the keys of ``pipeline`` go with the mesh and with the batch."""
    wanted = recipe.pipeline
    if "pp" not in recipe.axes:
        for key in sorted(wanted.model_fields_set):
            yield Problem(f"pipeline.{key}", "there are no stages without mesh.pp")
        return
    try:
        order = build_order(recipe)
    except (OSError, ValueError) as error:
        yield Problem("pipeline", str(error))
        return
    if order.ranks != recipe.axes["pp"]:
        told = f"{wanted.schedule} is for {order.ranks} ranks"
        yield Problem("mesh.pp", f"{told}, got {recipe.axes['pp']}")
    count, rows = order.micro_batches, recipe.rows_of_rank
    if wanted.micro_batches not in (None, count):
        told = f"{wanted.schedule} is for {count} micro batches"
        yield Problem("pipeline.micro_batches", f"{told}, got {wanted.micro_batches}")
    if rows % count:
        told = f"{rows} sequences cannot be divided into {count} micro batches"
        yield Problem("pipeline.micro_batches", f"{told} of one size")
    if wanted.split is not None and len(wanted.split) != order.stages - 1:
        told = f"{order.stages} stages need {order.stages - 1} names of blocks"
        yield Problem("pipeline.split", f"{told}, got {len(wanted.split)}")
