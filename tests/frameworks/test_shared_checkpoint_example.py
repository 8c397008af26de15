# SPDX-License-Identifier: Apache-2.0
"""The example of a training in both frameworks, as people start it, and that it sees what goes wrong."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.core.distributed_checkpoint import read_objects

EXAMPLE = Path(__file__).parents[2] / "examples" / "shared_checkpoint"


def run(script, *arguments):
    environment = {
        key: value
        for key, value in os.environ.items()
        if key != "HYPER_PARALLEL_PLATFORM"
    }
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True, text=True, timeout=300, check=False, env=environment,
    )  # fmt: skip


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """What the example printed, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("story")
    made = run(EXAMPLE / "run.py", folder)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-4000:]
    return made.stdout, folder


def test_the_training_goes_on_in_the_other_framework(story):
    told, _ = story
    for part in ("model", "optimizer.state", "reference"):
        assert re.search(
            rf"^{re.escape(part)} .* every bit as PyTorch wrote it$", told, re.MULTILINE
        ), told
    rows = re.findall(
        r"^ +(\d+)  (\w+, \S+) +(\d\.\d+)  +(\d\.\d+)$", told, re.MULTILINE
    )
    assert [int(step) for step, *_ in rows] == list(range(1, 10))
    assert [by for _, by, *_ in rows] == ["PyTorch, 2x2"] * 3 + ["MindSpore, 2"] * 3 + [
        "PyTorch, 1"
    ] * 3
    shared, alone = np.array([[float(one), float(other)] for *_, one, other in rows]).T
    np.testing.assert_allclose(shared, alone, rtol=2e-6)
    assert (
        alone[-1] < alone[0] - 0.2
    )  # it learns, so that weights or moments that were not loaded would show


def test_the_files_say_what_the_page_says(story):
    """Without the library: names, dtypes and shapes in the headers of the files are the same whoever wrote them."""
    _, folder = story
    tensors = {}
    for name in ("first", "copied"):
        described = json.loads((folder / name / "checkpoint.json").read_text())[
            "tensors"
        ]
        tensors[name] = {
            key: (entry["dtype"], entry["shape"]) for key, entry in described.items()
        }
    assert tensors["first"] == tensors["copied"]
    assert {dtype for dtype, _ in tensors["first"].values()} == {"float32", "bfloat16"}
    assert "optimizer.state.blocks.0.attention.wq.weight.exp_avg" in tensors["first"]


def test_control_moments_that_are_lost_change_the_losses(story, tmp_path):
    """PyTorch goes on from what MindSpore saved, but with a new optimizer."""
    _, folder = story
    scripts = tmp_path / "shared_checkpoint"
    shutil.copytree(EXAMPLE, scripts)
    shutil.copytree(EXAMPLE.parent / "llama", tmp_path / "llama")
    text = (scripts / "training.py").read_text()
    without = re.sub(r' +"optimizer": .*\n', "", text)
    assert without != text
    (scripts / "training.py").write_text(without)
    control = (
        "import run, sys; run.start('in_pytorch.py', 1, "
        "'--load', *sys.argv[1:2], '--steps', 9, '--save', sys.argv[2])"
    )
    (scripts / "control.py").write_text(control)
    made = run(scripts / "control.py", folder / "second", tmp_path / "control")
    assert made.returncode == 0, made.stderr[-4000:]
    lost, true = (
        read_objects(place)["losses"]
        for place in (tmp_path / "control", folder / "whole")
    )
    assert abs(lost[-1] / true[-1] - 1) > 1e-4
