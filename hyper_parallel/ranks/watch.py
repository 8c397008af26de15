# SPDX-License-Identifier: Apache-2.0
"""Waits until every rank has ended; once one has failed, the others get a grace period to notice and say so."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

End = TypeVar("End")


class Watch(Generic[End]):
    """Collects how ranks end: ``ends`` maps each rank that has ended to what ``poll`` returned for it."""

    def __init__(
        self,
        ranks: Collection[int],
        poll: Callable[[int], End | None],
        is_failure: Callable[[End], bool],
        *,
        grace: float,
        seconds: float = float("inf"),
    ) -> None:
        """``poll(rank)``: how it ended, None while it runs. ``seconds``: for all ranks together."""
        self._poll, self._is_failure = poll, is_failure
        self._grace = grace
        self._deadline = time.monotonic() + seconds
        self.pending = set(ranks)
        self.ends: dict[int, End] = {}

    def look(self) -> bool:
        """Polls the ranks that are still running; returns whether one of them has ended."""
        ended = {}
        for rank in sorted(self.pending):
            end = self._poll(rank)
            if end is not None:
                ended[rank] = end
        self.ends.update(ended)
        self.pending -= set(ended)
        if any(map(self._is_failure, ended.values())):
            self._deadline = min(self._deadline, time.monotonic() + self._grace)
        return bool(ended)

    @property
    def is_over(self) -> bool:
        """Whether all ranks have ended, or the time is up."""
        return not self.pending or self.has_expired

    @property
    def has_expired(self) -> bool:
        """Whether the time is up for the ranks that are still running."""
        return bool(self.pending) and time.monotonic() > self._deadline
