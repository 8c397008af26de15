# SPDX-License-Identifier: Apache-2.0
"""Ends a rank process with the one that started it, whatever it is doing.

A thread that watches the parent cannot act while a call of the framework holds the interpreter; the kernel can.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None = None) -> None:
    """Has this process killed when its parent ends, on Linux. ``parent``: its process, which may have ended already."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
