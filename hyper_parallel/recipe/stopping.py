# SPDX-License-Identifier: Apache-2.0
"""How a rank is asked to stop: it saves and leaves after the step that runs, or is ended where it is stuck.

Python handles a signal between two instructions of the main thread, so never while that waits in a collective for a
rank that will not come. A thread, which the system tells of the signal at once, ends the process then.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from hyper_parallel.platform import CommunicationError, get_platform
from hyper_parallel.platform.errors import stuck

platform = get_platform()

_LOOK_SECONDS = 0.25


class StopSignal:
    """Notes SIGTERM and SIGINT, so that the training saves and leaves after the step that runs.

    A rank that has waited in one collective for ``grace`` seconds since then is given to ``on_stuck``, which ends it.
    """

    _SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(
        self, grace: float, on_stuck: Callable[[CommunicationError], None] | None = None
    ) -> None:
        self._grace = grace
        self._on_stuck = on_stuck or _print_and_exit
        self._asked = False
        self._before: dict[int, Any] = {}
        self._ended = threading.Event()

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._note) for number in self._SIGNALS
            }
            self._start_watching()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            self._end_watching()

    def _note(self, number: int, _: Any) -> None:
        if self._asked and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second time, at once
        self._asked = True

    def is_asked(self) -> bool:
        """Whether any rank was asked; every rank gets the same answer."""
        if platform.get_world_size() == 1:
            return self._asked
        flag = platform.full((1,), float(self._asked), device=platform.device())
        return bool(platform.all_reduce(flag, None, op="max").item())

    # --- the thread

    def _start_watching(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._woken_before = signal.set_wakeup_fd(
            self._writing, warn_on_full_buffer=False
        )
        self._thread = threading.Thread(
            target=self._watch, name="hyper_parallel-stop", daemon=True
        )
        self._thread.start()

    def _end_watching(self) -> None:
        signal.set_wakeup_fd(self._woken_before)
        self._ended.set()
        os.close(self._writing)
        self._thread.join()
        os.close(self._reading)

    def _watch(self) -> None:
        while numbers := os.read(self._reading, 64):
            if not set(numbers).isdisjoint(self._SIGNALS):
                self._end_if_stuck(time.monotonic())

    def _end_if_stuck(self, asked: float) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            waits = platform.longest_wait()
            if waits is None:
                continue
            collective, seconds = waits
            if min(seconds, time.monotonic() - asked) >= self._grace:
                self._on_stuck(stuck(platform.get_rank(), collective, seconds))
                return


def _print_and_exit(error: CommunicationError) -> None:
    sys.stderr.write(f"{error}\n")
    sys.stderr.flush()
    os._exit(1)
