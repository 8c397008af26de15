# SPDX-License-Identifier: Apache-2.0
"""What ranks write: one file per rank, read while the rank still runs."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

LONGEST = 8000  # bytes of a log that a message quotes


class RankLog:
    """The file that a rank writes to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def size(self) -> int:
        """Bytes written so far."""
        return self.path.stat().st_size if self.path.exists() else 0

    def read_from(self, start: int) -> str:
        """What was written after the first ``start`` bytes, at most the last LONGEST of it."""
        if not self.path.exists():
            return ""
        with self.path.open("rb") as log:
            log.seek(max(start, self.size() - LONGEST))
            return log.read().decode(errors="replace")

    def read_tail(self, lines: int) -> str:
        """The last lines."""
        text = self.path.read_text(errors="replace") if self.path.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


def redirect_output(log: str) -> None:
    """Has all that this process writes from now on go to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def show_stack_on_request(*, all_threads: bool) -> None:
    """Writes the stack to stderr on a crash, and on SIGUSR1 for those who wonder where a rank hangs."""
    faulthandler.enable(sys.stderr)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=all_threads)
