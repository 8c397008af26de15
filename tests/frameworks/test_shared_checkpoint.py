# SPDX-License-Identifier: Apache-2.0
"""What one framework saved the other loads, on other meshes and cut along other dims, every bit as it was."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("shared_checkpoint.py")


def run(framework, *tasks, script=SCRIPT):
    """Tasks of one framework, in one process: what was done of them."""
    made = subprocess.run(
        [sys.executable, str(script), framework, *tasks],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "GLOG_v": "3"},
    )  # fmt: skip
    return made.stdout.splitlines(), made.stderr


def test_every_bit_arrives(tmp_path):
    of_torch, of_mindspore = tmp_path / "torch", tmp_path / "mindspore"
    rounds = [
        ("torch", [f"save,2,0,{of_torch}"]),
        (
            "mindspore",
            [
                f"load,3,1,{of_torch}",
                f"load,1,0,{of_torch}",
                f"save,3,1,{of_mindspore}",
                f"load,2,0,{of_mindspore}",
            ],
        ),
        ("torch", [f"load,2,0,{of_mindspore}", f"load,4,1,{of_mindspore}"]),
    ]
    for framework, tasks in rounds:
        done, told = run(framework, *tasks)
        assert done == tasks, told[-4000:]


def test_a_wrong_bit_is_seen(tmp_path):
    """The control: another seed's bits are not these."""
    other = tmp_path / "other.py"
    other.write_text(
        SCRIPT.read_text()
        .replace("default_rng(3)", 'default_rng(4 if what == "load" else 3)')
        .replace("bits()", "bits(what)")
        .replace("def bits(what)", "def bits(what)")
    )
    tasks = [f"save,1,0,{tmp_path}", f"load,1,0,{tmp_path}"]
    done, told = run("torch", *tasks, script=other)
    assert done == tasks[:1]
    assert "matrix.bool" in told
