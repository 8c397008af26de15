# SPDX-License-Identifier: Apache-2.0
"""One rank process: runs jobs, each in a new default group, and leaves nothing of one job to the next."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hyper_parallel.platform import Platform, get_platform
from hyper_parallel.platform.platform import HYPER_PARALLEL_PLATFORM
from hyper_parallel.ranks.failures import Failure, find_cause, format_headline
from hyper_parallel.ranks.job import Job, Outcome
from hyper_parallel.ranks.logs import redirect_output, show_stack_on_request
from hyper_parallel.ranks.parent import end_with_parent


def main(
    connection: Connection, rank: int, world_size: int, framework: str, log: str
) -> None:
    """Serves jobs until the parent closes the connection or ends."""
    redirect_output(log)
    show_stack_on_request(all_threads=False)  # the parent asks where a rank hangs
    os.environ[HYPER_PARALLEL_PLATFORM] = framework
    end_with_parent(wait=_wait_for_session)
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
        return Outcome(rank, value), store
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the outcome
        return _failed(rank, error), store


def _failed(rank: int, error: BaseException) -> Outcome:
    headline = format_headline(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename) != Path(__file__)]
    details = "".join(traceback.format_list(own)) + headline
    if error.__cause__ is not None:
        details += f"\ncaused by {format_headline(error.__cause__)}"
    failure = Failure(
        rank, time.monotonic(), f"raised {headline}", details, find_cause(error)
    )
    return Outcome(rank, failure=failure, error=error)


def _packed(outcome: Outcome) -> bytes:
    """The outcome as bytes; what cannot be pickled is described in words."""
    try:
        packed = pickle.dumps(outcome)
        pickle.loads(packed)  # noqa: S301 - an exception with arguments of its own may fail only here
    except Exception as error:  # noqa: BLE001 - user values may fail to pickle in any way
        if outcome.failure is not None:
            return pickle.dumps(replace(outcome, error=None))
        kind = type(outcome.value).__name__
        why = f"returned {kind}, which cannot be sent back: {error}"
        failure = Failure(outcome.rank, time.monotonic(), why, why)
        return pickle.dumps(Outcome(outcome.rank, failure=failure))
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


def _wait_for_session() -> None:
    # The kernel ends this process with the server that forked it, which may outlive the session.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
