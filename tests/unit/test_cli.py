# SPDX-License-Identifier: Apache-2.0
"""The command hyper-parallel: what it prints, how it exits, and what it does not import."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hyper_parallel.cli.checkpoints import application
from hyper_parallel.cli.describe import layout_text
from hyper_parallel.core.distributed_checkpoint.chunks import ChunkGrid, Cut
from hyper_parallel.core.distributed_checkpoint.convert import (
    checkpoint_to_state_dict,
    state_dict_to_checkpoint,
)
from hyper_parallel.core.dtensor.placement_types import FusedShard


def run(*arguments):
    return CliRunner().invoke(application, ["ckpt", *map(str, arguments)])


def weights():
    w = torch.arange(6.0).reshape(2, 3)
    return {
        "model": {"embed.w": w, "head.w": w, "b": torch.ones(4, dtype=torch.bfloat16)},
        "step": 7,
    }


@pytest.fixture
def folder(tmp_path):
    state_dict_to_checkpoint(weights(), tmp_path / "a")
    return tmp_path / "a"


def test_ls_tells_what_there_is(folder):
    result = run("ls", folder)
    assert result.exit_code == 0
    assert "checkpoint, 32 B in 1 files" in result.stdout
    assert "tensors  2, and 1 tied to others" in result.stdout
    assert "object   step = 7" in result.stdout
    assert "model.b" not in result.stdout
    table = run("ls", folder, "-t").stdout.splitlines()
    [line] = [line.split() for line in table if line.startswith("model.b ")]
    [file] = folder.glob("data-*")
    assert line == ["model.b", "(4)", "bfloat16", "8", "B", "whole", file.name]
    assert any(
        line.endswith("stored as model.embed.w") or "stored as model.embed.w" in line
        for line in table
    )


def test_ls_gives_json(folder):
    facts = json.loads(run("ls", folder, "--json").stdout)
    assert (facts["kind"], facts["bytes"], facts["ranks"], facts["objects"]) == (
        "checkpoint",
        32,
        1,
        {"step": 7},
    )
    tensors = {tensor["name"]: tensor for tensor in facts["tensors"]}
    assert tensors["model.embed.w"]["shape"] == [2, 3]
    assert tensors["model.head.w"]["stored_as"] == "model.embed.w"


def test_layouts_are_told_by_their_axes():
    names = ("dp", "tp")
    assert (
        layout_text(ChunkGrid((8, 6), Cut((2, 4), range(8), ((1,), ()), names=names)))
        == "S(0) on tp, R on dp"
    )
    assert (
        layout_text(ChunkGrid((8,), Cut((2, 4), range(8), ((0, 1),), names=names)))
        == "S(0) on dp, S(0) on tp"
    )
    fused = Cut((2,), range(2), ((0,),), {0: FusedShard(0, (6, 3, 3))})
    assert layout_text(ChunkGrid((12,), fused)) == "F(0; 6+3+3) on axis 0"


def test_names_from_files_cannot_command_the_terminal(tmp_path):
    (tmp_path / "hf").mkdir()
    save_file(
        {"\x1b[31mred": torch.ones(2), "[bold]x[/bold]": torch.ones(2)},
        tmp_path / "hf" / "model.safetensors",
    )
    shown = run("ls", tmp_path / "hf", "-t").stdout
    assert "\x1b" not in shown
    assert "[bold]x[/bold]" in shown
    assert r'"\u001b[31mred"' in shown


def test_verify_says_which_file_and_field(folder):
    assert run("verify", folder).exit_code == 0
    assert "every checksum is right" in run("verify", folder).stdout
    assert run("verify", folder, "--quiet").output == ""
    [file] = folder.glob("data-*")
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start] ^= 1
    file.write_bytes(data)
    result = run("verify", folder, "--quiet")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        f"{file}: model.embed.w: bytes 0 to 24 of the chunk"
    )
    assert result.stdout == ""


def test_diff_exits_with_one_where_something_differs(folder, tmp_path):
    other = weights()
    other["model"]["b"][2] = 3
    other["step"] = 8
    state_dict_to_checkpoint(other, tmp_path / "b")
    assert run("diff", folder, folder).stdout == "equal: 4 names\n"
    result = run("diff", folder, tmp_path / "b")
    assert result.exit_code == 1
    assert (
        result.stdout
        == "model.b: 1 of 4 elements differ, by at most 2\nstep: 7 and 8\n"
    )
    del other["model"]["b"]
    state_dict_to_checkpoint(other, tmp_path / "c")
    assert (
        f"only in {tmp_path / 'b'}: model.b\n"
        in run("diff", tmp_path / "b", tmp_path / "c").stdout
    )


def test_convert_knows_what_is_there(folder, tmp_path):
    assert run("convert", folder, tmp_path / "hf").exit_code == 0
    assert sorted(load_file(tmp_path / "hf/model.safetensors")) == ["b", "embed.w"]
    assert run("diff", folder, tmp_path / "hf").exit_code == 0
    assert run("diff", tmp_path / "hf", folder).exit_code == 0
    assert run("diff", folder, tmp_path / "hf", "--prefix", "").exit_code == 1
    assert run("convert", tmp_path / "hf", tmp_path / "back").exit_code == 0
    assert list(checkpoint_to_state_dict(tmp_path / "back")) == ["model"]
    assert run("convert", folder, tmp_path / "all.safetensors").exit_code == 0
    assert (
        run("convert", tmp_path / "all.safetensors", tmp_path / "again").exit_code == 0
    )
    assert run("diff", folder, tmp_path / "again").stdout == "equal: 4 names\n"
    assert (
        run("convert", folder, tmp_path / "half", "--dtype", "float16").exit_code == 0
    )
    assert load_file(tmp_path / "half/model.safetensors")["b"].dtype is torch.float16
    assert run("convert", folder, tmp_path / "one", "--to", "checkpoint").exit_code == 0
    assert run("diff", folder, tmp_path / "one").exit_code == 0


def test_convert_does_not_write_over_what_is_there(folder, tmp_path):
    state_dict_to_checkpoint({"model": {"x": torch.ones(1)}}, tmp_path / "b")
    for target, kind in (
        ("hf", "huggingface"),
        ("c", "checkpoint"),
        ("f.safetensors", "file"),
    ):
        assert run("convert", folder, tmp_path / target, "--to", kind).exit_code == 0
        again = ("convert", tmp_path / "b", tmp_path / target, "--to", kind)
        result = run(*again)
        assert result.exit_code == 2
        told = f"error: {tmp_path / target}: is there already; choose another name, or pass --force"
        assert result.stderr == f"{told} [hyper-parallel explain HP506]\n"
        assert run("diff", folder, tmp_path / target).exit_code == 0
        assert run(*again, "--force").exit_code == 0
        assert run("diff", tmp_path / "b", tmp_path / target).exit_code == 0
    assert (
        run("convert", folder, folder, "--to", "checkpoint", "--force").exit_code == 2
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ls", "nothing"], "nothing: there is no such file or folder"),
        (["verify", "nothing"], "nothing: there is no such file or folder"),
        (
            ["ls", "."],
            "checkpoint.json: there is no whole checkpoint here: nothing was saved there",
        ),
        (["diff", "a", "nothing"], "nothing: there is no such file or folder"),
        (
            ["convert", "a", "x", "--prefix", "net."],
            "no tensor has a name that begins with 'net.'",
        ),
        (
            ["convert", "a", "x", "--prefix", "model"],
            "prefix: expected one that ends with a dot",
        ),
        (
            ["convert", "a", "x", "--dtype", "int8"],
            "dtype: expected one of floating-point numbers",
        ),
        (
            ["convert", "a", "x.safetensors", "--dtype", "float16"],
            "--dtype is for --to huggingface",
        ),
    ],
)
def test_errors_are_one_line(arguments, told, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert told in result.stderr
    assert result.stderr.count("\n") == 1


def python(code, *arguments):
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False
    )


def test_nothing_heavy_is_imported_before_it_is_needed(folder):
    code = "import sys; from hyper_parallel.cli import main; assert not {'torch', 'typer', 'rich'} & set(sys.modules)\n"
    code += "try: main()\nfinally: assert 'torch' not in sys.modules"
    result = python(code, "ckpt", "ls", folder, "-t")
    assert result.returncode == 0, result.stderr
    assert "model.head.w" in result.stdout


def test_without_typer_the_command_says_how_to_get_it():
    result = python(
        "import sys; sys.modules['typer'] = None; from hyper_parallel.cli import main; main()"
    )
    assert result.returncode == 1
    assert result.stderr.strip().endswith("pip install 'hyper_parallel[cli]'")
    assert result.stderr.count("\n") == 1
