# SPDX-License-Identifier: Apache-2.0
"""Recipes with sequences shared by ranks: the losses of one process on every mesh, and errors before any rank."""

import json
import tempfile
from pathlib import Path

import pytest
import torch

from hyper_parallel import init_device_mesh
from hyper_parallel.cli.verify import on_rank
from hyper_parallel.recipe import RecipeError, read_recipe
from hyper_parallel.recipe.build import build
from hyper_parallel.recipe.training import train
from hyper_parallel.testing import on_ranks

RECIPE = Path(__file__).resolve().parents[2] / "examples" / "recipes" / "demo.yaml"
SMALL = [
    "model.arguments={dim: 16, layers: 2, heads: 4, kv_heads: 2, hidden: 24, context: 16}",
    "data={corpus: python, batch: 4, length: 11}",
    "precision=float64",
    "checkpoints.every=0",
    "schedule={kind: constant}",
    "folder=null",
]


def facts_of(*overrides):
    """The losses and norms of some steps, and the loss on held-out text."""
    recipe = read_recipe(RECIPE, [*SMALL, *overrides])
    mesh = None
    if recipe.ranks > 1:
        mesh = init_device_mesh(
            "cpu", recipe.mesh_shape, mesh_dim_names=tuple(recipe.axes)
        )
    job = build(recipe, mesh)
    parameters = [p for p in job.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, 1e-2)
    found = [job.train(step, optimizer, 0.5) for step in range(2)]
    return [(one["loss"], one["norm"]) for one in found], job.evaluate(1)


@on_ranks(4)
def test_losses_and_norms_are_those_of_one_process():
    expected = facts_of()
    for mesh, *more in (
        ("{cp: 4}",),
        ("{cp: 2, tp: 2}", "context.method=ulysses"),
        ("{dp: 2, cp: 2}", "context={method: ring, load_balance: false}"),
        ("{dp_shard: 2, cp: 2}",),
        ("{pp: 2, cp: 2}", "pipeline.micro_batches=2"),
    ):
        torch.testing.assert_close(facts_of(f"mesh={mesh}", *more), expected)


@on_ranks(4)
def test_verify_compares_sequences_with_one_process():
    in_order = "context={method: ring, load_balance: false}"
    for mesh, *more in (
        ("{cp: 4}",),
        ("{pp: 2, cp: 2}",),
        ("{cp: 2, tp: 2}", in_order, "plan.arguments.sequence_parallel=true"),
    ):
        recipe = [*SMALL, f"mesh={mesh}", *more]
        axes = read_recipe(RECIPE, recipe).axes
        report = on_rank(axes, (str(RECIPE), recipe, 0, None))
        assert report.ok, str(report)


@on_ranks(4)
def test_a_training_goes_on_with_other_ranks_per_sequence():
    folders = [tempfile.mkdtemp()] if torch.distributed.get_rank() == 0 else [None]
    torch.distributed.broadcast_object_list(folders)

    def run(name, mesh, steps, resume=None):
        folder = Path(folders[0]) / name
        overrides = [f"folder={folder}", f"mesh={mesh}", f"steps={steps}"]
        train(read_recipe(RECIPE, [*SMALL, *overrides]), resume)
        lines = (folder / "log.jsonl").read_text().splitlines()
        entries = map(json.loads, lines)
        return [entry["loss"] for entry in entries if "loss" in entry]

    expected = run("whole", "{dp: 4}", 3)
    run("run", "{dp: 2, cp: 2}", 1)
    run("run", "{cp: 4}", 2, resume="auto")
    found = run("run", "{cp: 2, tp: 2}", 3, resume="auto")
    assert found == pytest.approx(expected, rel=1e-9)
    torch.distributed.barrier()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["context.method=ring"], "no sequence is shared by ranks without mesh.cp"),
        (["mesh.cp=4", "context.ulysses_degree=3"], "3 does not divide the 4 ranks"),
        (["mesh.cp=4", "data.length=3"], "3 tokens cannot be shared by the 4 ranks"),
    ],
)
def test_what_does_not_go_together_is_told_before_any_rank_starts(overrides, message):
    with pytest.raises(RecipeError, match=message):
        read_recipe(RECIPE, [*SMALL, *overrides], 4)
