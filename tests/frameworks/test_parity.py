# SPDX-License-Identifier: Apache-2.0
"""One model, one set of weights, one batch: PyTorch and MindSpore, on one process and on meshes, lose alike."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("parity.py")
SHAPES = ("1", "2", "2x2", "fsdp2", "1F1B")


def run(*arguments):
    made = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        capture_output=True, text=True, timeout=600, check=False, env={**os.environ, "GLOG_v": "3"},
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-4000:]
    return made.stdout.strip().rpartition("\n")[2]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The checkpoint that PyTorch wrote."""
    folder = tmp_path_factory.mktemp("parity") / "start"
    run("torch", folder, "save")
    return folder


@pytest.fixture(scope="module")
def in_pytorch(start):
    """The losses by mesh; the ranks of all meshes are started by one process."""
    return json.loads(run("torch", start, *SHAPES))


@pytest.fixture(scope="module")
def in_mindspore(start):
    """The same in MindSpore."""
    return json.loads(run("mindspore", start, *SHAPES))


def test_it_learns_so_that_wrong_gradients_would_show(in_pytorch):
    losses = in_pytorch["1"]
    assert len(losses) == 20
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("framework", ["in_pytorch", "in_mindspore"])
@pytest.mark.parametrize("shape", SHAPES)
def test_losses_are_those_of_one_process_of_pytorch(
    request, in_pytorch, framework, shape
):
    losses = request.getfixturevalue(framework)[shape]
    np.testing.assert_allclose(losses, in_pytorch["1"], rtol=2e-6)
