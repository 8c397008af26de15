# SPDX-License-Identifier: Apache-2.0
"""``hyper-parallel doctor``: what it tells of a machine that is fine, and of some that are not."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hyper_parallel.cli import doctor as command
from hyper_parallel.cli.checkpoints import application

FINE = {"device": "cpu", "kind": "cpu", "backend": "gloo", "seconds": 1.0}


def run(*arguments):
    result = CliRunner().invoke(application, ["doctor", *arguments])
    return result.exit_code, {
        line[8:33].strip(): line for line in result.stdout.splitlines()
    }


@pytest.fixture
def machine(monkeypatch):
    """Sets what is installed, and how the round trips end."""

    def make(*installed, trip=(FINE, "")):
        monkeypatch.setattr(
            command, "find_spec", lambda name: object() if name in installed else None
        )
        monkeypatch.setattr(command, "_round_trip", lambda name, timeout: trip)
        monkeypatch.setattr(command.metadata, "version", lambda name: "1.2.3")

    return make


def test_two_processes_of_a_framework_exchange_data():
    """The only test in which nothing stands in for anything."""
    code, lines = run("--framework", "torch")
    assert code == 0
    assert lines["torch"].startswith("ok ")
    assert lines["torch device"].startswith("ok ")
    assert "gloo: two processes exchanged data in " in lines["torch ranks"]
    assert {"python", "hyper_parallel", "memory", "disk"} <= lines.keys()
    assert "mindspore" not in lines
    assert not any("\x1b" in line for line in lines.values())


def test_without_any_framework_it_says_how_to_get_one(machine):
    machine()
    code, lines = run()
    assert code == 1
    for name in ("torch", "mindspore"):
        assert lines[name].startswith("broken ")
        assert f"pip install 'hyper_parallel[{name}]'" in lines[name]


def test_one_framework_is_enough(machine, monkeypatch):
    monkeypatch.delenv("HYPER_PARALLEL_PLATFORM")
    machine("torch", *command.COMPILED, *command.EXTRAS)
    code, lines = run()
    assert code == 0
    assert lines["torch"] == f"ok      {'torch':<24} 1.2.3"
    assert lines["mindspore"].startswith("note ")
    monkeypatch.setenv(
        "HYPER_PARALLEL_PLATFORM", "mindspore"
    )  # then it is the one that is needed
    code, lines = run()
    assert (code, lines["mindspore"][:6]) == (1, "broken")


def test_what_is_not_compiled_or_not_installed_is_a_note(machine):
    machine("torch")
    _, lines = run()
    for name in ("compiled dispatch", "compiled checksums", "transformers"):
        assert lines[name].startswith("note ")
        assert "pip install" in lines[name]


def test_a_framework_that_does_not_work_is_told_with_a_remedy(machine):
    machine("torch", trip=({}, "ImportError: libnothing.so: cannot open"))
    code, lines = run()
    assert code == 1
    assert "libnothing.so" in lines["torch import"]
    assert "--force-reinstall" in lines["torch import"]
    machine("torch", trip=({"device": "cpu", "kind": "cpu"}, "no answer after 3 s"))
    code, lines = run()
    assert code == 1
    assert lines["torch device"].startswith("ok ")
    assert "no answer after 3 s; " in lines["torch ranks"]


def test_a_process_that_fails_or_hangs_is_told():
    facts, problem = command._round_trip("nonsense", 100)
    assert facts == {}
    assert (
        "HYPER_PARALLEL_PLATFORM must be 'torch' or 'mindspore', got 'nonsense'"
        in problem
    )
    assert command._round_trip("torch", 0.05) == ({}, "no answer after 0.05 s")


def test_little_room_is_told_with_a_remedy():
    assert command._enough("disk", 5 << 30, " here", "remedy") == command.Finding(
        "ok", "disk", "5.0 GiB free here"
    )
    little = command._enough("shared memory", 64 << 20, "", "remedy")
    assert str(little).split() == [
        "note",
        "shared",
        "memory",
        "64.0",
        "MiB",
        "free;",
        "remedy",
    ]
    assert command._enough("memory", None, "", "").state == "note"


def test_shells_complete_commands_and_values():
    """The way that the shell's own function goes, without importing a framework."""
    code = "import sys; from hyper_parallel.cli import main; sys.argv = ['hyper-parallel']; main()"

    def completed(*words):
        surroundings = {
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
            "PATH": "",
        }
        surroundings["_HYPER_PARALLEL_COMPLETE"] = "complete_bash"
        command_line = [sys.executable, "-c", code]
        run = subprocess.run(
            command_line,
            env=surroundings,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return run.stdout.split()

    assert completed("hyper-parallel", "do") == ["doctor"]
    assert completed("hyper-parallel", "doctor", "--framework", "m") == ["mindspore"]


def test_unknown_options_exit_with_2():
    assert (
        CliRunner().invoke(application, ["doctor", "--framework", "jax"]).exit_code == 2
    )
