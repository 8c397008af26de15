# SPDX-License-Identifier: Apache-2.0
"""Whether processes use the processor; ranks that all wait for each other do not."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

LONGEST_BLINK = 0.5  # seconds between two looks at the ranks that count as watched
IDLE_SHARE = 0.05  # of one core, for each rank: what threads that only wake up now and then may use


class Activity:
    """Whether processes use the processor; without /proc nothing is known, and nothing is reported.

    Time in which nobody looks does not count: the whole machine may have stood still.
    """

    def __init__(self, idle: float | None) -> None:
        """``idle``: the seconds without activity that are allowed; None for any."""
        self._idle = idle
        self.restart()

    def restart(self) -> None:
        """Forgets what was seen."""
        self._looked, self._watched = time.monotonic(), 0.0
        # (seconds that were watched, seconds that were used)
        self._samples: list[tuple[float, float]] = []

    def has_stopped(self, pids: Collection[int]) -> bool:
        """Whether these processes have been idle for as long as is allowed."""
        if self._idle is None or not Path("/proc/self/stat").exists():
            return False
        before, self._looked = self._looked, time.monotonic()
        self._watched += min(self._looked - before, LONGEST_BLINK)
        used = sum(map(_processor_seconds, pids))
        self._samples.append((self._watched, used))
        earlier = [
            sample
            for sample in self._samples
            if self._watched - sample[0] >= self._idle
        ]
        if not earlier:
            return False
        self._samples = self._samples[len(earlier) - 1 :]
        return used - earlier[-1][1] < IDLE_SHARE * self._idle * len(pids)


def _processor_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")
