# SPDX-License-Identifier: Apache-2.0
"""Recipes with stages on every framework: losses, norms and held-out losses are those of one process."""

from pathlib import Path

import frame
import pytest

from hyper_parallel import init_device_mesh
from hyper_parallel.platform import get_platform
from hyper_parallel.recipe import read_recipe
from hyper_parallel.recipe.build import build
from hyper_parallel.recipe.training import make_optimizer
from hyper_parallel.testing import on_ranks

platform = get_platform()
RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"
RECIPE = RECIPES / ("demo.yaml" if frame.IS_TORCH else "mindspore.yaml")
SMALL = [
    "model.arguments={dim: 16, layers: 3, heads: 2, kv_heads: 1, hidden: 24, context: 8}",
    "data={corpus: python, batch: 4, length: 8}",
    "optimizer.clip=0.5",
    "folder=null",
    "checkpoints.every=0",
]


def train(*overrides):
    recipe = read_recipe(RECIPE, [*SMALL, *overrides])
    mesh = None
    if recipe.ranks > 1:
        mesh = init_device_mesh(
            platform.device_type(), recipe.mesh_shape, mesh_dim_names=tuple(recipe.axes)
        )
    job = build(recipe, mesh)
    optimizer = make_optimizer(job.model, recipe.optimizer)
    facts = [job.train(step, optimizer, 0.5) for step in range(2)]
    return [(one["loss"], one["norm"]) for one in facts], job.evaluate(1)


@on_ranks(2)
def test_stages_train_as_one_process():
    steps, held_out = train()
    for schedule in ("1F1B", "ZB-H1"):
        own_steps, own_held_out = train("mesh.pp=2", f"pipeline.schedule={schedule}")
        assert own_held_out == pytest.approx(held_out, rel=1e-5)
        for mine, expected in zip(own_steps, steps, strict=True):
            assert mine == pytest.approx(expected, rel=1e-4)
