# SPDX-License-Identifier: Apache-2.0
"""CRC-32, as zlib computes it, of every block of 4096 bytes: compiled where that was built, else with zlib itself.

block_sums(np.zeros(10_000, np.uint8))      three sums, the last one of 1808 bytes
"""

from __future__ import annotations

import importlib
import os
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 4096
HYPER_PARALLEL_PURE_PYTHON = "HYPER_PARALLEL_PURE_PYTHON"


def _compiled() -> Any:
    """The compiled sums, where they were built and are wanted."""
    if os.environ.get(HYPER_PARALLEL_PURE_PYTHON, "").lower() not in ("", "0", "false", "no"):
        return None
    try:
        return importlib.import_module("hyper_parallel.core.distributed_checkpoint._crc32")
    except ImportError:
        return None


fast = _compiled()


def crc32(data: Any) -> int:
    """zlib's CRC-32 of contiguous bytes."""
    return zlib.crc32(data) if fast is None else int(fast.crc32(data))


def block_sums(data: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """The CRC-32 of each block of a contiguous byte array; the last block may be shorter."""
    sums = np.empty(-(-data.nbytes // BLOCK), np.uint32)
    if fast is not None:
        fast.block_sums(data, sums)
        return sums
    view = data.data
    for block in range(len(sums)):
        sums[block] = zlib.crc32(view[block * BLOCK : (block + 1) * BLOCK])
    return sums
