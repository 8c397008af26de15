# SPDX-License-Identifier: Apache-2.0
"""Recipes with sharded state: the losses of one process, also when a run goes on with another kind of data parallel."""

import json
import tempfile
from pathlib import Path

import pytest
import torch

from hyper_parallel import CommunicationLedger, init_device_mesh, parallel_table
from hyper_parallel.core.fully_shard import HSDPModule
from hyper_parallel.core.training import training_step
from hyper_parallel.recipe import read_recipe
from hyper_parallel.recipe.build import build
from hyper_parallel.recipe.training import train
from hyper_parallel.testing import on_ranks

RECIPE = Path(__file__).resolve().parents[2] / "examples" / "recipes" / "demo.yaml"
SMALL = [
    "model.arguments={dim: 16, layers: 2, heads: 4, kv_heads: 2, hidden: 24, context: 16}",
    "data={corpus: python, batch: 4, length: 8}",
    "precision=float64",
    "checkpoints.every=0",
    "schedule={kind: constant}",
    "steps=4",
]


def losses_of(job, steps=4):
    parameters = [p for p in job.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, 1e-2)
    return [
        training_step(
            job.model,
            optimizer,
            lambda step=step: job.loss(job.model, *job.batch(step)),
            1.0,
        )
        for step in range(steps)
    ]


@on_ranks(4)
def test_losses_and_norms_are_those_of_one_process():
    single = build(read_recipe(RECIPE, [*SMALL, "folder=null"]), None)
    expected = losses_of(single)
    for mesh in (
        "{dp_shard: 4}",
        "{dp_replicate: 2, dp_shard: 2}",
        "{dp_shard: 2, tp: 2}",
    ):
        recipe = read_recipe(RECIPE, [*SMALL, "folder=null", f"mesh={mesh}"])
        axes = init_device_mesh(
            "cpu", recipe.mesh_shape, mesh_dim_names=tuple(recipe.axes)
        )
        job = build(recipe, axes)
        assert isinstance(job.model.blocks[1], HSDPModule)
        torch.testing.assert_close(losses_of(job), expected)
        assert "fully_shard" in str(parallel_table(job.model))


@on_ranks(2)
def test_recompute_gathers_no_more__and_units_are_chosen():
    counts = []
    for recompute in ("none", "full"):
        overrides = ["folder=null", "mesh={dp_shard: 2}", f"recompute={recompute}"]
        recipe = read_recipe(
            RECIPE, [*SMALL, *overrides, "sharding.units=['blocks.*']"]
        )
        axes = init_device_mesh(
            "cpu", recipe.mesh_shape, mesh_dim_names=tuple(recipe.axes)
        )
        job = build(recipe, axes)
        losses_of(job, 1)
        with CommunicationLedger(axes) as ledger:
            job.loss(job.model, *job.batch(0)).backward()
        counts.append(ledger.counts())
        assert counts[-1]["reduce_scatter_tensor"] == 3
    gathers = [one["all_gather_into_tensor"] for one in counts]
    # Three units, two of them again in backward, and once for the loss.
    assert gathers == [6, 6], counts


@on_ranks(2)
def test_mixed_precision_of_units():
    overrides = ["mesh={dp_shard: 2}", "precision={compute: bfloat16, reduce: float32}"]
    small = [one for one in SMALL if not one.startswith("precision")]
    recipe = read_recipe(RECIPE, [*small, "folder=null", *overrides])
    axes = init_device_mesh("cpu", recipe.mesh_shape, mesh_dim_names=tuple(recipe.axes))
    job = build(recipe, axes)
    seen = []
    job.model.blocks[0].attention.wo.register_forward_pre_hook(
        lambda module, args: seen.append((module.weight.dtype, args[0].dtype))
    )
    losses = losses_of(job, 2)
    assert seen[0] == (torch.bfloat16, torch.bfloat16)
    assert all(parameter.dtype == torch.float32 for parameter in job.model.parameters())
    single = losses_of(build(read_recipe(RECIPE, [*small, "folder=null"]), None), 2)
    torch.testing.assert_close(losses, single, rtol=0.05, atol=0.05)


@on_ranks(2)
def test_a_run_goes_on_from_replicated_to_sharded_and_back():
    folders = [tempfile.mkdtemp()] if torch.distributed.get_rank() == 0 else [None]
    torch.distributed.broadcast_object_list(folders)
    folder = Path(folders[0]) / "run"

    def run(mesh, steps, resume=None):
        overrides = [f"folder={folder}", f"mesh={mesh}", f"steps={steps}"]
        train(read_recipe(RECIPE, [*SMALL, *overrides]), resume)

    run("{dp: 2}", 2)
    run("{dp_shard: 2}", 4, "auto")
    run("{dp: 2}", 6, "auto")
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    whole = Path(folders[0]) / "whole"
    folder = whole
    run("{dp: 2}", 6)
    true = [json.loads(line) for line in (whole / "log.jsonl").read_text().splitlines()]
    mine = {entry["step"]: entry["loss"] for entry in log if "loss" in entry}
    expected = {entry["step"]: entry["loss"] for entry in true if "loss" in entry}
    assert len(expected) == 6
    assert mine == pytest.approx(expected, rel=1e-10)
    torch.distributed.barrier()
