# SPDX-License-Identifier: Apache-2.0
"""What one framework saved the other loads, on other meshes and cut along other dims, every bit as it was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("shared_checkpoint.py")


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "GLOG_v": "3"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("writer", "readers"),
    [
        (("torch", 2, 0), [("mindspore", 3, 1), ("mindspore", 1, 0)]),
        (("mindspore", 3, 1), [("torch", 2, 0), ("torch", 4, 1), ("mindspore", 2, 0)]),
    ],
)
def test_every_bit_arrives(tmp_path, writer, readers):
    framework, *mesh = writer
    saved = run(framework, "save", *mesh, tmp_path)
    assert saved.returncode == 0, saved.stderr[-4000:]
    for framework, *mesh in readers:
        loaded = run(framework, "load", *mesh, tmp_path)
        assert loaded.returncode == 0, loaded.stderr[-4000:]


def test_a_wrong_bit_is_seen(tmp_path):
    """The control: another seed's bits are not these."""
    run("torch", "save", 1, 0, tmp_path)
    script = SCRIPT.read_text().replace("default_rng(3)", "default_rng(4)")
    other = tmp_path / "other.py"
    other.write_text(script)
    made = subprocess.run(
        [sys.executable, str(other), "torch", "load", "1", "0", str(tmp_path)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert made.returncode != 0
    assert "matrix.bool" in made.stderr
