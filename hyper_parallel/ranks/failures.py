# SPDX-License-Identifier: Apache-2.0
"""How ranks fail, and in which order failures are reported: causes before echoes.

order_failures([lost_rank_1, rank_1_raised])[0].rank == 1
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from hyper_parallel.platform import CommunicationError


class Cause(IntEnum):
    """Ways to fail, from those that make other ranks fail to those that follow from them."""

    DIED = 0
    RAISED = 1
    HUNG = 2
    ECHO = 3  # it lost contact with another rank


@dataclass(frozen=True)
class Failure:
    """How one rank failed. ``when`` is the monotonic clock, which all processes of a machine share."""

    rank: int
    when: float
    headline: str
    details: str = ""
    cause: Cause = Cause.RAISED
    log: Path | None = None


def order_failures(failures: Iterable[Failure]) -> list[Failure]:
    """The failures with the likeliest cause first."""
    return sorted(failures, key=lambda failure: (failure.cause, failure.when))


def find_cause(error: BaseException) -> Cause:
    """ECHO for an error that another rank's failure brings about, else RAISED."""
    return Cause.ECHO if isinstance(error, CommunicationError) else Cause.RAISED


def format_headline(error: BaseException) -> str:
    """An error as the last line of its traceback has it."""
    return "".join(traceback.format_exception_only(error)).strip()


def describe_exit(code: int | None) -> str:
    """What ended a process: "exit code 3" or "SIGKILL"."""
    if code is None or code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def shorten(text: str, longest: int = 240) -> str:
    """The text, or its beginning if it is long."""
    return text if len(text) <= longest else f"{text[:longest]} ..."
