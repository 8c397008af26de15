# SPDX-License-Identifier: Apache-2.0
"""Recipes with stages: the losses of one process on every mesh, resume on another one, and errors before any rank."""

import json
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from hyper_parallel import init_device_mesh
from hyper_parallel.cli.verify import on_rank
from hyper_parallel.recipe import RecipeError, read_recipe
from hyper_parallel.recipe.build import build
from hyper_parallel.recipe.pipeline import PipelineJob
from hyper_parallel.recipe.training import train
from hyper_parallel.testing import on_ranks

RECIPE = Path(__file__).resolve().parents[2] / "examples" / "recipes" / "demo.yaml"
SMALL = [
    "model.arguments={dim: 16, layers: 4, heads: 4, kv_heads: 2, hidden: 24, context: 16}",
    "data={corpus: python, batch: 4, length: 8}",
    "precision=float64",
    "checkpoints.every=0",
    "schedule={kind: constant}",
    "optimizer.clip=0.5",
    "steps=4",
]


def job_of(*overrides):
    recipe = read_recipe(RECIPE, [*SMALL, "folder=null", *overrides])
    if recipe.ranks == 1:
        return build(recipe, None)
    mesh = init_device_mesh("cpu", recipe.mesh_shape, mesh_dim_names=tuple(recipe.axes))
    return build(recipe, mesh)


def facts_of(job, steps):
    """The losses and norms of some steps, and the loss on held-out text."""
    parameters = [p for p in job.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, 1e-2)
    found = []
    for step in range(steps):
        facts = job.train(step, optimizer, 0.5)
        found.append((facts["loss"], facts["norm"]))
    return [*found, job.evaluate(2)]


@on_ranks(4, timeout=180)
def test_losses_and_norms_are_those_of_one_process():
    expected = {steps: facts_of(job_of(), steps) for steps in (3, 10)}
    for steps, mesh, *more in (
        (3, "{pp: 4}"),
        (3, "{pp: 2, dp: 2}", "pipeline={schedule: GPipe, micro_batches: 2}"),
        (10, "{pp: 2, tp: 2}", "pipeline.schedule=ZBV"),
        (10, "{pp: 2, dp_shard: 2}", "pipeline.schedule=interleaved"),
        (10, "{pp: 2, dp_shard: 2}", "recompute=full"),
    ):
        job = job_of(f"mesh={mesh}", *more)
        torch.testing.assert_close(facts_of(job, steps), expected[steps])


@on_ranks(4)
def test_a_run_goes_on_on_other_stages():
    folders = [tempfile.mkdtemp()] if torch.distributed.get_rank() == 0 else [None]
    torch.distributed.broadcast_object_list(folders)

    def run(name, mesh, steps, *more, resume=None):
        folder = Path(folders[0]) / name
        overrides = [f"folder={folder}", f"mesh={mesh}", f"steps={steps}", *more]
        overrides.append("model.arguments.tied=true")
        train(read_recipe(RECIPE, [*SMALL, *overrides]), resume)
        lines = (folder / "log.jsonl").read_text().splitlines()
        return [entry for entry in map(json.loads, lines) if "loss" in entry]

    run("run", "{pp: 2, dp: 2}", 2, "pipeline.schedule=ZBV")
    run("run", "{pp: 4}", 4, resume="auto")
    run("run", "{dp_shard: 4}", 5, resume="auto")
    run("run", "{pp: 2, dp_shard: 2}", 6, resume="auto")
    run("run", "{cp: 4}", 7, resume="auto")
    log = run("run", "{cp: 2, dp_shard: 2}", 8, resume="auto")
    assert all(0 <= part <= 1 for entry in log[2:4] for part in entry["idle"])
    assert [len(entry.get("idle", ())) for entry in log] == [2, 2, 4, 4, 0, 2, 0, 0]
    expected = run("whole", "{dp: 4}", 8)
    assert [entry["loss"] for entry in log] == pytest.approx(
        [entry["loss"] for entry in expected], rel=1e-10
    )
    torch.distributed.barrier()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pipeline.schedule=GPipe"], "no stages without mesh.pp"),
        (["mesh.pp=2", "pipeline.schedule=1F2B"], "unknown pipeline schedule '1F2B'"),
        (["mesh.pp=2", "pipeline.schedule=mine.csv"], "mine.csv"),
        (["mesh.pp=4", "pipeline.micro_batches=3"], "4 sequences cannot be divided"),
        (["mesh.pp=2", "mesh.dp=2", "pipeline.micro_batches=4"], "2 sequences cannot"),
        (["mesh.pp=2", "pipeline={schedule: DualPipe, micro_batches: 1}"], "nearest: 2"),
        (["mesh.pp=2", "pipeline.stages_per_rank=2"], "1F1B has 1 stages per rank"),
        (["mesh.pp=2", "pipeline.split=[blocks.1, blocks.2]"], "2 stages need 1 names"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_told_before_any_rank_starts(overrides, message):
    with pytest.raises(RecipeError, match=message):
        read_recipe(RECIPE, [*SMALL, "folder=null", *overrides], 4)


@on_ranks(2)
def test_stages_that_a_model_cannot_have_are_told_on_every_rank():
    for key, value, message in (
        ("split", "[blocks.9]", "blocks.9"),
        ("last", "[hed]", "hed"),
    ):
        with pytest.raises(RecipeError, match=message):
            job_of("mesh={pp: 2}", f"pipeline.{key}={value}")
    with pytest.raises(RecipeError, match="can be 1 to 4 stages, got 6"):
        job_of("mesh={pp: 2}", "pipeline={schedule: LoopedBFS, stages_per_rank: 3}")


@on_ranks(2)
def test_a_schedule_of_ones_own():
    order = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    file = Path(tempfile.mkdtemp()) / "mine.csv"
    file.write_text(order)
    job = job_of("mesh={pp: 2}", f"pipeline.schedule={file}")
    alone = facts_of(job_of(), 1)
    optimizer = torch.optim.AdamW(job.model.parameters(), 1e-2)
    assert job.train(0, optimizer, 0.5)["loss"] == pytest.approx(alone[0][0])
    own = torch.distributed.get_rank()
    ran = [str(step) for step in job.schedule.trace if step.type.value in ("F", "B")]
    assert ran == order.splitlines()[own].split(",")


def verify(*overrides):
    """The report of this rank for the first step of the recipe."""
    recipe = [*SMALL, "folder=null", *overrides]
    axes = read_recipe(RECIPE, recipe).axes
    return on_rank(axes, (str(RECIPE), recipe, 0, None))


@on_ranks(4)
def test_verify_compares_stages_with_one_process():
    for mesh, *more in (
        ("{pp: 4}", "model.arguments.tied=true"),
        ("{pp: 2, dp: 2}", "pipeline={schedule: ZBV, micro_batches: 2}"),
        ("{pp: 2, tp: 2}", "recompute=full"),
        ("{pp: 2, dp_shard: 2}", "pipeline.micro_batches=1"),
    ):
        report = verify(f"mesh={mesh}", *more)
        assert report.ok, str(report)
        assert report.loss == pytest.approx(report.true_loss, rel=1e-12)
        names = {one.name for one in report.differences if one.kind == "gradient"}
        assert "blocks.0.mlp.up.weight" in names
        assert "norm.weight" in names


@contextmanager
def hooked(name, hook):
    """A context in which jobs hook a module of theirs: ``hook(job, output)`` may return another output."""
    real = PipelineJob.run_micro_batches

    def run(job, *args):
        if name in job.modules:
            job.modules[name].register_forward_hook(lambda *call: hook(job, call[-1]))
        return real(job, *args)

    PipelineJob.run_micro_batches = run
    try:
        yield
    finally:
        PipelineJob.run_micro_batches = real


@on_ranks(2)
def test_verify_names_the_stage_and_the_micro_batch_that_part():
    def double(job, output):
        return output * (1 + (job.schedule.micro_batch == 1))

    with hooked("blocks.3.mlp.down", double):  # seen from outside
        report = verify("mesh={pp: 2}")
    assert not report.ok
    assert report.first_module == "blocks.3.mlp"
    assert "stage 1, micro batch 1" in str(report.first), str(report)


@on_ranks(2)
def test_verify_tells_what_a_stage_has_raised():
    def fail(job, output):
        raise ValueError("too hot")

    with hooked("blocks.3", fail):
        report = verify("mesh={pp: 2}")
    assert "rank 1 failed in 1F0" in report.error
    assert "too hot" in report.error
    assert report.is_consequence == (torch.distributed.get_rank() == 0)


@on_ranks(2)
def test_verify_finds_gradients_that_are_not_summed():
    with hooked(
        "blocks.1",
        lambda job, output: output.detach() if job.schedule.micro_batch else None,
    ):
        report = verify("mesh={pp: 2}")
    assert not report.ok
    assert {one.name.split(".")[0] for one in report.wrong} >= {"embed", "blocks"}
