# SPDX-License-Identifier: Apache-2.0
"""``hyper-parallel doctor``: what is installed, whether ranks can talk to each other, and what to do where they cannot.

It exits with 1 where something that is needed is broken. What only slows things down, or is needed by some, is a note.
"""

from __future__ import annotations

import json
import os
import platform as machine
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from hyper_parallel.cli.checkpoints import application
from hyper_parallel.cli.describe import size_text
from hyper_parallel.cli.failures import WRONG, Debug, told

COMPILED = {
    "hyper_parallel.core.shard._fast": "dispatch of operators",
    "hyper_parallel.core.distributed_checkpoint._block_sums": "checksums of checkpoints",
}
EXTRAS = {
    "pydantic": "cli",
    "yaml": "cli",
    "tensorboard": "cli",
    "transformers": "models",
}
LITTLE = {
    "memory": 1 << 30,
    "disk": 1 << 30,
    "shared memory": 128 << 20,
}  # bytes below which one is warned
COLOURS = {"ok": "green", "note": "yellow", "broken": "red"}

_EPILOG = """
Examples:

    hyper-parallel doctor

    hyper-parallel doctor --framework torch --timeout 300
"""


class Framework(str, Enum):
    """Those that there are."""

    torch = "torch"
    mindspore = "mindspore"


@dataclass(frozen=True)
class Finding:
    """One line: "ok", "note" or "broken", what it is about, what was found, and what to do about it."""

    state: str
    what: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.state:<7} {self.what:<24} {self.found}{f'; {self.remedy}' if self.remedy else ''}"


@application.command(epilog=_EPILOG)
@told
def doctor(
    framework: Annotated[
        Framework | None,
        typer.Option(help="Look at this one alone; else at all that are there."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds for the round trip of each framework.")
    ] = 180.0,
    debug: Debug = False,  # noqa: ARG001 - for the decorator
) -> None:
    """Tells whether this machine can run hyper_parallel, and what to do where it cannot."""
    console = Console(highlight=False, soft_wrap=True)
    broken = 0
    wanted = Framework if framework is None else (framework,)
    for finding in findings([one.value for one in wanted], timeout):
        line, state = escape(str(finding)), finding.state
        console.print(f"[{COLOURS[state]}]{line[: len(state)]}[/]{line[len(state) :]}")
        broken += state == "broken"
    if broken:
        raise typer.Exit(WRONG)


def findings(frameworks: Sequence[str], timeout: float) -> Iterator[Finding]:
    """Everything that is looked at, in the order in which it is told."""
    python = f"{machine.python_version()}, {machine.system()} {machine.machine()}, {os.cpu_count()} cores"
    yield Finding("ok", "python", python)
    yield Finding("ok", "hyper_parallel", _version("hyper_parallel"))
    yield from _compiled()
    there = [name for name in frameworks if find_spec(name) is not None]
    for name in frameworks:
        if name in there:
            yield from _framework(name, timeout)
        else:
            needed = (
                not there
                or os.environ.get("HYPER_PARALLEL_PLATFORM") == name
                or len(frameworks) == 1
            )
            remedy = f"pip install 'hyper_parallel[{name}]'"
            yield Finding(
                "broken" if needed else "note", name, "is not installed", remedy
            )
    yield from _extras()
    yield from _room()


# --- what is installed


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # it is imported from a folder of sources
        return "of unknown version"


def _compiled() -> Iterator[Finding]:
    for module, what in COMPILED.items():
        if os.environ.get("HYPER_PARALLEL_PURE_PYTHON", "").lower() not in (
            "",
            "0",
            "false",
            "no",
        ):
            remedy = "unset HYPER_PARALLEL_PURE_PYTHON"
            yield Finding(
                "note",
                f"compiled {what.split()[0]}",
                f"{what}: switched off, the Python twin runs",
                remedy,
            )
        elif find_spec(module) is None:
            remedy = "it is faster if installed where there is a C compiler: pip install --no-binary hyper_parallel ..."
            yield Finding(
                "note",
                f"compiled {what.split()[0]}",
                f"{what}: not compiled, the Python twin runs",
                remedy,
            )
        else:
            yield Finding("ok", f"compiled {what.split()[0]}", what)


def _extras() -> Iterator[Finding]:
    for module, extra in EXTRAS.items():
        if find_spec(module) is None:
            yield Finding(
                "note",
                module,
                "is not installed",
                f"if you need it: pip install 'hyper_parallel[{extra}]'",
            )


# --- a framework


def _framework(name: str, timeout: float) -> Iterator[Finding]:
    """Version, device, and two processes that talk to each other, in a process of its own that may fail or hang."""
    yield Finding("ok", name, _version(name))
    facts, problem = _round_trip(name, timeout)
    if "device" in facts:
        kind = facts["kind"]
        said = (
            f"{facts['device']}{'; no accelerator was found' if kind == 'cpu' else ''}"
        )
        yield Finding("ok", f"{name} device", said)
    if not problem:
        told_backend = f"{facts['backend']}: two processes exchanged data in {facts['seconds']:.1f} s"
        yield Finding("ok", f"{name} ranks", told_backend)
    elif "device" in facts:
        remedy = (
            "look at firewalls for the loopback interface, at free memory and at "
            "`ulimit -u`; --timeout gives more time"
        )
        yield Finding("broken", f"{name} ranks", problem, remedy)
    else:
        remedy = (
            f"install it again: pip install --force-reinstall 'hyper_parallel[{name}]'"
        )
        yield Finding("broken", f"{name} import", problem, remedy)


def _round_trip(name: str, timeout: float) -> tuple[dict[str, Any], str]:
    """What the process found, and how it failed if it did."""
    command = [sys.executable, "-m", "hyper_parallel.cli.round_trip", name]
    surroundings = {"GLOG_v": "3", **os.environ, "OMP_NUM_THREADS": "1"}
    try:
        run = subprocess.run(  # noqa: S603 - our own module
            command,
            env=surroundings,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        written = error.stdout or b""
        return _facts(
            written.decode() if isinstance(written, bytes) else written
        ), f"no answer after {timeout:g} s"
    last = next(
        (line for line in reversed(run.stderr.splitlines()) if line.strip()),
        f"exit code {run.returncode}",
    )
    return _facts(run.stdout), "" if run.returncode == 0 else last.strip()


def _facts(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in text.splitlines():  # frameworks write lines of their own too
        if line.startswith("{"):
            found.update(json.loads(line))
    return found


# --- room


def _room() -> Iterator[Finding]:
    yield _enough("memory", _free_memory(), "", "use smaller batches or fewer ranks")
    for what, folder in (("disk", Path.cwd()), ("disk", Path(tempfile.gettempdir()))):
        yield _enough(
            what,
            shutil.disk_usage(folder).free,
            f" in {folder}",
            "checkpoints and logs need room",
        )
    shared = Path("/dev/shm")  # noqa: S108 - it is only asked how large it is
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        yield _enough(
            "shared memory",
            free,
            f" in {shared}",
            "in a container: docker run --shm-size=1g ...",
        )


def _enough(what: str, free: int | None, where: str, remedy: str) -> Finding:
    if free is None:
        return Finding("note", what, "this system does not say how much is free")
    state = "ok" if free >= LITTLE[what] else "note"
    return Finding(
        state, what, f"{size_text(free)} free{where}", remedy if state == "note" else ""
    )


def _free_memory() -> int | None:
    """The bytes that new processes can have, in this container if it has a limit."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(
            int(line.split()[1]) << 10
            for line in lines
            if line.startswith("MemAvailable")
        )
    except (OSError, StopIteration):
        return None
    try:
        limit, used = (
            Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip()
            for name in ("max", "current")
        )
        return min(free, int(limit) - int(used))
    except (OSError, ValueError):  # there is no limit
        return free
