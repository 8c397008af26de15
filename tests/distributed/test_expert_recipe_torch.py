# SPDX-License-Identifier: Apache-2.0
"""Recipes with experts that ranks share: the losses of one process on every mesh."""

import json
import re
import tempfile
from pathlib import Path

import pytest
import torch

from hyper_parallel import init_device_mesh
from hyper_parallel.cli.verify import on_rank
from hyper_parallel.core.dtensor import routes
from hyper_parallel.core.expert_parallel import AllToAllTokenDispatcher, crossing
from hyper_parallel.core.training.evaluation import evaluating
from hyper_parallel.recipe import RecipeError, read_recipe
from hyper_parallel.recipe.build import build
from hyper_parallel.recipe.training import train
from hyper_parallel.testing import on_ranks

TESTS = Path(__file__).resolve().parents[1]
RECIPE = TESTS.parent / "examples" / "recipes" / "demo.yaml"
SMALL = [
    f"model={{file: {TESTS / 'mixture.py'}, class: Mixture, arguments: {{dim: 8, experts: 4}}}}",
    "data={corpus: python, batch: 4, length: 6}",
    "precision=float64",
    "checkpoints.every=0",
    "schedule={kind: constant}",
    "folder=null",
]
MOE = "blocks.*.moe"
SHARED = f'"{MOE}.shared_expert.w[13]": colwise, "{MOE}.shared_expert.w2": rowwise'
PLAN = f'plan={{styles: {{"{MOE}.experts": experts, {SHARED}}}}}'
PARTS = PLAN.replace(": experts,", ": parts_of_experts,")


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
    expected = facts_of(PLAN)
    for mesh, plan, *more in (
        ("{ep: 4}", PLAN),
        ("{dp: 2, ep: 2}", PLAN),
        ("{ep: 2, tp: 2}", PLAN),
        ("{ep: 2, tp: 2}", PARTS),
        ("{dp_shard: 2, ep: 2}", PLAN),
        ("{pp: 2, ep: 2}", PLAN, "pipeline.micro_batches=2"),
    ):
        torch.testing.assert_close(facts_of(f"mesh={mesh}", plan, *more), expected)


@on_ranks(4)
def test_balance_is_that_of_one_process_on_every_mesh():
    """The loss of balance and the bias, both of the tokens of all ranks, whatever divides these."""
    balanced = ["model.arguments.balance=0.1", "experts.bias_rate=0.05"]
    expected = facts_of("plan={}", *balanced)
    for mesh, plan in (
        ("{dp: 2, cp: 2}", "plan={}"),
        ("{cp: 2, ep: 2}", PLAN),
        ("{ep: 2, tp: 2}", PARTS),
    ):
        torch.testing.assert_close(facts_of(f"mesh={mesh}", plan, *balanced), expected)


@on_ranks(4)
def test_verify_compares_experts_with_one_process():
    for mesh in ("{dp: 2, ep: 2}", "{pp: 2, ep: 2}"):
        recipe = [*SMALL, PLAN, f"mesh={mesh}"]
        axes = read_recipe(RECIPE, recipe).axes
        report = on_rank(axes, (str(RECIPE), recipe, 0, None))
        assert report.ok, str(report)


def scale_gradients(monkeypatch):
    """Gradients of experts are multiplied by the number of ranks."""
    right = crossing._shard_for

    def shard_for(tensor, layout, used):
        shard = right(tensor, layout, used)
        return shard * 2 - shard.detach() if shard.ndim == 3 else shard

    monkeypatch.setattr(crossing, "_shard_for", shard_for)


def mix_up_results(monkeypatch):
    """Results come back in another order than tokens left."""
    right = AllToAllTokenDispatcher.combine

    def combine(self, *arguments):
        return right(self, *arguments).flip(0)

    monkeypatch.setattr(AllToAllTokenDispatcher, "combine", combine)


def leave_out_sums(monkeypatch):
    """The router and all that is dense get the gradients of this rank's tokens."""
    monkeypatch.setattr(routes, "reduce_later", lambda local, *_: local.view_as(local))


@on_ranks(2)
@pytest.mark.parametrize(
    ("fault", "first"),
    [
        (leave_out_sums, "the gradient of 'head.weight'"),
        (scale_gradients, r"gradient of 'blocks\.1\.moe\.experts\.w[123]'"),
        (mix_up_results, "module 'blocks.0.moe.experts': its output"),
    ],
)
def test_control_verify_names_a_fault(fault, first):
    recipe = [*SMALL, PLAN, "mesh={ep: 2}"]
    axes = read_recipe(RECIPE, recipe).axes
    with pytest.MonkeyPatch.context() as monkeypatch:
        fault(monkeypatch)
        report = on_rank(axes, (str(RECIPE), recipe, 0, None))
    assert not report.ok
    assert re.search(first, str(report)), str(report)


@on_ranks(4)
def test_experts_are_balanced_and_the_log_has_their_load():
    """By a loss and by their bias, on a mesh as without experts on ranks of their own, and after going on elsewhere."""
    folders = [tempfile.mkdtemp()] if torch.distributed.get_rank() == 0 else [None]
    torch.distributed.broadcast_object_list(folders)
    balanced = ["model.arguments.balance=0.1", "experts.bias_rate=0.05"]

    def run(name, mesh, steps, *more, resume=None):
        folder = Path(folders[0]) / name
        overrides = [f"folder={folder}", f"mesh={mesh}", f"steps={steps}", *more]
        train(read_recipe(RECIPE, [*SMALL, *balanced, *overrides]), resume)
        lines = (folder / "log.jsonl").read_text().splitlines()
        return [entry for entry in map(json.loads, lines) if "loss" in entry]

    expected = run("whole", "{dp: 4}", 4, "plan={}")
    run("run", "{dp: 2, ep: 2}", 2, PLAN)
    found = run("run", "{ep: 4}", 4, PLAN, resume="auto")
    for one, other in zip(found, expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-9)
        assert one["expert_imbalance"] == other["expert_imbalance"] > 1
        tokens = [
            [sum(of) for of in zip(*entry["expert_tokens"], strict=True)]
            for entry in (one, other)
        ]
        assert tokens[0] == tokens[1]
        assert sum(tokens[0]) == 4 * 6 * 2 * 2  # rows of tokens, layers, choices
        assert len(one["expert_bytes"]) == 4
        assert sum(one["expert_bytes"]) > 0 == sum(other["expert_bytes"])
        assert one["expert_dropped"] == [0] * 4
    plain = run("plain", "{dp: 4}", 4, "plan={}", "model.arguments.balance=null")
    assert plain[0]["loss"] < expected[0]["loss"]
    unbiased = run("unbiased", "{ep: 4}", 4, PLAN, "experts.bias_rate=0")
    assert unbiased[3]["loss"] != pytest.approx(expected[3]["loss"], rel=1e-9)
    with pytest.raises(RuntimeError, match="would not be trained"):
        run("stages", "{pp: 2, ep: 2}", 1, PLAN, "pipeline.micro_batches=2")
    assert not (Path(folders[0]) / "stages").exists()  # it is refused before training
    torch.distributed.barrier()


def test_evaluation_neither_counts_nor_drops():
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Dropout(0.5).eval())
    with evaluating(model):
        assert not torch.is_grad_enabled()
        assert torch.equal(model(torch.ones(9)), torch.ones(9))
    assert [one.training for one in model.modules()] == [True, True, False]


def test_experts_need_a_plan_and_rows():
    with pytest.raises(RecipeError, match="mesh.ep is 2, but nothing says how"):
        read_recipe(RECIPE, [*SMALL, "plan={}", "mesh.ep=2"], 2)
    with pytest.raises(RecipeError, match="cannot be shared evenly"):
        read_recipe(RECIPE, [*SMALL, PLAN, "mesh.ep=8"], 8)
