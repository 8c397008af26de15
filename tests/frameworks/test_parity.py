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


def run(*arguments):
    made = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        capture_output=True, text=True, timeout=600, check=False, env={**os.environ, "GLOG_v": "3"},
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-4000:]
    return made.stdout.strip().rpartition("\n")[2]


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """The checkpoint that PyTorch wrote, and its losses on one process."""
    folder = tmp_path_factory.mktemp("parity") / "start"
    run("torch", "save", folder)
    losses = json.loads(run("torch", "1", folder))
    assert losses[-1] < 0.7 * losses[0]  # it learns, so that wrong gradients would show
    return folder, losses


@pytest.mark.parametrize(
    ("framework", "shape"),
    [("torch", "2"), ("torch", "2x2"), ("mindspore", "1"), ("mindspore", "2"), ("mindspore", "2x2")],
)
def test_losses_are_those_of_one_process_of_pytorch(truth, framework, shape):
    folder, expected = truth
    losses = json.loads(run(framework, shape, folder))
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
