# SPDX-License-Identifier: Apache-2.0
"""A job's rank processes: how their ends are read, and that none is left. (test_train_command.py trains on them.)"""

import os
import signal
from pathlib import Path

import pytest

from hyper_parallel.ranks.failures import order_failures
from hyper_parallel.ranks.processes import RankProcesses, read_notes

ROOT = Path(__file__).resolve().parents[2]


RANK = """
import os, sys, time
from pathlib import Path
from hyper_parallel.ranks.processes import leave_note

rank = int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], file=sys.stderr, flush=True)
what = sys.argv[2 + rank]
if what == "raise":
    leave_note(Path(sys.argv[1]), ValueError("wrong"))
    sys.exit(1)
if what == "sleep":
    time.sleep(600)
sys.exit(int(what))
"""


@pytest.fixture(autouse=True)
def one_rank(tmp_path, monkeypatch):
    """The module of a rank."""
    (tmp_path / "one_rank.py").write_text(RANK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")


@pytest.fixture
def run_ranks_of(tmp_path):
    """Runs ranks that each do one thing, and returns them with their failures in order."""

    def run(*what, grace=0.5):
        arguments = [str(tmp_path), *what]
        count = len(what)
        with RankProcesses(
            "one_rank", arguments, "torch", count, tmp_path, successes=(0, 3)
        ) as ranks:
            ranks.watch(grace)
        notes = read_notes(tmp_path, count)
        ends = [ranks.find_failure(rank, notes.get(rank)) for rank in range(count)]
        return ranks, order_failures(one for one in ends if one is not None)

    return run


def test_ranks_that_end_well_have_not_failed(run_ranks_of):
    ranks, failures = run_ranks_of("0", "3")
    assert (ranks.codes, failures, ranks.was_asked) == ([0, 3], [], False)
    assert ranks.logs[1].read_tail(1) == "rank 1 of 2"


def test_one_that_fails_ends_the_others_after_the_grace_period(run_ranks_of):
    ranks, failures = run_ranks_of("sleep", "7")
    assert ranks.codes == [-signal.SIGKILL, 7]
    assert [(one.rank, one.headline) for one in failures] == [
        (1, "it ended with exit code 7"),
        (0, "did not end within 0.5 s after that and was ended"),
    ]
    assert failures[0].details == "rank 1 of 2\nit ended with exit code 7"


def test_a_note_says_more_than_an_exit_code(run_ranks_of):
    _, failures = run_ranks_of("raise", "0", grace=30)
    assert [(one.rank, one.headline) for one in failures] == [(0, "ValueError: wrong")]


def test_nothing_is_left_where_a_rank_cannot_be_started(tmp_path, monkeypatch):
    started = []

    def start(self, rank, environment, original=RankProcesses._start):
        if rank == 1:
            raise OSError("no more processes")
        original(self, rank, environment)
        started.extend(self._processes)

    monkeypatch.setattr(RankProcesses, "_start", start)
    with (
        pytest.raises(OSError, match="no more processes"),
        RankProcesses("one_rank", [str(tmp_path), "sleep"], "torch", 2, tmp_path),
    ):
        pass
    assert [process.returncode for process in started] == [-signal.SIGKILL]
