# SPDX-License-Identifier: Apache-2.0
"""The memory of this process, as the kernel counts it."""

import ctypes
import gc
from pathlib import Path


def read_memory(key):
    """A number of bytes that the kernel tells about this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def trim_memory():
    """Gives freed memory back to the kernel."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def return_freed_blocks():
    """Has the C library give large blocks back as soon as they are freed: peaks are of what lives."""
    mmap_threshold = -3
    ctypes.CDLL("libc.so.6").mallopt(mmap_threshold, 1 << 17)


def forget_peak():
    """Lets the peak begin anew."""
    Path("/proc/self/clear_refs").write_text("5")
