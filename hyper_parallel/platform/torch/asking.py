# SPDX-License-Identifier: Apache-2.0
"""Questions to the job's store that end, also where its host does not answer any more.

torch's store waits for ever for most answers: with a host that stands still, or a link that is cut, a rank that only
wants to say who is missing would wait in silence. A thread asks, and whoever needs the answer waits as long as it may.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class StoreSilentError(RuntimeError):
    """The job's store does not answer."""


class _Asker:
    """One thread, and whether it is stuck."""

    def __init__(self) -> None:
        self.is_stuck = False
        self._questions: queue.SimpleQueue[
            tuple[Callable[[], Any], queue.SimpleQueue[tuple[Any, Any]]]
        ] = queue.SimpleQueue()
        threading.Thread(
            target=self._answer, name="hyper_parallel-store", daemon=True
        ).start()

    def ask(self, question: Callable[[], Any], seconds: float) -> Any:
        answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._questions.put((question, answers))
        try:
            answer, error = answers.get(timeout=seconds)
        except queue.Empty:
            self.is_stuck = True
            raise StoreSilentError(
                f"the job's store has not answered for {seconds:g} s"
            ) from None
        if error is not None:
            raise error
        return answer

    def _answer(self) -> None:
        while True:
            question, answers = self._questions.get()
            try:
                answers.put((question(), None))
            except Exception as error:  # noqa: BLE001 - raised where it was asked
                answers.put((None, error))
            del (
                question,
                answers,
            )  # what a question refers to must not live until the next one


_asker: _Asker | None = None
_lock = threading.Lock()


def ask_store(question: Callable[[], T], seconds: float) -> T:
    """What ``question()`` returns or raises; a StoreSilentError after ``seconds``, and at once ever after."""
    global _asker  # noqa: PLW0603 - one thread a process
    with _lock:
        if _asker is None:
            _asker = _Asker()
        asker = _asker
    if asker.is_stuck:
        raise StoreSilentError("the job's store does not answer")
    answer: T = asker.ask(question, seconds)
    return answer


def forget_silence() -> None:
    """For the next job, which has another store."""
    global _asker  # noqa: PLW0603 - one thread a process
    if _asker is not None and _asker.is_stuck:
        _asker = None
