# SPDX-License-Identifier: Apache-2.0
"""A recipe's model in stages along the mesh axis ``pp``.

job = build_pipeline(recipe, mesh)            mesh["pp"] has 2 or more ranks
facts = job.train(0, optimizer, clip=1.0)     {"loss": 4.2, "norm": 0.7, "idle": [0.1, 0.2], "bubble": 0.15}

Each rank draws the parameters of its own stages alone. The other axes of the mesh lie within a stage.
"""

from __future__ import annotations

import dataclasses
import functools
from contextlib import nullcontext
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.expert_parallel import MoE, collect_aux_losses
from hyper_parallel.core.modules.blocks import modules_by_name
from hyper_parallel.core.pipeline_parallel.scheduler import PipelineScheduleRuntime
from hyper_parallel.core.pipeline_parallel.split_stage import build_stages
from hyper_parallel.core.pipeline_parallel.stage_plan import StagePlan, plan_stages
from hyper_parallel.core.training import (
    pipeline_loss,
    pipeline_step,
    run_micro_batches,
)
from hyper_parallel.core.training.evaluation import evaluating
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.recipe.build import (
    find_plan,
    make_model,
    prepare_model,
    read_corpus,
)
from hyper_parallel.recipe.errors import Problem, RecipeError
from hyper_parallel.recipe.job import Job, compute_loss, place_rows
from hyper_parallel.recipe.pipeline_order import build_order
from hyper_parallel.recipe.schema import Recipe

platform = get_platform()


@dataclasses.dataclass(frozen=True)
class PipelineJob(Job):
    """A model of which this rank has some stages, on a mesh of all axes."""

    schedule: PipelineScheduleRuntime
    plan: StagePlan
    loss_dtype: str

    @property
    def modules(self) -> dict[str, Any]:
        """The modules that compute on this rank, by their names in the whole model."""
        found = {}
        for stage in self.schedule.stages:
            names = self.plan.pieces_of(stage.stage_index)
            for piece, module in zip(names, stage.modules, strict=True):
                for name, inner in modules_by_name(module).items():
                    found[f"{piece}.{name}" if name else piece] = inner
        return found

    def run_micro_batches(self, _: Any, ids: Any, targets: Any) -> Any:
        """Forward and backward of a step; the mean loss over the tokens of the whole batch."""
        loss, _ = run_micro_batches(self.schedule, (ids,), targets)
        return platform.tensor(np.array(loss, self.loss_dtype))

    def train(self, step: int, optimizer: Any, clip: float | None) -> dict[str, Any]:
        """Does a step; returns what is told of it."""
        ids, targets = self.batch(step)
        with collect_aux_losses() as aux:
            done = pipeline_step(
                self.schedule, self.model, optimizer, (ids,), targets, clip
            )
        for name, _ in aux.losses:
            _refuse_loss(name)
        bubble = sum(done.idle) / len(done.idle)
        idle = [round(part, 4) for part in done.idle]
        return {"loss": done.loss, "norm": done.norm, "bubble": bubble, "idle": idle}

    def evaluate(self, batches: int) -> float:
        """The mean loss on text that is never trained on."""
        losses = []
        for number in range(batches):
            ids, targets = self.held_out(number)
            with evaluating(self.model):
                losses.append(pipeline_loss(self.schedule, (ids,), targets))
        return sum(losses) / batches


def _check_experts(model: Any) -> None:
    """Refuses losses within stages while every rank has the whole model, so that all refuse and nothing is trained."""
    for _, module in platform.get_cells_and_names(model):
        if isinstance(module, MoE) and module.load_balance_coeff is not None:
            _refuse_loss("load balance")


def _refuse_loss(name: str) -> None:
    raise coded(
        RuntimeError,
        "HP707",
        f"pipeline: the loss {name!r} of a module within a stage would not be trained; train without mesh.pp, or "
        "balance experts by experts.bias_rate",
    )


def build_pipeline(recipe: Recipe, mesh: DeviceMesh) -> PipelineJob:
    """The stages of a recipe's model that this rank has, on the other axes of the mesh, and their schedule."""
    order = build_order(recipe)
    own = order.mapping.stages_of(mesh.get_local_rank("pp"))
    inner = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "pp")]
    is_read = recipe.model.huggingface is not None and recipe.model.weights
    without_memory = platform.init_on_device(platform.meta_device)
    with nullcontext() if is_read else without_memory:
        model = make_model(recipe)
    _check_experts(model)
    found = find_plan(recipe, model, mesh) if recipe.finds_plan else None
    plan = _divide(recipe, model, order.stages, found.last if found else ())
    styles = found.styles if found else None
    plan.keep(model, own)
    if not is_read:
        platform.init_parameters(model, 0)
        platform.prepare_module(model, recipe.precision.parameters)
    prepare_model(recipe, model, inner, styles)
    stages = build_stages(
        model,
        plan,
        own,
        forward=lambda ids: model(place_rows(inner, ids)),
        group=mesh.get_group("pp"),
        mesh=inner,
    )
    schedule = PipelineScheduleRuntime(
        stages,
        order.micro_batches,
        schedule=order,
        loss_fn=functools.partial(compute_loss, inner),
    )
    dtype = "float64" if recipe.precision.parameters == "float64" else "float32"
    return PipelineJob(
        model, mesh, read_corpus(recipe, mesh), schedule, plan, loss_dtype=dtype
    )


def _divide(
    recipe: Recipe, model: Any, stages: int, last: tuple[str, ...]
) -> StagePlan:
    """The stages; ``last``: what runs behind the blocks, where the recipe does not say so."""
    wanted = recipe.pipeline
    try:
        return plan_stages(
            model,
            stages,
            begin=wanted.split,
            first=wanted.first,
            last=wanted.last or last,
        )
    except ValueError as error:
        raise RecipeError(recipe.path, [Problem("pipeline", str(error))]) from error
