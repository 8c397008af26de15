# SPDX-License-Identifier: Apache-2.0
"""A training from a recipe that PyTorch began: MindSpore goes on with it, on one process and on two, alike."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.recipe import read_recipe
from hyper_parallel.recipe.training import train
from hyper_parallel.testing import run_ranks

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"
SIZES = {"dim": 32, "layers": 2, "hidden": 48, "context": 16}
SMALL = [
    *(f"model.arguments.{name}={size}" for name, size in SIZES.items()),
    "data.length=16",
    "data.batch=4",
    "steps=8",
]
SMALL += [
    "schedule.warmup=2",
    "optimizer.lr=3e-3",
    "evaluation={every: 4, batches: 2}",
    "checkpoints.keep=null",
]


def log_of(folder):
    return {
        facts["step"]: facts
        for facts in map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    }


@pytest.fixture(scope="module")
def in_pytorch(tmp_path_factory):
    """All steps in PyTorch, and a checkpoint after two of them."""
    folder = tmp_path_factory.mktemp("in_pytorch")
    code = "from hyper_parallel.cli import main; main()"
    made = subprocess.run(
        [sys.executable, "-c", code, "train", RECIPES / "demo.yaml", *SMALL, "checkpoints.every=2", f"folder={folder}"],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


def go_on(start, folder, nproc, *overrides):
    recipe = read_recipe(
        RECIPES / "mindspore.yaml", [*SMALL, f"folder={folder}", *overrides], nproc
    )
    return train(recipe, start / "step-00000002").step


def check(true, mine):
    assert list(mine) == list(range(3, 9))
    for step, facts in mine.items():
        for name in facts.keys() - {"tokens_per_second", "memory"}:
            assert facts[name] == pytest.approx(true[step][name], rel=1e-5), (
                step,
                name,
            )
    assert {4, 8} == {step for step, facts in mine.items() if "held_out" in facts}
    assert mine[8]["loss"] != pytest.approx(
        true[2]["loss"], rel=1e-2
    )  # wrong gradients would show


def test_one_process(tmp_path, in_pytorch):
    assert go_on(in_pytorch, tmp_path, 1) == 8
    check(log_of(in_pytorch), log_of(tmp_path))


@pytest.mark.parametrize("mesh", ["mesh.tp=2", "mesh.dp=2"])
def test_two_ranks(tmp_path, in_pytorch, mesh):
    options = [mesh, "checkpoints.every=2"]
    assert run_ranks(go_on, 2, in_pytorch, tmp_path, 2, *options, timeout=300) == [8, 8]
    check(log_of(in_pytorch), log_of(tmp_path))
