# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: Linux network namespaces, joined by links of a given rate that can be cut.

    with Hosts(2, rate="200mbit") as hosts:
        server = hosts.start(0, ["python", "serve.py"])
        hosts.cut(1)  # from now on nothing reaches host 1

    python -m tools.hosts run --hosts 2 --rate 200mbit -- \\
        torchrun --nnodes {hosts} --node-rank {host} --master-addr {master} --master-port 29500 train.py
    python -m tools.hosts clean

Every host has its own interface, addresses and ports; files and processors are shared. A switch, a namespace with a
bridge, joins them, so the machine's own network is neither used nor changed. Needs Linux, root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

INTERFACE = "eth0"
NETWORK = "10.213.0"  # only inside the namespaces, so that runs do not meet
_PREFIX = "hosts"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-(\d+)-\d+-\w+")
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_numbers = itertools.count()


def why_unavailable() -> str:
    """Why hosts cannot be made here; "" where they can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 not found"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Hosts(1, rate="1gbit"):
            return ""
    except RuntimeError as error:  # a container may lack rights, a kernel its modules
        return str(error)


class Hosts:
    """Hosts that reach each other; a context at whose end they, their links and their processes are gone.

    ``rate``: of each host's link in either direction, such as "200mbit"; None for one without a limit.
    """

    def __init__(self, count: int, rate: str | None = None) -> None:
        if count < 1:
            raise ValueError(f"Hosts: count must be positive, got {count}")
        self.count, self.rate = count, rate
        self._burst = _choose_burst(rate) if rate is not None else 0
        owner = f"{_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{next(_numbers)}"
        self._switch = f"{owner}-switch"
        self.namespaces = [f"{owner}-{host}" for host in range(count)]
        self._processes: list[subprocess.Popen[Any]] = []
        self._context = ExitStack()

    @property
    def addresses(self) -> list[str]:
        """The address of each host."""
        return [f"{NETWORK}.{host + 1}" for host in range(self.count)]

    def __enter__(self) -> Hosts:
        with ExitStack() as context:
            context.enter_context(_terminations_raise())
            context.callback(self._remove)
            self._make()
            self._context = context.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def start(
        self, host: int, command: Sequence[str], **options: Any
    ) -> subprocess.Popen[Any]:
        """Starts a command on a host, with `variables(host)`; ``options`` are those of subprocess.Popen."""
        environment = options.pop("env", os.environ)
        process = subprocess.Popen(  # noqa: S603 - the caller's command
            ["ip", "netns", "exec", self.namespaces[host], *command],  # noqa: S607
            env={**environment, **self.variables(host)},
            start_new_session=True,
            **options,
        )
        self._processes.append(process)
        return process

    def variables(self, host: int) -> dict[str, str]:
        """What a command on a host finds in its environment."""
        return {
            "HOST": str(host),
            "HOSTS": str(self.count),
            "HOST_ADDRESS": self.addresses[host],
            "HOST_ADDRESSES": ",".join(self.addresses),
            "HOST_MASTER": self.addresses[0],
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
        }

    def cut(self, host: int) -> None:
        """Takes the link of a host down; connections stay open and stall, as with a cable that is pulled."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "down")

    def restore(self, host: int) -> None:
        """Takes the link of a host up again; packets pass when this returns."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "up")
        self._wait_for_link(host)

    def _make(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for host, name in enumerate(self.namespaces):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            self._connect(host, name)
        for host in range(self.count):
            self._wait_for_link(host)

    def _wait_for_link(self, host: int) -> None:
        """Waits until the kernel has noticed that a link is up, which it may do up to a second later."""
        deadline = time.monotonic() + 10
        ends = (self.namespaces[host], INTERFACE), (self._switch, f"port{host}")
        while not all(_is_up(*end) for end in ends):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the link of host {host} does not come up")
            time.sleep(0.02)

    def _connect(self, host: int, name: str) -> None:
        """Joins a host to the switch; either end limits what it sends."""
        port = f"port{host}"
        ends = (
            f"{INTERFACE} netns {name} type veth peer name {port} netns {self._switch}"
        )
        _run("ip", "link", "add", *ends.split())
        if self.rate is not None:
            self._limit(name, INTERFACE)
            self._limit(self._switch, port)
        address = f"{self.addresses[host]}/24"
        _run("ip", "-n", name, "address", "add", address, "dev", INTERFACE)
        _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge")
        _run("ip", "-n", self._switch, "link", "set", port, "up")
        _run("ip", "-n", name, "link", "set", INTERFACE, "up")

    def _limit(self, namespace: str, device: str) -> None:
        bucket = f"rate {self.rate} burst {self._burst} latency 50ms"
        where = ["-n", namespace, "qdisc", "add", "dev", device, "root", "tbf"]
        _run("tc", *where, *bucket.split())

    def _remove(self) -> None:
        with _signals_wait():
            for process in self._processes:
                _kill_session(process)
            _remove_namespaces([self._switch, *self.namespaces])


def _is_up(namespace: str, device: str) -> bool:
    """Whether a device carries packets, as a port of a switch too."""
    [link] = json.loads(_run("ip", "-n", namespace, "-d", "-j", "link", "show", device))
    port = link["linkinfo"].get("info_slave_data", {})
    is_forwarding = port.get("state", "forwarding") == "forwarding"
    return link["operstate"] == "UP" and is_forwarding


def clean(*, also_running: bool = False) -> list[str]:
    """Removes the namespaces of runs that were killed, or of all runs; their names."""
    listed = _run("ip", "netns", "list").split()
    leftovers = []
    for name in listed:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        pid, start = int(match[1]), int(match[2])
        if also_running or _start_time(pid) != start:
            leftovers.append(name)
    _remove_namespaces(leftovers)
    return leftovers


def _remove_namespaces(names: Sequence[str]) -> None:
    """Kills what runs in namespaces and deletes them, those of them that exist."""
    existing = set(_run("ip", "netns", "list").split()).intersection(names)
    for name in existing:
        _kill_processes(name)
    for name in existing:
        _run("ip", "netns", "delete", name)


def _kill_session(process: subprocess.Popen[Any]) -> None:
    """Kills a process that may not have entered its namespace yet, with those that it has started."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _kill_processes(namespace: str) -> None:
    """A namespace whose processes still run would stay without a name."""
    deadline = time.monotonic() + 10
    while pids := _run("ip", "netns", "pids", namespace).split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {pids} of {namespace} do not end")
        time.sleep(0.02)


def _choose_burst(rate: str) -> int:
    """The bytes of a token bucket: what the link carries in 10 ms, and at least one large segment."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None:
        message = f"Hosts: rate must be a number and kbit, mbit or gbit, got {rate!r}"
        raise ValueError(message)
    bits = float(match[1]) * _UNITS[match[2]]
    return max(1 << 17, int(bits / 8 / 100))


def _start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot; tells it from a later one with the same id."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19])


def _run(*command: str) -> str:
    """What a command of iproute2 prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def _terminations_raise() -> Iterator[None]:
    """A context in which SIGTERM unwinds the stack, as SIGINT does, unless the program handles it."""
    is_main = threading.current_thread() is threading.main_thread()
    is_handled = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    if not is_main or is_handled:
        yield
        return
    signal.signal(signal.SIGTERM, _exit_by_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit_by_signal(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """A context that SIGTERM and SIGINT do not interrupt."""
    numbers = {signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command on every host, or removes what a killed run has left; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.hosts")
    commands = parser.add_subparsers(dest="action", required=True)
    run = commands.add_parser("run", help="run a command on every host")
    run.add_argument("--hosts", type=int, default=2)
    run.add_argument("--rate", help="of each link, such as 200mbit; else unlimited")
    run.add_argument(
        "command",
        nargs="+",
        help="{host}, {hosts}, {address} and {master} are replaced in each argument",
    )
    cleaning = commands.add_parser("clean", help="remove what killed runs have left")
    cleaning.add_argument("--all", action="store_true", help="also those still running")
    options = parser.parse_args(arguments)
    reason = why_unavailable()
    if reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    if options.action == "clean":
        for name in clean(also_running=options.all):
            print(f"removed {name}")
        return 0
    with Hosts(options.hosts, options.rate) as hosts:
        return _run_on_all(hosts, options.command)


def _run_on_all(hosts: Hosts, command: Sequence[str]) -> int:
    """The first exit code that is not 0; a host that fails does not end the others."""
    started = []
    for host, address in enumerate(hosts.addresses):
        values = {"host": host, "hosts": hosts.count, "address": address}
        values["master"] = hosts.addresses[0]
        started.append(hosts.start(host, _fill_in(command, values)))
    codes = [process.wait() for process in started]
    return next((code for code in codes if code), 0)


def _fill_in(command: Sequence[str], values: Mapping[str, object]) -> list[str]:
    filled = list(command)
    for name, value in values.items():
        filled = [part.replace(f"{{{name}}}", str(value)) for part in filled]
    return filled


if __name__ == "__main__":
    raise SystemExit(main())
