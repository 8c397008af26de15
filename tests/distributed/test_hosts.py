# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: their links, what they leave behind, training across them, and a link that is cut."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import small_training

from hyper_parallel.testing import run_ranks
from tools.hosts import Hosts, clean, why_unavailable

REASON = why_unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

ROOT = Path(__file__).resolve().parents[2]

SERVER = """
import socket, time
with socket.create_server(("", 7000)) as server:
    print("up", flush=True)
    while True:
        connection, _ = server.accept()
        with connection:
            began, received = time.monotonic(), 0
            while data := connection.recv(1 << 20):
                received += len(data)
            print(received / max(time.monotonic() - began, 1e-9), flush=True)
"""
CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[3])) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""


@contextmanager
def serving(hosts):
    """A server on host 0, which prints the rate of everything that it receives; its output."""
    server = hosts.start(
        0, [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True
    )
    with server.stdout as output:
        assert output.readline() == "up\n"
        yield output


def send(hosts, count=1, timeout=10.0):
    """Whether host 1 can send bytes to host 0; packets that are lost are sent again for as long as ``timeout``."""
    arguments = [hosts.addresses[0], str(count), str(timeout)]
    sent = hosts.start(
        1, [sys.executable, "-c", CLIENT, *arguments], stderr=subprocess.DEVNULL
    )
    return sent.wait(timeout=30) == 0


def existing():
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    )
    return {line.split()[0] for line in listed.stdout.splitlines()}


# --- links


def test_hosts_reach_each_other_unless_a_link_is_cut():
    with Hosts(2) as hosts, serving(hosts):
        assert send(hosts)
        hosts.cut(1)
        assert not send(hosts, timeout=1.0)
        hosts.restore(1)
        assert send(hosts)


def test_a_link_has_the_rate_that_was_asked_for():
    """80 Mbit/s are 10 MB/s; the control has no limit."""
    measured = {}
    for rate in ("80mbit", None):
        with Hosts(2, rate=rate) as hosts, serving(hosts) as output:
            assert send(hosts, 8_000_000, timeout=10)
            measured[rate] = float(output.readline())
    assert 5e6 < measured["80mbit"] < 13e6, measured
    assert measured[None] > 4 * measured["80mbit"], measured


@pytest.mark.parametrize("rate", ["fast", "200", "-1mbit", ""])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(
        ValueError, match="rate must be a number and kbit, mbit or gbit"
    ):
        Hosts(2, rate=rate)


# --- what is left


def is_running(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_nothing_is_left_after_an_exception():
    before = existing()
    with pytest.raises(KeyError, match="meanwhile"), Hosts(2, rate="1gbit") as hosts:
        sleeping = hosts.start(1, ["sleep", "600"])
        assert len(existing() - before) == 3
        raise KeyError("meanwhile")
    assert not existing() & set(hosts.namespaces)
    assert not is_running(sleeping.pid)


def test_nothing_is_left_where_making_hosts_fails(monkeypatch):
    monkeypatch.setattr(Hosts, "_limit", lambda *_: 1 / 0)
    hosts = Hosts(2, rate="1gbit")
    with pytest.raises(ZeroDivisionError), hosts:
        pass
    assert not existing() & {hosts._switch, *hosts.namespaces}


def start_command():
    """A run of the tool whose hosts sleep, and the namespaces that it has made."""
    # A shell that runs the tests in the background has them ignore SIGINT.
    tool = ["env", "--default-signal=INT", sys.executable, "-m", "tools.hosts", "run"]
    process = subprocess.Popen([*tool, "--", "sleep", "600"], cwd=ROOT)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        own = {name for name in existing() if name.startswith(f"hosts-{process.pid}-")}
        if len(own) == 3 and all(map(pids_in, own - {find_switch(own)})):
            return process, own
        time.sleep(0.05)
    process.kill()
    raise AssertionError("the hosts did not start")


def test_the_command_fills_in_what_a_host_is_and_fails_with_it():
    line = (
        "echo {host} of {hosts}: {address} {master} $HOST $HOST_ADDRESSES; exit {host}"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tools.hosts", "run", "--", "sh", "-c", line],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    both = "10.213.0.1,10.213.0.2"
    assert sorted(done.stdout.splitlines()) == [
        f"0 of 2: 10.213.0.1 10.213.0.1 0 {both}",
        f"1 of 2: 10.213.0.2 10.213.0.1 1 {both}",
    ]


def find_switch(names):
    return next(name for name in names if name.endswith("switch"))


def pids_in(namespace):
    listed = subprocess.run(
        ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True
    )
    return listed.stdout.split()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_after_a_signal(number):
    process, own = start_command()
    sleeping = [pid for name in own for pid in pids_in(name)]
    assert len(sleeping) == 2
    process.send_signal(number)
    assert process.wait(timeout=20) != 0
    assert not existing() & own
    assert not any(map(is_running, sleeping))


def test_clean_removes_what_a_killed_run_has_left_and_no_other():
    process, own = start_command()
    with Hosts(1) as others:
        process.kill()
        process.wait()
        assert own <= existing()
        assert own <= set(clean())
        assert not existing() & own
        assert set(others.namespaces) <= existing()


# --- training


def environment(**more):
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    return {**os.environ, **paths, "OMP_NUM_THREADS": "1", **more}


SCRIPT = str(Path(small_training.__file__))


def test_training_across_hosts_has_the_losses_of_one_host():
    """Two hosts with two ranks each: data parallel between them, tensor parallel within. Equal to the last bit."""
    with Hosts(2, rate="1gbit") as hosts:
        launched = []
        for host in range(hosts.count):
            job = (
                f"--nnodes 2 --nproc-per-node 2 --node-rank {host} --master-port 29500"
            )
            meet = [*job.split(), "--master-addr", hosts.addresses[0]]
            command = [sys.executable, "-m", "torch.distributed.run", *meet]
            options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            launched.append(
                hosts.start(
                    host,
                    [*command, SCRIPT, "2", "4", "60"],
                    env=environment(),
                    text=True,
                    **options,
                )
            )
        outputs = [process.communicate(timeout=120) for process in launched]
    for process, (out, err) in zip(launched, outputs, strict=True):
        assert process.returncode == 0, out + err
    found = [sorted(map(json.loads, out.split())) for out, _ in outputs]
    alone = run_ranks(small_training.collect, 4, 2, 4)
    assert alone[1:] == alone[:-1]
    assert len(set(alone[0])) == 4
    assert found == [sorted(alone[0] * 2)] * 2  # both ranks of each host


def test_a_link_that_is_cut_ends_the_training_on_both_sides():
    """The host of the store names who is missing; the other cannot ask, and says so. Neither hangs."""
    with Hosts(2) as hosts:
        job = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts.addresses[0]}
        job["MASTER_PORT"] = "29500"
        ranks = [
            hosts.start(
                host,
                [sys.executable, SCRIPT, "1", "1000000", "2"],
                env=environment(**job, RANK=str(host), LOCAL_RANK="0"),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host in range(2)
        ]
        for rank in ranks:  # both are in their steps
            assert rank.stdout.readline()
        hosts.cut(1)
        errors = [rank.communicate(timeout=40)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], errors
    assert re.search(r"CommunicationError: rank 0: .*never came: \[1\]", errors[0])
    assert re.search(r"CommunicationError: rank 1: .*store does not answer", errors[1])
