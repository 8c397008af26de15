# SPDX-License-Identifier: Apache-2.0
"""Lets two threads take turns: while one communicates, the other computes.

    forward of one micro-batch     A comm  | B compute | C comm    | D compute | A comm    ...
    backward of another            C compute | B comm  | A compute | D comm    | C compute ...

Each column is one meeting. The last layer has no D: backward would begin there as COMM, as forward does at A.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hyper_parallel.platform.error_codes import coded


class HookRole:
    """What a side does behind a meeting."""

    COMM = "COMM"
    COMPUTE = "COMPUTE"


@dataclass(eq=False)
class _Meeting:
    """One rendezvous. Its sides hold on to it, so that a later enable() or disable() cannot confuse them."""

    first: str  # the role of the side that came first
    paired: bool = False  # the other side has come too
    dispatched: bool = False  # the COMM side has launched its communication
    dissolved: bool = False  # the coordinator was disabled: everyone passes
    error: BaseException | None = None  # a side failed: everyone raises


class HookCoordinator:
    """Two sides meet again and again, one as COMM and one as COMPUTE; it does not matter on which threads.

    COMM goes on as soon as both have come. COMPUTE goes on once COMM has launched its communication: it has
    said ``notify_dispatched(COMM)`` or comes to its next meeting. At first the coordinator is disabled and
    nobody waits. Whoever starts the two sides enables it; a side that has finished disables it, so that the
    other runs on alone. After a failure every meeting raises until it is enabled again.
    """

    COMM, COMPUTE = HookRole.COMM, HookRole.COMPUTE

    def __init__(self, timeout: float = 60.0) -> None:
        if not timeout > 0:
            raise coded(
                ValueError,
                "HP450",
                f"HookCoordinator: timeout must be a positive number of seconds, got {timeout!r}",
            )
        self._timeout = timeout
        self._changed = threading.Condition()
        self._enabled = False
        self._error: BaseException | None = None
        self._forming: _Meeting | None = None  # one side has come
        self._running: _Meeting | None = (
            None  # both have come, the communication is not launched: COMPUTE waits
        )

    def enable(self) -> None:
        """Makes the sides wait for each other from now on and clears a former failure."""
        with self._changed:
            self._enabled = True
            self._error = None

    def disable(self) -> None:
        """Lets everyone who waits, and everyone who comes, pass."""
        with self._changed:
            self._enabled = False
            self._error = None
            for meeting in self._take_open_meetings():
                meeting.dissolved = True

    def is_enabled(self) -> bool:
        """Whether the sides wait for each other."""
        return self._enabled

    def rendezvous(self, role: str) -> None:
        """Waits for the other side; as COMPUTE also for its communication to be launched."""
        self._check_role("rendezvous", role)
        with self._changed:
            if not self._enabled:
                return
            if self._error is not None:
                raise _released(role, self._error) from self._error
            # Whoever comes now was COMM in the running meeting, since its COMPUTE still waits there.
            self._dispatch()
            meeting = self._join(role)
            other = self.COMM if role == self.COMPUTE else self.COMPUTE
            self._wait(
                meeting, role, lambda: meeting.paired, f"no side came as {other}"
            )
            if role == self.COMPUTE:
                launched = (
                    f"the {self.COMM} side came but did not launch its communication"
                )
                self._wait(meeting, role, lambda: meeting.dispatched, launched)

    def notify_dispatched(self, role: str) -> None:
        """Says that the caller's communication is launched, so that the other side may compute.

        Ignored unless both sides have come: until then nothing of that meeting can have been launched. As
        COMPUTE it says nothing that anyone waits for.
        """
        self._check_role("notify_dispatched", role)
        if role == self.COMM:
            with self._changed:
                self._dispatch()

    def abort(self, error: BaseException | None = None) -> None:
        """Says that a side failed: whoever waits, or comes later, raises a RuntimeError from ``error``."""
        with self._changed:
            self._fail(
                error
                if error is not None
                else RuntimeError("HookCoordinator.abort() was called")
            )

    @contextmanager
    def side(self) -> Iterator[None]:
        """Runs all of one side's work: when it ends the other runs on alone, when it raises the other raises too."""
        try:
            yield
        except BaseException as error:
            self.abort(error)
            raise
        self.disable()  # nobody is left to meet

    # --- what follows is called with the lock held

    def _join(self, role: str) -> _Meeting:
        """The meeting that the caller is now part of: the one the other side waits in, or a new one."""
        meeting = self._forming
        if meeting is None:
            meeting = self._forming = _Meeting(role)
        elif meeting.first == role:
            clash = coded(
                RuntimeError,
                "HP450",
                f"HookCoordinator.rendezvous: both sides came as {role}; expected one as {self.COMM}, one "
                f"as {self.COMPUTE}. Check that each side's hooks alternate and the two begin differently",
            )
            self._fail(clash)
            raise clash
        else:
            meeting.paired = True
            self._forming, self._running = None, meeting
            self._changed.notify_all()
        return meeting

    def _wait(
        self, meeting: _Meeting, role: str, done: Callable[[], bool], missing: str
    ) -> None:
        def over() -> bool:
            return done() or meeting.dissolved or meeting.error is not None

        try:
            came = self._changed.wait_for(over, self._timeout)
        except (
            BaseException
        ) as error:  # an interrupt: the other side must not meet one who is gone
            if meeting is self._forming or meeting is self._running:
                self._fail(error)
            raise
        if not came:
            late = TimeoutError(
                f"HookCoordinator.rendezvous: waited {self._timeout:g} s as {role}, but {missing}. Check that both "
                "sides pass the same number of hooks; a side that has finished must leave side() or call disable()"
            )
            self._fail(late)
            raise late
        if meeting.error is not None:
            raise _released(role, meeting.error) from meeting.error

    def _dispatch(self) -> None:
        if self._running is not None:
            self._running.dispatched = True
            self._running = None
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        if not self._enabled or self._error is not None:
            return  # nobody waits; or what is told already is the cause of this
        self._error = error
        for meeting in self._take_open_meetings():
            meeting.error = error

    def _take_open_meetings(self) -> list[_Meeting]:
        found = [
            meeting for meeting in (self._forming, self._running) if meeting is not None
        ]
        self._forming = self._running = None
        self._changed.notify_all()
        return found

    def _check_role(self, call: str, role: str) -> None:
        if role not in (self.COMM, self.COMPUTE):
            raise coded(
                ValueError,
                "HP450",
                f"HookCoordinator.{call}: role must be {self.COMM!r} or {self.COMPUTE!r}, got {role!r}",
            )


def _released(role: str, error: BaseException) -> RuntimeError:
    return coded(
        RuntimeError,
        "HP450",
        f"HookCoordinator.rendezvous: a side failed ({type(error).__name__}: {error}), so the {role} side "
        "cannot go on; mend that failure, then enable() again",
    )
