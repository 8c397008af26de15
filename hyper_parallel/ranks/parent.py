# SPDX-License-Identifier: Apache-2.0
"""Ends a rank process with the one that started it, whatever it is doing.

A thread that watches the parent cannot act while a call of the framework holds the interpreter; the kernel can.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def end_with_parent(
    parent: int | None = None, wait: Callable[[], None] | None = None
) -> None:
    """Has this process killed when its parent ends.

    ``parent``: its process id, to notice that it has ended already. ``wait``: returns when the parent has ended; a
    thread calls it, for systems other than Linux and for parents that hand a process on to another one.
    """
    if wait is not None:
        threading.Thread(target=_exit_after, args=(wait,), daemon=True).start()
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def _exit_after(wait: Callable[[], None]) -> None:
    wait()
    os._exit(1)
