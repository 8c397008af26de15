# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a training on this machine, watches them, and tells whose failure came first.

A rank that fails ends the job. What each rank writes to stderr is kept in the run's folder. SIGTERM and SIGINT go on to
the ranks, which save and leave.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hyper_parallel.platform.error_codes import hint
from hyper_parallel.platform.order import FIRST, HYPER_PARALLEL_CHECK_ORDER
from hyper_parallel.recipe.rank import BAD_RECIPE, FAILED, FINISHED, JOB, STOPPED
from hyper_parallel.recipe.schema import Recipe

GRACE = 5.0  # seconds in which ranks that lost another one may say so themselves
_POLL = 0.05


@dataclass(frozen=True)
class Failure:
    """How a rank failed; those that only lost another one are echoes."""

    rank: int
    when: float
    headline: str
    traceback: str
    is_echo: bool
    log: Path


class JobError(Exception):
    """Ranks that failed, the first to fail in front; ``exit_code`` is the command's."""

    def __init__(self, failures: Sequence[Failure], recipe: str | None = None) -> None:
        self.failures, self.recipe = tuple(failures), recipe
        self.code = "HP701" if recipe is not None else "HP706"
        self.exit_code = BAD_RECIPE if recipe is not None else FAILED
        super().__init__(recipe if recipe is not None else "\n".join(told(failures)))


def told(failures: Sequence[Failure], *, all_of_it: bool = False) -> list[str]:
    """The first failure whole, the others in a line each, or all of them whole."""
    first, *others = failures
    lines = [
        f"rank {first.rank} failed:{hint('HP706')}",
        first.traceback.rstrip() or first.headline,
    ]
    for other in others:
        headline = (
            other.headline
            if len(other.headline) <= 240
            else f"{other.headline[:237]}..."
        )
        lines += [f"rank {other.rank}: {headline.splitlines()[0]}"]
        lines += [other.traceback.rstrip()] if all_of_it and other.traceback else []
    return [*lines, f"what the ranks wrote is in {first.log.parent}"]


def launch(recipe: Recipe, overrides: Sequence[str], resume: str | None) -> int:
    """Trains on as many processes as the mesh has; the exit code, or a JobError."""
    logs = _log_folder(recipe)
    with tempfile.TemporaryDirectory(prefix="hyper_parallel_") as notes:
        job = {
            "path": str(recipe.path),
            "overrides": list(overrides),
            "nproc": recipe.ranks,
            "resume": resume,
            "launcher": os.getpid(),
        }
        (Path(notes) / JOB).write_text(json.dumps(job))
        ranks = _Ranks(recipe, Path(notes), logs)
        try:
            ranks.watch()
        finally:
            ranks.end()
        codes = [process.returncode for process in ranks.processes]
        if all(code == FINISHED for code in codes):
            return FINISHED
        if all(code in (FINISHED, STOPPED) for code in codes) or (
            ranks.was_asked and not ranks.noted()
        ):
            return STOPPED
        raise _failure(ranks)


def _failure(ranks: _Ranks) -> JobError:
    notes = ranks.noted()
    recipes = [note["recipe"] for note in notes.values() if note["recipe"] is not None]
    if recipes:
        return JobError((), recipes[0])
    failures = []
    for rank, process in enumerate(ranks.processes):
        log, note = ranks.log(rank), notes.get(rank)
        if note is not None:
            failures.append(
                Failure(
                    rank,
                    note["when"],
                    note["headline"],
                    note["traceback"],
                    note["is_echo"],
                    log,
                )
            )
        elif rank in ranks.ended_by_itself and process.returncode not in (
            FINISHED,
            STOPPED,
        ):
            how = _how(process.returncode)
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            failures.append(
                Failure(
                    rank,
                    ranks.ended_by_itself[rank],
                    how,
                    f"{tail}\n{how}".strip(),
                    is_echo=False,
                    log=log,
                )
            )
        elif rank not in ranks.ended_by_itself:
            told_off = f"did not end within {GRACE:g} s after that and was ended"
            failures.append(
                Failure(rank, float("inf"), told_off, "", is_echo=True, log=log)
            )
    return JobError(
        sorted(failures, key=lambda failure: (failure.is_echo, failure.when))
    )


def _how(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        return f"it was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"it was killed by signal {-code}"


class _Ranks:
    """The processes of a job."""

    def __init__(self, recipe: Recipe, notes: Path, logs: Path) -> None:
        self._notes, self._logs = notes, logs
        self.was_asked = False
        self.ended_by_itself: dict[int, float] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
        job = environment(recipe.framework, recipe.ranks)
        for rank in range(recipe.ranks):
            own = {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with self.log(rank).open("wb") as log:
                self.processes.append(
                    _started([str(notes)], own, None if rank == 0 else log, log)
                )

    def log(self, rank: int) -> Path:
        """What a rank wrote; of the first rank, to stderr alone."""
        return self._logs / f"rank-{rank}.log"

    def noted(self) -> dict[int, dict[str, Any]]:
        """The errors that ranks have left notes of."""
        files = {
            rank: self._notes / f"rank-{rank}.json"
            for rank in range(len(self.processes))
        }
        return {
            rank: json.loads(file.read_text())
            for rank, file in files.items()
            if file.exists()
        }

    def watch(self) -> None:
        """Returns when all ranks have ended, or some time after one has failed."""
        with _passed_on(self._ask):
            deadline = float("inf")
            while (
                len(self.ended_by_itself) < len(self.processes)
                and time.monotonic() < deadline
            ):
                for rank, process in enumerate(self.processes):
                    if rank not in self.ended_by_itself and process.poll() is not None:
                        self.ended_by_itself[rank] = time.monotonic()
                        if process.returncode not in (FINISHED, STOPPED):
                            deadline = min(deadline, time.monotonic() + GRACE)
                time.sleep(_POLL)

    def end(self) -> None:
        """Ends what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def _ask(self, number: int) -> None:
        self.was_asked = True
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)


class _passed_on:  # noqa: N801 - a context, as those of contextlib
    """A context in which SIGTERM and SIGINT are handed on; a second one is an interrupt."""

    def __init__(self, ask: Callable[[int], None]) -> None:
        self._ask = ask
        self._count = 0

    def __enter__(self) -> None:
        self._before = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGTERM, signal.SIGINT)
        }

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, *_: Any) -> None:
        self._count += 1
        if self._count > 1:
            raise KeyboardInterrupt
        self._ask(signal.SIGTERM)


def _find_port() -> int:
    """A port that is free, and that the kernel gives to no connection before rank 0 listens on it."""
    below_those_of_connections = random.sample(range(20_000, 32_000), 100)
    for port in (*below_those_of_connections, 0):
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return int(tried.getsockname()[1])
    raise OSError("there is no free port for the ranks to meet at")


def environment(framework: str, ranks: int) -> dict[str, str]:
    """What every rank of a job on this machine finds in its environment."""
    port = _find_port()
    threads = (
        max(1, len(os.sched_getaffinity(0)) // ranks)
        if hasattr(os, "sched_getaffinity")
        else 1
    )
    calm = {
        "OMP_NUM_THREADS": str(threads),
        **({"GLOG_v": "3"} if framework == "mindspore" else {}),
    }
    return {
        **calm,
        "HYPER_PARALLEL_CHECK_BATCHES": "first:3",  # of every place where plain tensors go in
        HYPER_PARALLEL_CHECK_ORDER: f"first:{FIRST}",
        **os.environ,
        "HYPER_PARALLEL_PLATFORM": framework,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }


def _started(
    arguments: list[str], own: Mapping[str, str], out: IO[bytes] | None, err: IO[bytes]
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hyper_parallel.recipe.rank", *arguments]
    # In a session of its own, so that Ctrl-C reaches it through the launcher alone.
    return subprocess.Popen(  # noqa: S603 - ours
        command,
        env=dict(own),
        stdin=subprocess.PIPE,
        stdout=out,
        stderr=err,
        start_new_session=True,
    )


def _log_folder(recipe: Recipe) -> Path:
    folder = (
        recipe.folder / "ranks"
        if recipe.folder is not None
        else Path(tempfile.mkdtemp(prefix="hyper_parallel_logs_"))
    )
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()
