# SPDX-License-Identifier: Apache-2.0
"""One rank process: runs jobs, each in a new default group, and leaves nothing of one job to the next."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hyper_parallel.platform import Platform, get_platform
from hyper_parallel.platform.platform import HYPER_PARALLEL_PLATFORM
from hyper_parallel.testing.job import Job, Outcome
from hyper_parallel.testing.parent import end_with_parent


def main(
    connection: Connection, rank: int, world_size: int, framework: str, log: str
) -> None:
    """Serves jobs until the parent closes the connection or ends."""
    _redirect_output(log)
    os.environ[HYPER_PARALLEL_PLATFORM] = framework
    end_with_parent()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    platform = get_platform()
    store = platform.new_store(is_master=True) if rank == 0 else None
    connection.send(store.port if store is not None else None)
    while True:
        try:
            payload = connection.recv_bytes()
        except (EOFError, OSError):
            return
        outcome, store = _run(payload, platform, rank, world_size, store)
        connection.send_bytes(_packed(outcome))


def _run(
    payload: bytes, platform: Platform, rank: int, world_size: int, store: Any
) -> tuple[Outcome, Any]:
    try:
        job: Job = pickle.loads(payload)  # noqa: S301 - from our own parent process
        store = store or platform.new_store(job.store_port, is_master=False)
        with _clean_surroundings(job, platform):
            platform.init_process_group(
                store=platform.prefix_store(f"job{job.number}", store),
                rank=rank,
                world_size=world_size,
                timeout=job.seconds,
            )
            try:
                platform.barrier()  # a rank that is done at once must not leave while others still connect to it
                value = job.target.load()(*job.args, **job.kwargs)
                platform.wait_grad_handle()
            finally:
                # On failure this closes the connections, so that the other ranks fail at once and do not wait.
                platform.destroy_process_group()
        return Outcome(rank, time.monotonic(), value), store
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the outcome
        return _failed(rank, error), store


def _failed(rank: int, error: BaseException) -> Outcome:
    headline = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename) != Path(__file__)]
    details = "".join(traceback.format_list(own)) + headline
    if error.__cause__ is not None:
        details += f"\ncaused by {''.join(traceback.format_exception_only(error.__cause__)).strip()}"
    return Outcome(
        rank,
        time.monotonic(),
        headline=f"raised {headline}",
        details=details,
        error=error,
    )


def _packed(outcome: Outcome) -> bytes:
    """The outcome as bytes; what cannot be pickled is told in words."""
    try:
        packed = pickle.dumps(outcome)
        pickle.loads(packed)  # noqa: S301 - an exception with arguments of its own may fail only here
    except Exception as error:  # noqa: BLE001 - user values may fail to pickle in any way
        if outcome.headline:
            return pickle.dumps(
                Outcome(
                    outcome.rank,
                    outcome.when,
                    headline=outcome.headline,
                    details=outcome.details,
                )
            )
        why = f"returned {type(outcome.value).__name__}, which cannot be sent back: {error}"
        return pickle.dumps(
            Outcome(outcome.rank, outcome.when, headline=why, details=why)
        )
    return packed


@contextmanager
def _clean_surroundings(job: Job, platform: Platform) -> Iterator[None]:
    """Seeds, environment, path, directory and warnings as every job should find them, and as they were afterwards."""
    environment, path, directory = dict(os.environ), list(sys.path), Path.cwd()
    sys.path[:] = job.path
    platform.manual_seed(0)
    random.seed(0)
    try:
        with warnings.catch_warnings():
            warnings.filters[:] = job.warning_filters  # type: ignore[index]
            warnings._filters_mutated()  # type: ignore[attr-defined]
            yield
    finally:
        os.chdir(directory)
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environment)


def _redirect_output(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    if hasattr(signal, "SIGUSR1"):  # the parent asks where a rank hangs
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=False)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
