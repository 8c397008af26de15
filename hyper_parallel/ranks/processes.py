# SPDX-License-Identifier: Apache-2.0
"""A job's rank processes: one ``python -m MODULE`` for each rank, started once, watched, and ended.

with RankProcesses("hyper_parallel.recipe.rank", [folder], "torch", 4, logs) as ranks:
    ranks.watch(grace=5.0)

SIGTERM and SIGINT are handed on to the ranks. A rank that fails leaves a note in a folder, which says more than its
exit code.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.ranks.environment import build_environment, number_rank
from hyper_parallel.ranks.failures import (
    Cause,
    Failure,
    describe_exit,
    find_cause,
    format_headline,
)
from hyper_parallel.ranks.logs import RankLog
from hyper_parallel.ranks.watch import Watch

_POLL = 0.05
_TAIL = 20  # lines of its log that are shown of a rank that died


@dataclass(frozen=True)
class Exit:
    """How a process ended, and when."""

    code: int
    when: float


class RankProcesses:
    """The processes of a job; a context at whose end none of them is left.

    ``successes``: exit codes with which no rank has failed. ``was_asked``: whether a signal asked the job to stop.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        framework: str,
        count: int,
        logs: Path,
        *,
        successes: Collection[int] = (0,),
    ) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._framework, self._successes = framework, successes
        self._processes: list[subprocess.Popen[bytes]] = []
        self._exits: dict[int, Exit] = {}
        self._grace = 0.0
        self.logs = [RankLog(logs / f"rank-{rank}.log") for rank in range(count)]
        self.was_asked = False

    def __enter__(self) -> RankProcesses:
        job = build_environment(self._framework, len(self.logs))
        try:
            for rank in range(len(self.logs)):
                self._start(rank, {**job, **number_rank(rank)})
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def codes(self) -> list[int | None]:
        """The exit code of each rank; None while it runs."""
        return [process.returncode for process in self._processes]

    def watch(self, grace: float) -> None:
        """Returns when all ranks have ended, or ``grace`` seconds after one has failed."""
        watch = Watch(
            range(len(self._processes)), self._poll, self._has_failed, grace=grace
        )
        with forward_signals(self.ask):
            while not watch.is_over:
                watch.look()
                time.sleep(_POLL)
        self._exits, self._grace = watch.ends, grace

    def ask(self, number: int) -> None:
        """Sends a signal to the ranks that are still running."""
        self.was_asked = True
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def end(self) -> None:
        """Kills what is still running."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def find_failure(self, rank: int, note: dict[str, Any] | None) -> Failure | None:
        """How a rank failed, by its note, its exit code, or because it did not end; None if it did not fail."""
        log = self.logs[rank]
        if note is not None:
            details, cause = note["traceback"], Cause(note["cause"])
            headline, when = note["headline"], note["when"]
            return Failure(rank, when, headline, details, cause, log.path)
        exited = self._exits.get(rank)
        if exited is None:
            headline = f"did not end within {self._grace:g} s after that and was ended"
            never = float("inf")
            return Failure(rank, never, headline, "", Cause.ECHO, log.path)
        if not self._has_failed(exited):
            return None
        how = "was killed by" if exited.code < 0 else "ended with"
        headline = f"it {how} {describe_exit(exited.code)}"
        details = f"{log.read_tail(_TAIL)}\n{headline}".strip()
        return Failure(rank, exited.when, headline, details, Cause.DIED, log.path)

    def _start(self, rank: int, environment: dict[str, str]) -> None:
        with self.logs[rank].path.open("wb") as log:
            # In a session of its own, so that Ctrl-C reaches it through this process alone.
            process = subprocess.Popen(  # noqa: S603 - the command is ours
                self._command,
                env=environment,
                stdin=subprocess.PIPE,  # its end tells the rank that this process is gone
                stdout=None if rank == 0 else log,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)

    def _poll(self, rank: int) -> Exit | None:
        code = self._processes[rank].poll()
        return None if code is None else Exit(code, time.monotonic())

    def _has_failed(self, exited: Exit) -> bool:
        return exited.code not in self._successes


@contextmanager
def forward_signals(forward: Callable[[int], None]) -> Iterator[None]:
    """A context in which SIGTERM and SIGINT ask the ranks to stop; a second one is an interrupt."""
    count = 0

    def handle(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt
        forward(signal.SIGTERM)

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- in a rank


def wait_for_launcher() -> None:
    """Returns when the process has ended that holds the other end of stdin."""
    while os.read(0, 1024):  # not sys.stdin, which would be in use while Python ends
        pass


def leave_note(folder: Path, error: BaseException, **more: Any) -> None:
    """Reports an error of this rank to the launcher and to the rank's log."""
    traceback.print_exception(error)
    sys.stderr.flush()
    note = {
        "when": time.monotonic(),
        "headline": format_headline(error),
        "traceback": "".join(traceback.format_exception(error)),
        "cause": find_cause(error),
        **more,
    }
    _note_file(folder, int(os.environ["RANK"])).write_text(json.dumps(note))


def read_notes(folder: Path, count: int) -> dict[int, dict[str, Any]]:
    """The notes that ranks have left."""
    files = {rank: _note_file(folder, rank) for rank in range(count)}
    return {
        rank: json.loads(file.read_text())
        for rank, file in files.items()
        if file.exists()
    }


def _note_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"
