# SPDX-License-Identifier: Apache-2.0
"""The pool of ranks itself: results, failures of every kind, recovery, and nothing left from one job to the next."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings

import frame
import pytest
from thorough import THOROUGH

from hyper_parallel import CommunicationError, get_platform
from hyper_parallel.platform.platform import EXISTING_COMM_GROUPS
from hyper_parallel.ranks import activity
from hyper_parallel.testing import RankError, close_ranks, on_ranks, run_ranks


def meet():
    platform = get_platform()
    return frame.array(platform.all_reduce(frame.tensor([1.0]), None)).item()


def describe(power, *, plus=0):
    return get_platform().get_rank() ** power + plus


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_every_rank_runs_and_returns(count):
    assert run_ranks(describe, count, 2, plus=1) == [
        rank**2 + 1 for rank in range(count)
    ]
    assert run_ranks(meet, count) == [count] * count


@pytest.mark.parametrize("value", [1, 2])
@on_ranks(2)
def test_decorated_tests_run_on_every_rank(value):
    assert meet() == 2
    assert value in (1, 2)


def fail_on(rank):
    if get_platform().get_rank() == rank:
        raise KeyError("the culprit")
    meet()


def test_an_exception_is_reported_with_its_traceback_and_frees_the_others():
    with pytest.raises(RankError) as raised:
        run_ranks(fail_on, 4, 1)
    message = str(raised.value)
    assert message.startswith(
        "test_ranks.py::fail_on on 4 ranks: rank 1 raised KeyError: 'the culprit'"
    )
    assert 'raise KeyError("the culprit")' in message
    assert isinstance(raised.value.__cause__, KeyError)
    assert set(raised.value.failures) == {0, 1, 2, 3}
    assert run_ranks(meet, 4) == [4] * 4


def end(how, rank):
    if get_platform().get_rank() == rank:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, how))
    meet()


@pytest.mark.parametrize(
    ("how", "words"),
    [("exit", "exit code 3"), ("SIGKILL", "SIGKILL"), ("SIGSEGV", "SIGSEGV")],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_is_named_and_replaced(how, words, rank):
    with pytest.raises(
        RankError, match=f"::end on 2 ranks: rank {rank} died with .*{words}"
    ):
        run_ranks(end, 2, how, rank)
    assert run_ranks(meet, 2) == [2, 2]


def sleep_on(rank):
    if get_platform().get_rank() == rank:
        time.sleep(600)
    meet()


def test_time_in_which_nobody_looks_is_not_idle(monkeypatch):
    """The whole machine may have stood still."""
    now = 0.0
    monkeypatch.setattr(activity.time, "monotonic", lambda: now)
    # It uses no more.
    monkeypatch.setattr(activity, "_processor_seconds", lambda _: 1.0)
    watched = activity.Activity(5.0)
    stopped = []
    for step in (0.1, 100.0, *[0.1] * 40):
        now += step
        stopped.append(watched.has_stopped([1]))
    assert not any(stopped)
    for _ in range(20):
        now += 0.1
        stopped.append(watched.has_stopped([1]))
    assert stopped[-1]


def test_a_hang_is_found_without_a_timeout_and_the_place_is_shown():
    with pytest.raises(RankError) as raised:
        run_ranks(sleep_on, 4, 2)
    assert "hung: no rank did anything for 5 s" in str(raised.value)
    assert "in sleep_on" in str(raised.value)
    assert run_ranks(meet, 4) == [4] * 4


def spin_on(rank):
    while get_platform().get_rank() == rank:
        pass


def test_a_busy_hang_ends_at_the_timeout():
    with pytest.raises(
        RankError, match="::spin_on on 2 ranks: rank 1 hung: it had not ended after 2 s"
    ):
        run_ranks(spin_on, 2, 1, timeout=2)
    assert run_ranks(meet, 2) == [2, 2]


def leave_things_behind():
    platform = get_platform()
    platform.create_group([0, 1])
    platform.isend(frame.tensor([1.0]), 1 - platform.get_rank())  # nobody receives it
    platform.set_grad_reduce_handle(None, None)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    sys.path.append("left behind")
    warnings.simplefilter("ignore")
    platform.manual_seed(platform.get_rank() + 10)
    return os.getpid()


def look_around():
    platform = get_platform()
    works = [platform.isend(frame.tensor([7.0]), 1 - platform.get_rank())]
    buffer = frame.tensor([0.0])
    works.append(platform.irecv(buffer, 1 - platform.get_rank()))
    for work in works:
        work.wait()
    return {
        "pid": os.getpid(),
        "groups": dict(EXISTING_COMM_GROUPS),
        "received": frame.array(buffer).item(),
        "environment": os.environ.get("LEFT_BEHIND"),
        "directory": os.getcwd(),  # noqa: PTH109
        "path": "left behind" in sys.path,
        "draw": frame.array(frame.drawn_by_the_framework(1)).item(),
        "warnings": len(warnings.filters),
    }


def test_nothing_is_left_from_one_job_to_the_next():
    before = run_ranks(look_around, 2)
    pids = run_ranks(leave_things_behind, 2)
    after = run_ranks(look_around, 2)
    assert after == before
    assert [rank["pid"] for rank in after] == pids  # the same processes
    assert [rank["received"] for rank in after] == [7.0, 7.0]
    assert after[0]["draw"] == after[1]["draw"]


def warn():
    warnings.warn("careful", UserWarning, stacklevel=1)


def test_warnings_count_on_ranks_as_in_the_session():
    with pytest.raises(RankError, match="UserWarning: careful"):
        run_ranks(warn, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_ranks(warn, 2) == [None, None]


def unpicklable():
    return lambda: None


class OddError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def raise_odd():
    raise OddError(1, 2)


def test_what_cannot_travel_is_told_in_words():
    with pytest.raises(RankError, match="returned function, which cannot be sent back"):
        run_ranks(unpicklable, 2)
    with pytest.raises(RankError, match="OddError: 1 and 2"):
        run_ranks(raise_odd, 2)
    with pytest.raises(ValueError, match="must be a function at module level"):
        run_ranks(lambda: None, 2)
    with pytest.raises(ValueError, match="world_size must be a positive int, got 0"):
        run_ranks(meet, 0)


def talk_and_fail():
    print("what I saw")
    raise ValueError("then this")


def test_what_a_failed_rank_wrote_is_shown():
    with pytest.raises(
        RankError,
        match=r"(?s)ValueError: then this.*--- what rank \d wrote.*what I saw",
    ):
        run_ranks(talk_and_fail, 2)


def test_a_job_costs_no_interpreter():
    pids = run_ranks(os_pid, 4)
    assert run_ranks(os_pid, 4) == pids
    close_ranks()
    assert not set(run_ranks(os_pid, 4)) & set(pids)


def os_pid():
    return os.getpid()


def only_one_rank_sees_the_error():
    platform = get_platform()
    if platform.get_rank() == 0:
        platform.all_reduce("no tensor", None)
    try:
        platform.all_reduce(frame.tensor([1.0]), None)
    except CommunicationError as error:
        return error.missing
    return None


def test_the_first_cause_stands_first():
    with pytest.raises(
        RankError,
        match="rank 0 raised TypeError: all_reduce: expected a tensor, got str",
    ):
        run_ranks(only_one_rank_sees_the_error, 2)


SESSION = """
    import os
    from hyper_parallel.testing import on_ranks

    @on_ranks(2)
    def test_first(): pass

    @on_ranks(2)
    def test_dies(): os._exit(1)

    @on_ranks(2)
    def test_last(): pass
"""


SESSIONS = [
    ([], "1 failed, 2 passed"),
    (["-x"], "1 failed, 1 passed"),
    (["-k", "last"], "1 passed, 2 deselected"),
]


@pytest.mark.parametrize(("options", "counts"), SESSIONS if THOROUGH else SESSIONS[:1])
def test_as_pytest_users_run_it(tmp_path, options, counts):
    (tmp_path / "test_session.py").write_text(textwrap.dedent(SESSION))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert counts in run.stdout, run.stdout + run.stderr
    if "failed" in counts:
        assert "test_session.py::test_dies on 2 ranks: rank " in run.stdout


SCRIPT = """
    from hyper_parallel.testing import run_ranks

    def double(x):
        return 2 * x

    if __name__ == "__main__":
        print(run_ranks(double, 2, 21))
"""


def test_functions_of_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    run = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.stdout == "[42, 42]\n", run.stderr


def test_ranks_end_with_their_parent(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import os, sys, time
            from hyper_parallel.testing import run_ranks

            def hang(path):
                with open(path, "a") as file: file.write(f"{os.getpid()}\\n")
                time.sleep(600)

            if __name__ == "__main__":
                run_ranks(hang, 2, sys.argv[1], timeout=600)
        """)
    )
    pids = tmp_path / "pids"
    parent = subprocess.Popen([sys.executable, script, pids], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    for pid in map(int, pids.read_text().split()):
        while time.monotonic() < deadline:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"rank {pid} outlived its parent")
