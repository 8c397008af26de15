# SPDX-License-Identifier: Apache-2.0
"""Turns a failed collective into an error that says who waited where, and for whom.

A backend only says that a wait timed out or a connection closed. Every rank that fails therefore leaves a note in
the job's store and reads the notes of the others: a rank of the group without a note never came. A rank that still
waits in the same collective, because it does not talk to the missing one itself, has its note left by a thread.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.platform.axes import axis_of
from hyper_parallel.platform.errors import CommunicationError, unfinished
from hyper_parallel.platform.torch import gloo, order
from hyper_parallel.platform.torch.asking import StoreSilentError, ask_store
from hyper_parallel.platform.torch.order import NOTE_SECONDS

# How often the thread looks whether others have failed in the collective that this rank waits in.
LOOK_SECONDS = 0.25

# How long the store may take to answer a rank that wants to know, or tell, why a collective fails.
ANSWER_SECONDS = 2.0

# What a backend raises when a peer does not come or goes away; anything else is a bad call and passes through.
BACKEND_ERRORS = (RuntimeError,)


# thread -> the collective that it waits in, the group, and since when.
WAITING: dict[int, tuple[str, dist.ProcessGroup, float]] = {}


def longest_wait() -> tuple[str, float] | None:
    """(collective, seconds) of the longest wait that lasts on any thread."""
    waits = list(WAITING.values())
    if not waits:
        return None
    collective, _, since = min(waits, key=lambda wait: wait[2])
    return collective, time.monotonic() - since


_timeouts: WeakKeyDictionary[dist.ProcessGroup, timedelta] = WeakKeyDictionary()


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of a group may take, as whoever made the group has said."""
    timeout = _timeouts.get(group)
    if timeout is None:
        timeout = _timeouts[group] = _read_timeout(group)
    return timeout


def _read_timeout(group: dist.ProcessGroup) -> timedelta:
    for device in group._device_types:
        try:
            found = group._get_backend(device).options._timeout
        except (
            AttributeError,
            RuntimeError,
        ):  # no backend for that device, or one without options
            continue
        if isinstance(found, timedelta):
            return found
    return dist.default_pg_timeout


@contextmanager
def waiting_in(collective: str, group: dist.ProcessGroup) -> Iterator[None]:
    """A context in which this thread waits for others."""
    thread = threading.get_ident()
    _keep_lookout()
    WAITING[thread] = (collective, group, time.monotonic())
    try:
        yield
    finally:
        WAITING.pop(thread, None)


class Handle:
    """An operation under way: ``wait()`` returns when its tensor may be read, or raises a CommunicationError."""

    def __init__(
        self,
        work: Any,
        collective: str,
        group: dist.ProcessGroup,
        finish: Any = None,
        peer: int | None = None,
    ) -> None:
        self._work = work
        self._collective = collective
        self._group = group
        self._finish = finish
        self._peer = (
            peer  # the one other rank that takes part, in point-to-point communication
        )
        self._number, compared = order.last(group) if peer is None else (0, False)
        self._waiting = order.Wait(group) if compared else None

    def wait(self) -> bool:
        """Waits (on an accelerator: makes the current stream wait) and, the first time, finishes the result."""
        if self._work is not None:
            work, self._work = self._work, None
            try:
                with waiting_in(self._collective, self._group):
                    self._complete(work)
            except BACKEND_ERRORS as error:
                raise explain(
                    error, self._collective, self._group, self._peer, self._number
                ) from error
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return True

    def _complete(self, work: Any) -> None:
        waiting = self._waiting
        works = [work]
        if isinstance(work, gloo.SeveralWorks):
            if waiting is None or work.has_messages:
                work.wait(timeout_of(self._group))
                return
            works = list(work.works)
        for one in works:
            self._complete_one(one, waiting)

    def _complete_one(self, work: Any, waiting: order.Wait | None) -> None:
        if waiting is None or dist.get_backend(self._group) != "gloo":
            work.wait()
            return
        # gloo goes on with an operation for which the wait has timed out
        while not _completes(work, LOOK_SECONDS) and not self._has_ended(work, waiting):
            pass
        if waiting.is_told:
            ask_store(waiting.end, ANSWER_SECONDS)

    def _has_ended(self, work: Any, waiting: order.Wait) -> bool:
        """Whether an operation has ended meanwhile; raises what it failed with, or why it cannot complete."""
        if (
            work.is_completed()
        ):  # with an error of its own, or just now, after the wait had timed out
            work.wait()
            return True
        try:
            ask_store(waiting.look, ANSWER_SECONDS)
        except StoreSilentError:
            return False  # nothing can be learnt; the backend ends the wait in time
        except BaseException as error:
            # Ranks that have left may have completed it first, and what they sent is still on its way.
            if isinstance(error, order.RanksLeftError) and _completes(
                work, ANSWER_SECONDS
            ):
                return True
            _keep_for_ever(self._group)
            raise
        return False

    def is_completed(self) -> bool:
        """Whether the operation has ended; its result may still need ``wait()``."""
        return self._work is None or bool(self._work.is_completed())


def _completes(work: Any, seconds: float) -> bool:
    """Whether an operation completes within some seconds."""
    try:
        work.wait(timedelta(seconds=seconds))
    except BACKEND_ERRORS:
        return False
    return True


def _keep_for_ever(group: dist.ProcessGroup) -> None:
    """Has a group outlive the process: gloo cannot end an operation, and to free the group would wait for it.

    That wait would come whenever Python frees what refers to the group, or at its end, and last for the whole timeout.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def explain(
    error: BaseException,
    collective: str,
    group: dist.ProcessGroup,
    peer: int | None = None,
    number: int = 0,
) -> CommunicationError:
    """The CommunicationError for a backend's error in ``collective`` on ``group``, or with one ``peer`` of it."""
    if isinstance(error, CommunicationError):
        return error
    if not isinstance(
        error, order.RanksLeftError
    ):  # others may have left since, because of these
        error = _known_failure(group) or error
    if isinstance(error, CommunicationError):
        return error
    rank = dist.get_rank()
    ranks = (
        dist.get_process_group_ranks(group) if peer is None else sorted([rank, peer])
    )
    notes = _exchange_notes(_notes_key(group), rank, ranks, collective)
    return _communication_error(error, collective, group, ranks, notes, number)


def _known_failure(group: dist.ProcessGroup) -> RuntimeError | None:
    try:
        return ask_store(lambda: order.failure(group), ANSWER_SECONDS)
    except BACKEND_ERRORS:
        return None  # the store has ended, or does not answer


def explain_group(
    error: BaseException, ranks: list[int], notes_key: str
) -> CommunicationError:
    """A CommunicationError for a group of ``ranks`` that could not be made."""
    notes = _exchange_notes(
        notes_key, dist.get_rank(), ranks, "the creation of the group"
    )
    return _communication_error(error, "the creation of the group", None, ranks, notes)


def _notes_key(group: dist.ProcessGroup) -> str:
    return f"hyper_parallel/fault/{group.group_name}"


class Lookout(threading.Thread):
    """Leaves a note for every collective that this process waits in and that others report as failed."""

    def __init__(self) -> None:
        super().__init__(name="hyper_parallel-lookout", daemon=True)
        self._ended = threading.Event()

    def run(self) -> None:
        """Looks around as long as there is a job."""
        while dist.is_initialized() and not self._ended.wait(LOOK_SECONDS):
            for collective, group, since in list(WAITING.values()):
                if time.monotonic() - since > LOOK_SECONDS:
                    self._note(collective, group)

    def end(self) -> None:
        """Stops looking and waits for that, unless the store does not answer."""
        self._ended.set()
        self.join(ANSWER_SECONDS)

    def _note(self, collective: str, group: dist.ProcessGroup) -> None:
        try:
            store = dist.PrefixStore(  # type: ignore[attr-defined]
                _notes_key(group), distributed_c10d._get_default_store()
            )
            if store.check([_FAILED]):
                store.set(str(dist.get_rank()), collective)
        except (*BACKEND_ERRORS, ValueError):
            return  # the store or the job has ended; the wait will end with it


_FAILED = "failed"
_lookout: Lookout | None = None


def _keep_lookout() -> None:
    """Starts the thread if it does not run: also for a job that was joined without our init_process_group."""
    global _lookout  # noqa: PLW0603 - one thread a process
    if _lookout is None or not _lookout.is_alive():
        _lookout = Lookout()
        _lookout.start()


@atexit.register
def end_lookout() -> None:
    """Ends the thread with the job or the process: a thread inside the store must not meet the interpreter's end."""
    if _lookout is not None and _lookout.is_alive():
        _lookout.end()


def _exchange_notes(
    key: str, rank: int, ranks: list[int], note: str
) -> dict[int, str] | None:
    """The notes of the group's ranks, this one's included; None if the store does not answer."""
    try:
        return ask_store(
            lambda: _read_notes(key, rank, ranks, note), NOTE_SECONDS + ANSWER_SECONDS
        )
    except BACKEND_ERRORS:
        return None


def _read_notes(key: str, rank: int, ranks: list[int], note: str) -> dict[int, str]:
    store = distributed_c10d._get_default_store()
    store = dist.PrefixStore(key, store)  # type: ignore[attr-defined]
    store.set(str(rank), note)
    store.set(_FAILED, "")
    deadline = time.monotonic() + NOTE_SECONDS
    while True:
        present = [r for r in ranks if store.check([str(r)])]
        if len(present) == len(ranks) or time.monotonic() > deadline:
            return {r: store.get(str(r)).decode() for r in present}
        time.sleep(0.02)


def _communication_error(
    error: BaseException,
    collective: str,
    group: dist.ProcessGroup | None,
    ranks: list[int],
    notes: dict[int, str] | None,
    number: int = 0,
) -> CommunicationError:
    missing = None if notes is None else tuple(r for r in ranks if r not in notes)
    name = None if group is None else group.group_name
    axis = axis_of(ranks if group is None else dist.get_process_group_ranks(group))
    return unfinished(
        dist.get_rank(),
        collective,
        name,
        ranks,
        missing,
        notes or {},
        error,
        number=number,
        axis=axis,
    )
