# SPDX-License-Identifier: Apache-2.0
"""Rank processes that are started once and run many tests.

    @on_ranks(4)
    def test_sum():
        platform = get_platform()
        assert platform.all_reduce(platform.ones(1), None).item() == 4

Starting an interpreter and a framework costs seconds, a job on running ranks milliseconds. A rank that raises is
reported with its traceback; one that dies or hangs is named, and the ranks are started anew for the next job.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

from hyper_parallel.platform import CommunicationError, get_platform
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.testing import worker
from hyper_parallel.testing.job import Job, Outcome, Target

LONGEST_RUN = 60.0  # seconds, unless the caller says
LONGEST_IDLE = (
    5.0  # seconds in which no rank uses the processor: they wait for each other
)
LONGEST_BLINK = 0.5  # seconds between two looks at the ranks that count as watched
IDLE_SHARE = 0.05  # of one core, for each rank: what threads that only wake up now and then may use
GRACE = 2.0  # seconds for the other ranks to notice that one has failed
START = 60.0

_F = TypeVar("_F", bound=Callable[..., Any])
_pools: dict[int, RankPool] = {}
_preloaded: list[str] = []


class RankError(AssertionError):
    """A job failed. ``failures`` maps each failed rank to one line on how; the message has the traceback."""

    def __init__(self, message: str, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.failures = failures


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Runs a module-level function on ``world_size`` ranks with a default process group; returns what each returned.

    A run is given up after ``timeout`` seconds; without one, after 60, or 5 in which no rank does anything.
    Arguments and results are pickled. Any failure is a RankError.
    """
    __tracebackhide__ = True  # pytest: the rank's own traceback is in the message
    return _pool(world_size).run(Target.of(function), args, kwargs, timeout)


def preload(*modules: str) -> None:
    """Names modules that many tests need: they are imported once, and every rank that starts afterwards has them."""
    _preloaded.extend(modules)


def on_ranks(world_size: int, *, timeout: float | None = None) -> Callable[[_F], _F]:
    """Makes a test function run on every one of ``world_size`` ranks; goes together with pytest's parametrize."""

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def on_every_rank(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            run_ranks(function, world_size, *args, timeout=timeout, **kwargs)

        return on_every_rank  # type: ignore[return-value]

    return decorate


@atexit.register
def close_ranks() -> None:
    """Ends all rank processes; the next job starts new ones."""
    for pool in list(_pools.values()):
        pool.stop()
    _pools.clear()


def _pool(world_size: int) -> RankPool:
    if not isinstance(world_size, int) or world_size < 1:
        raise coded(
            ValueError,
            "HP602",
            f"run_ranks: world_size must be a positive int, got {world_size!r}",
        )
    return _pools.setdefault(world_size, RankPool(world_size))


class RankPool:
    """``world_size`` rank processes, started when first needed and again after one was lost."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: list[_Rank] = []
        self._jobs = 0
        self._store_port = 0
        self._logs: tempfile.TemporaryDirectory[str] | None = None

    def run(
        self,
        target: Target,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float | None,
    ) -> list[Any]:
        """What the target returned on each rank, or a RankError."""
        __tracebackhide__ = True
        if not self._ranks or not all(rank.process.is_alive() for rank in self._ranks):
            self._start()
        self._jobs += 1
        seconds = LONGEST_RUN if timeout is None else timeout
        job = Job(
            self._jobs,
            target,
            args,
            kwargs,
            self._store_port,
            seconds,
            list(sys.path),
            list(warnings.filters),
        )
        payload = pickle.dumps(job)
        log_starts = [rank.log_size() for rank in self._ranks]
        for rank in self._ranks:
            with suppress(OSError):  # a rank that died just now shows below
                rank.connection.send_bytes(payload)
        outcomes = self._collect(seconds, None if timeout is not None else LONGEST_IDLE)
        failed = sorted((o for o in outcomes.values() if o.headline), key=_blame)
        if not failed:
            return [outcomes[rank].value for rank in range(self.world_size)]
        outputs = {
            rank.number: rank.log_since(log_starts[rank.number]) for rank in self._ranks
        }
        if any(outcome.lost for outcome in failed):
            self.stop()
        raise _rank_error(target, self.world_size, failed, outputs)

    def _collect(self, seconds: float, idle: float | None) -> dict[int, Outcome]:
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + seconds
        given_up = ""
        activity = _Activity(idle)
        while len(outcomes) < self.world_size and not given_up:
            pending = [rank for rank in self._ranks if rank.number not in outcomes]
            wait(
                [
                    w
                    for rank in pending
                    for w in (rank.connection, rank.process.sentinel)
                ],
                timeout=0.1,
            )
            for rank in pending:
                outcome = rank.outcome()
                if outcome is not None:
                    outcomes[rank.number] = outcome
                    activity = _Activity(idle)
                    if outcome.headline:
                        deadline = min(deadline, time.monotonic() + GRACE)
            pending = [rank for rank in pending if rank.number not in outcomes]
            if pending and time.monotonic() > deadline:
                given_up = f"hung: it had not ended after {seconds:g} s"
            elif pending and activity.has_stopped(pending):
                given_up = f"hung: no rank did anything for {idle:g} s"
        if any(outcome.headline for outcome in outcomes.values()):
            given_up = "was still waiting when another rank failed, and was stopped"
        return outcomes | {
            rank.number: rank.hung(given_up)
            for rank in self._ranks
            if rank.number not in outcomes
        }

    def _start(self) -> None:
        self.stop()
        framework = get_platform().platform_type.value
        context = _context(framework)
        self._logs = tempfile.TemporaryDirectory(prefix="hyper_parallel_ranks_")
        self._ranks = [
            _Rank(
                context,
                number,
                self.world_size,
                framework,
                Path(self._logs.name) / f"rank{number}.log",
            )
            for number in range(self.world_size)
        ]
        ports = [rank.first_word() for rank in self._ranks]
        self._store_port = ports[0]

    def stop(self) -> None:
        """Ends the processes; ``run`` starts new ones."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join()
            rank.connection.close()
            rank.process.close()
        if self._logs is not None:
            self._logs.cleanup()
            self._logs = None


class _Rank:
    """One rank process as the parent sees it."""

    def __init__(
        self, context: Any, number: int, world_size: int, framework: str, log: Path
    ) -> None:
        self.number = number
        self.log = log
        self.connection, child = context.Pipe()
        self.process = context.Process(
            target=worker.main,
            args=(child, number, world_size, framework, str(log)),
            daemon=True,
            name=f"rank{number}",
        )
        # MindSpore writes forty lines of warnings where a rank joins, unless GLOG_v says that errors are enough.
        with (
            warnings.catch_warnings(),
            _environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOG_v="3"),
        ):
            self.process.start()
        child.close()

    def first_word(self) -> Any:
        try:
            if self.connection.poll(START):
                return self.connection.recv()
        except EOFError:
            pass
        raise coded(
            RuntimeError,
            "HP602",
            f"rank {self.number} did not start; it wrote:\n{self.log_since(0)}",
        )

    def outcome(self) -> Outcome | None:
        """How the job ended here, None while it runs."""
        # Asked before the connection: a rank may answer and end.
        ended = not self.process.is_alive()
        try:
            if self.connection.poll():
                outcome: Outcome = pickle.loads(self.connection.recv_bytes())  # noqa: S301 - from our own child
                return outcome
        except (EOFError, OSError):
            ended = True
            self.process.join(1.0)
        if not ended:
            return None
        code = self.process.exitcode
        how = (
            f"signal {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"exit code {code}"
        )
        return Outcome(
            self.number, time.monotonic(), headline=f"died with {how}", lost=True
        )

    def hung(self, headline: str) -> Outcome:
        """The outcome of a rank that is given up, with the place where it stands."""
        start = self.log_size()
        if hasattr(signal, "SIGUSR1") and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            deadline = time.monotonic() + 1.0
            while self.log_size() == start and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(0.05)  # the rest of the stack
        # What lies below the job is ours and says nothing.
        stack = re.sub(
            r'  File "[^"]*worker\.py", line \d+ in _run\n(.*\n)*',
            "",
            self.log_since(start),
        )
        return Outcome(
            self.number,
            time.monotonic(),
            headline=headline,
            details=stack,
            lost=True,
            hung=True,
        )

    def log_size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def log_since(self, start: int) -> str:
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            log.seek(max(start, self.log_size() - 8000))
            return log.read().decode(errors="replace")


class _Activity:
    """Whether processes use the processor; without /proc nothing is known and nothing is said.

    Time in which nobody looks does not count: the whole machine may have stood still.
    """

    def __init__(self, idle: float | None) -> None:
        self._idle = idle
        self._looked, self._watched = time.monotonic(), 0.0
        self._samples: list[
            tuple[float, float]
        ] = []  # (seconds that were watched, seconds that were used)

    def has_stopped(self, ranks: list[_Rank]) -> bool:
        """Whether these ranks have been idle for as long as is allowed."""
        if self._idle is None or not Path("/proc/self/stat").exists():
            return False
        before, self._looked = self._looked, time.monotonic()
        self._watched += min(self._looked - before, LONGEST_BLINK)
        used = sum(_processor_seconds(rank.process.pid) for rank in ranks)
        self._samples.append((self._watched, used))
        earlier = [
            sample
            for sample in self._samples
            if self._watched - sample[0] >= self._idle
        ]
        if not earlier:
            return False
        self._samples = self._samples[len(earlier) - 1 :]
        return used - earlier[-1][1] < IDLE_SHARE * self._idle * len(ranks)


def _processor_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf(
        "SC_CLK_TCK"
    )  # utime and stime


def _context(framework: str) -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Imported once, in the server that the ranks are forked from.
    modules = ["hyper_parallel.testing.worker", f"hyper_parallel.platform.{framework}"]
    context.set_forkserver_preload(
        modules + (["pytest"] if "pytest" in sys.modules else []) + _preloaded
    )
    return context


class _environment:  # noqa: N801 - a context manager
    """Environment variables for the processes that are started inside, unless the user has set them."""

    def __init__(self, **variables: str) -> None:
        self._variables = {
            name: value for name, value in variables.items() if name not in os.environ
        }

    def __enter__(self) -> None:
        os.environ.update(self._variables)

    def __exit__(self, *exc: object) -> None:
        for name in self._variables:
            del os.environ[name]


def _rank_error(
    target: Target, world_size: int, failed: list[Outcome], outputs: dict[int, str]
) -> RankError:
    first = failed[0]
    lines = [f"{target} on {world_size} ranks: rank {first.rank} {first.headline}"]
    lines += [
        f"  then rank {other.rank} {_shortened(other.headline)}" for other in failed[1:]
    ]
    shown = [o for o in failed if o.details and (o is first or o.lost)]
    for outcome in shown:
        lines += [f"--- rank {outcome.rank}", outcome.details.rstrip()]
    output = outputs[first.rank].strip()
    if output and not first.hung:
        lines += [f"--- what rank {first.rank} wrote", output]
    error = coded(
        RankError,
        "HP601",
        "\n".join([*lines, "---"]),
        {outcome.rank: outcome.headline for outcome in failed},
    )
    error.__cause__ = first.error
    return error


def _blame(outcome: Outcome) -> tuple[int, float]:
    """Sorts causes before consequences: a death, then an error, then a hang, then communication that failed."""
    if outcome.hung:
        return 2, outcome.when
    if outcome.lost:
        return 0, outcome.when
    return (3 if isinstance(outcome.error, CommunicationError) else 1), outcome.when


def _shortened(text: str, longest: int = 240) -> str:
    return text if len(text) <= longest else text[:longest] + " ..."
