# SPDX-License-Identifier: Apache-2.0
"""Rank processes that are started once and run many functions.

    def square_of_rank(power):
        return get_platform().get_rank() ** power

    assert run_ranks(square_of_rank, 4, 2) == [0, 1, 4, 9]

Starting an interpreter and a framework costs seconds, a job on running ranks milliseconds. A rank that raises is
reported with its traceback; one that dies or hangs is named, and the ranks are started anew for the next job.
"""

from __future__ import annotations

import atexit
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
from typing import Any

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.ranks import worker
from hyper_parallel.ranks.activity import Activity
from hyper_parallel.ranks.environment import QUIET, default_environment
from hyper_parallel.ranks.failures import (
    Cause,
    Failure,
    describe_exit,
    order_failures,
    shorten,
)
from hyper_parallel.ranks.job import Job, Outcome, Target
from hyper_parallel.ranks.logs import RankLog
from hyper_parallel.ranks.watch import Watch

LONGEST_RUN = 60.0  # seconds, unless the caller says
# Seconds in which no rank uses the processor: they wait for each other.
LONGEST_IDLE = 5.0
GRACE = 2.0  # seconds for the other ranks to notice that one has failed
START = 60.0

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
        seconds = LONGEST_RUN if timeout is None else timeout
        idle = LONGEST_IDLE if timeout is None else None
        log_starts = [rank.log.size() for rank in self._ranks]
        self._send(target, args, kwargs, seconds)
        outcomes = self._collect(seconds, idle)
        failures = order_failures(o.failure for o in outcomes if o.failure is not None)
        if not failures:
            return [outcome.value for outcome in outcomes]
        first = failures[0].rank
        output = self._ranks[first].log.read_from(log_starts[first])
        if any(outcome.is_lost for outcome in outcomes):
            self.stop()
        raise _rank_error(target, failures, outcomes, output)

    def _send(
        self,
        target: Target,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        seconds: float,
    ) -> None:
        self._jobs += 1
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
        for rank in self._ranks:
            with suppress(OSError):  # a rank that died just now is found by `poll`
                rank.connection.send_bytes(payload)

    def _collect(self, seconds: float, idle: float | None) -> list[Outcome]:
        """The outcome of every rank; those that do not end are given up."""
        watch = Watch(
            range(self.world_size),
            lambda number: self._ranks[number].poll(),
            lambda outcome: outcome.failure is not None,
            grace=GRACE,
            seconds=seconds,
        )
        activity = Activity(idle)
        reason = ""
        while watch.pending and not reason:
            self._wait(watch.pending)
            if watch.look():
                activity.restart()
            if watch.has_expired:
                reason = f"hung: it had not ended after {seconds:g} s"
            elif watch.pending and activity.has_stopped(self._pids(watch.pending)):
                reason = f"hung: no rank did anything for {idle:g} s"
        if any(outcome.failure is not None for outcome in watch.ends.values()):
            reason = "was still waiting when another rank failed, and was stopped"
        given_up = {one: self._ranks[one].give_up(reason) for one in watch.pending}
        outcomes = watch.ends | given_up
        return [outcomes[number] for number in range(self.world_size)]

    def _wait(self, numbers: set[int]) -> None:
        """Returns when one of these ranks may have ended, or after a moment."""
        ranks = [self._ranks[number] for number in numbers]
        wait([one for rank in ranks for one in rank.waitables], timeout=0.1)

    def _pids(self, numbers: set[int]) -> list[int]:
        return [self._ranks[number].process.pid for number in numbers]

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
        ports = [rank.receive_first() for rank in self._ranks]
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
        self.log = RankLog(log)
        self.connection, child = context.Pipe()
        self.process = context.Process(
            target=worker.main,
            args=(child, number, world_size, framework, str(log)),
            daemon=True,
            name=f"rank{number}",
        )
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with warnings.catch_warnings(), default_environment(**threads, **QUIET):
            self.process.start()
        child.close()

    @property
    def waitables(self) -> list[Any]:
        """What `multiprocessing.connection.wait` takes: an answer, or the end of the process."""
        return [self.connection, self.process.sentinel]

    def receive_first(self) -> Any:
        """What the rank says when it has started."""
        try:
            if self.connection.poll(START):
                return self.connection.recv()
        except EOFError:
            pass
        raise coded(
            RuntimeError,
            "HP602",
            f"rank {self.number} did not start; it wrote:\n{self.log.read_from(0)}",
        )

    def poll(self) -> Outcome | None:
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
        headline = f"died with {describe_exit(self.process.exitcode)}"
        return self._fail(headline, Cause.DIED)

    def give_up(self, headline: str) -> Outcome:
        """The outcome of a rank that does not end, with the place where it hangs."""
        start = self.log.size()
        if hasattr(signal, "SIGUSR1") and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            deadline = time.monotonic() + 1.0
            while self.log.size() == start and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(0.05)  # the rest of the stack
        # The frames below the job are ours and explain nothing.
        own = r'  File "[^"]*worker\.py", line \d+ in _run\n(.*\n)*'
        stack = re.sub(own, "", self.log.read_from(start))
        return self._fail(headline, Cause.HUNG, stack)

    def _fail(self, headline: str, cause: Cause, details: str = "") -> Outcome:
        now = time.monotonic()
        failure = Failure(self.number, now, headline, details, cause, self.log.path)
        return Outcome(self.number, failure=failure)


def _context(framework: str) -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Imported once, in the server that the ranks are forked from.
    modules = [worker.__name__, f"hyper_parallel.platform.{framework}"]
    context.set_forkserver_preload(
        modules + (["pytest"] if "pytest" in sys.modules else []) + _preloaded
    )
    return context


def _rank_error(
    target: Target, failures: list[Failure], outcomes: list[Outcome], output: str
) -> RankError:
    first, *others = failures
    count = len(outcomes)
    lines = [f"{target} on {count} ranks: rank {first.rank} {first.headline}"]
    lines += [f"  then rank {one.rank} {shorten(one.headline)}" for one in others]
    for failure in failures:
        is_shown = failure is first or outcomes[failure.rank].is_lost
        if failure.details and is_shown:
            lines += [f"--- rank {failure.rank}", failure.details.rstrip()]
    if output.strip() and first.cause is not Cause.HUNG:
        lines += [f"--- what rank {first.rank} wrote", output.strip()]
    headlines = {failure.rank: failure.headline for failure in failures}
    error = coded(RankError, "HP601", "\n".join([*lines, "---"]), headlines)
    error.__cause__ = outcomes[first.rank].error
    return error
