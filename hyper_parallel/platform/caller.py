# SPDX-License-Identifier: Apache-2.0
"""Whose code is calling: the nearest frame that is neither ours nor the framework's."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType

_OURS = str(Path(__file__).parents[1]) + "/"
_FRAMEWORKS = ("torch", "mindspore")


def _is_users(frame: FrameType) -> bool:
    package = frame.f_globals.get("__name__", "").split(".")[0]
    # What is frozen is Python's own, such as that which runs a module as a program.
    return (
        not frame.f_code.co_filename.startswith((_OURS, "<frozen "))
        and package not in _FRAMEWORKS
    )


def _users_frame() -> tuple[FrameType | None, int]:
    """The user's frame, and how many frames it is above the caller of the caller."""
    frame: FrameType | None = sys._getframe(2)
    level = 1
    while frame is not None and not _is_users(frame):
        frame, level = frame.f_back, level + 1
    return frame, level


def users_line() -> str:
    """file:line of the user's code; nothing where there is none, as in a thread of the framework."""
    frame, _ = _users_frame()
    return (
        f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        if frame is not None
        else ""
    )


def raising_line(error: BaseException) -> str:
    """file:line of the innermost frame of the user's code that an error went through, with the line's text."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if _is_users(trace.tb_frame):
            found = trace
        trace = trace.tb_next
    if found is None:
        return ""
    file, number = found.tb_frame.f_code.co_filename, found.tb_lineno
    text = linecache.getline(file, number).strip()
    return f"{Path(file).name}:{number}{f' `{text}`' if text else ''}"


def users_level() -> int:
    """The ``stacklevel`` with which the caller of this function warns at the user's line."""
    return _users_frame()[1]
