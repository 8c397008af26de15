# SPDX-License-Identifier: Apache-2.0
"""What jobs and tests share of rank processes, without processes: order of failures, waiting, environment, logs."""

import os
import signal
import socket

import pytest

from hyper_parallel import CommunicationError
from hyper_parallel.ranks import watch as watching
from hyper_parallel.ranks.environment import (
    build_environment,
    default_environment,
    find_port,
    number_rank,
)
from hyper_parallel.ranks.failures import (
    Cause,
    Failure,
    describe_exit,
    find_cause,
    order_failures,
    shorten,
)
from hyper_parallel.ranks.logs import LONGEST, RankLog
from hyper_parallel.ranks.processes import forward_signals, leave_note, read_notes
from hyper_parallel.ranks.watch import Watch


def test_causes_come_before_echoes_and_then_the_earliest():
    failures = [
        Failure(0, 1.0, "lost rank 2", cause=Cause.ECHO),
        Failure(1, 2.0, "hung", cause=Cause.HUNG),
        Failure(2, 4.0, "raised", cause=Cause.RAISED),
        Failure(3, 3.0, "raised", cause=Cause.RAISED),
        Failure(4, 5.0, "died", cause=Cause.DIED),
    ]
    assert [one.rank for one in order_failures(failures)] == [4, 3, 2, 1, 0]


def test_only_lost_contact_is_an_echo():
    lost = CommunicationError("rank 1 is missing", missing=(1,))
    assert find_cause(lost) is Cause.ECHO
    assert find_cause(RuntimeError("own")) is Cause.RAISED


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-signal.SIGKILL, "SIGKILL"),
        (-77, "signal 77"),
    ],
)
def test_an_exit_is_described_by_its_code_or_signal(code, text):
    assert describe_exit(code) == text


def test_long_headlines_are_shortened():
    assert shorten("a" * 240) == "a" * 240
    assert shorten("a" * 241) == "a" * 240 + " ..."


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(watching, "time", made)
    return made


def test_a_failure_starts_the_grace_period_and_a_success_does_not(clock):
    ended = {}
    watch = Watch(range(3), ended.get, lambda end: end == "failed", grace=2.0)
    assert not watch.look()
    clock.now, ended[0] = 100.0, "done"
    assert watch.look()
    clock.now = 1000.0
    assert not watch.is_over
    ended[1] = "failed"
    assert watch.look()
    clock.now = 1001.9
    assert not watch.is_over
    clock.now = 1002.1
    assert watch.is_over
    assert watch.has_expired
    assert (watch.ends, watch.pending) == ({0: "done", 1: "failed"}, {2})


def test_a_watch_is_over_when_all_have_ended_or_the_time_is_up(clock):
    watch = Watch(range(2), lambda rank: rank + 1, lambda _: False, grace=1.0)
    watch.look()
    assert watch.is_over
    assert not watch.has_expired
    watch = Watch(range(1), lambda _: None, lambda _: False, grace=1.0, seconds=3.0)
    clock.now = 2.9
    assert not watch.is_over
    clock.now = 3.1
    assert watch.has_expired


def test_a_port_is_free_and_outside_of_those_of_connections():
    port = find_port()
    assert 20_000 <= port < 32_000
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", port))


def test_what_the_user_has_set_stays_except_for_the_job(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GLOG_v", "2")
    monkeypatch.setenv("WORLD_SIZE", "99")
    made = {**build_environment("mindspore", 2), **number_rank(1)}
    assert (made["OMP_NUM_THREADS"], made["GLOG_v"]) == ("7", "2")
    assert (made["WORLD_SIZE"], made["RANK"], made["LOCAL_RANK"]) == ("2", "1", "1")
    assert made["HYPER_PARALLEL_PLATFORM"] == "mindspore"


def test_default_variables_are_removed_again(monkeypatch):
    monkeypatch.setenv("SET_BY_USER", "mine")
    with default_environment(SET_BY_USER="other", ADDED="1"):
        assert (os.environ["SET_BY_USER"], os.environ["ADDED"]) == ("mine", "1")
    assert os.environ["SET_BY_USER"] == "mine"
    assert "ADDED" not in os.environ


def test_a_log_is_read_from_a_place_and_from_its_end(tmp_path):
    log = RankLog(tmp_path / "rank-0.log")
    assert (log.size(), log.read_from(0), log.read_tail(2)) == (0, "", "")
    log.path.write_text("one\ntwo\nthree\n")
    assert (log.read_from(4), log.read_tail(2)) == ("two\nthree\n", "two\nthree")
    log.path.write_text("x" * (LONGEST + 5))
    assert len(log.read_from(0)) == LONGEST


def test_notes_come_back(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    leave_note(tmp_path, ValueError("wrong"), recipe=None)
    [(rank, note)] = read_notes(tmp_path, 3).items()
    assert (rank, note["headline"], note["recipe"]) == (1, "ValueError: wrong", None)
    assert Cause(note["cause"]) is Cause.RAISED
    assert "ValueError: wrong" in capfd.readouterr().err


def test_the_second_signal_interrupts():
    before = signal.getsignal(signal.SIGTERM)
    sent = []
    with forward_signals(sent.append):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert sent == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before
