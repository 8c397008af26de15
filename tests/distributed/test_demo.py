# SPDX-License-Identifier: Apache-2.0
"""``make demo``: what it runs, what it prints, and the commands that it prints."""

import os
import re
import shlex
import sys

import demo
import pytest
from typer.testing import CliRunner

from hyper_parallel.cli import train as train_command
from hyper_parallel.cli.checkpoints import application
from hyper_parallel.recipe import read_recipe
from hyper_parallel.recipe.training import train
from hyper_parallel.testing import run_ranks

SIZES = {"dim": 32, "layers": 2, "hidden": 48, "context": 16}
SMALL = [
    *(f"model.arguments.{name}={size}" for name, size in SIZES.items()),
    "data.length=16",
    "data.batch=4",
]
QUICK = [*SMALL, "schedule.warmup=2", "optimizer.lr=3e-3", "evaluation.batches=1"]


def train_on_rank(overrides, resume):
    train(read_recipe(demo.RECIPE, overrides, nproc=demo.DP * demo.TP), resume)


def run(arguments):
    """As the command does, without starting processes: here, or on the ranks that are there."""
    resume = "auto" if arguments[-2:] == ["--resume", "auto"] else None
    overrides = arguments[: -2 if resume else None]
    if set(demo.MESH) <= set(overrides):
        run_ranks(train_on_rank, demo.DP * demo.TP, overrides, resume, timeout=300)
    else:
        assert (
            CliRunner()
            .invoke(application, ["train", str(demo.RECIPE), *arguments])
            .exit_code
            == 0
        )


def test_the_demo_and_the_commands_that_it_prints(tmp_path, monkeypatch, capfd):
    """The four that are killed are started by the script."""
    assert train_command.train  # its import adds the command
    monkeypatch.setenv(
        "HYPER_PARALLEL_PLATFORM", os.environ["HYPER_PARALLEL_PLATFORM"]
    )  # which the command sets
    monkeypatch.setattr(demo, "run", run)
    monkeypatch.setattr(
        sys,
        "argv",
        ["demo.py", "--steps", "16", "--out", str(tmp_path / "demo"), *QUICK],
    )
    demo.main()
    out, err = capfd.readouterr()
    one, many, broken = (
        demo.read_losses(tmp_path / "demo" / name) for name in ("one", "mesh", "killed")
    )
    assert list(one) == list(range(1, 17))
    assert many == pytest.approx(one, rel=1e-6)
    assert broken == many
    for step in (1, 8, 16):
        loss = one[step]
        assert re.search(rf"\b{step} .* {loss:.7f} .* {many[step]:.7f} ", out), out
    assert re.search(r"tp .* forward .* all-reduce .* 5 .* 8 ", out), out
    unwrapped = " ".join(out.split())
    assert re.search(
        r"A third run was killed at step 1[1-6] and went on from the checkpoint of step (8|1[0-4]):",
        unwrapped,
    )
    told = err.splitlines()
    assert told[:2] == [
        "rank 0 failed: [hyper-parallel explain HP706]",
        "it was killed by SIGKILL",
    ], err
    assert [line.split(":")[0] for line in sorted(told[2:5])] == [
        "rank 1",
        "rank 2",
        "rank 3",
    ], err
    assert told[5:] == [
        f"what the ranks wrote is in {tmp_path / 'demo' / 'killed' / 'ranks'}"
    ], err
    assert (tmp_path / "demo" / "loss.png").read_bytes().startswith(b"\x89PNG")

    on_mesh, alone = re.findall(r"^  \S+/hyper-parallel (train .*)$", out, re.MULTILINE)
    assert shlex.split(on_mesh)[2:4] == list(demo.MESH)
    assert CliRunner().invoke(application, shlex.split(alone)).exit_code == 0
    assert list(demo.read_losses(tmp_path / "demo" / "mesh")) == list(range(1, 33))


def test_a_training_that_ends_before_it_is_killed_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(
        demo, "command", lambda _: [sys.executable, "-c", "raise SystemExit(7)"]
    )
    with pytest.raises(SystemExit, match="ended by itself with 7"):
        demo.run_until([], tmp_path, 1)
