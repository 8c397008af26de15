# SPDX-License-Identifier: Apache-2.0
"""XXH3-64 of every block of 4096 bytes: compiled where that was built, else with numpy.

block_sums(np.zeros(10_000, np.uint8))      three sums, the last one of 1808 bytes and 2288 zeros
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 4096
HYPER_PARALLEL_PURE_PYTHON = "HYPER_PARALLEL_PURE_PYTHON"

# The constants of XXH3's specification. A block has 4 groups of 16 stripes of 8 numbers, for each of which there is a
# part of the secret.
_PRIME32_1, _PRIME64_1 = 0x9E3779B1, 0x9E3779B185EBCA87
_LANES = np.array(
    [0xC2B2AE3D, _PRIME64_1, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x85EBCA77,
     0x27D4EB2F165667C5, _PRIME32_1], np.uint64
)  # fmt: skip
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_KEYS = np.array(
    [[np.frombuffer(_SECRET, "<u8", 8, 8 * stripe) for stripe in range(16)]] * 4
)
_KEYS[3, 15] = np.frombuffer(_SECRET, "<u8", 8, 121)
_SCRAMBLE, _MERGE = (np.frombuffer(_SECRET, "<u8", 8, at) for at in (128, 11))
_LOW, _HALF = np.uint64(2**32 - 1), np.uint64(32)


def _compiled() -> Any:
    """The compiled sums, where they were built and are wanted."""
    if os.environ.get(HYPER_PARALLEL_PURE_PYTHON, "").lower() not in (
        "",
        "0",
        "false",
        "no",
    ):
        return None
    try:
        return importlib.import_module(
            "hyper_parallel.core.distributed_checkpoint._block_sums"
        )
    except ImportError:
        return None


fast = _compiled()


def block_sums(data: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """The XXH3-64 of each block of a contiguous byte array; the last block counts as filled up with zeros."""
    count = -(-data.nbytes // BLOCK)
    if fast is not None:
        sums = np.empty(count, np.uint64)
        fast.block_sums(data, sums)
        return sums
    blocks = np.zeros(count * BLOCK, np.uint8)
    blocks[: data.nbytes] = data
    return _sums(blocks.view("<u8").reshape(count, 4, 16, 8))


def copy_bytes(out: NDArray[Any], data: NDArray[Any]) -> None:
    """Copies a contiguous array to another of as many bytes, past the processor's cache where that is possible."""
    if fast is not None:
        fast.copy(out, data)
    else:
        out.reshape(-1).view(np.uint8)[...] = data.reshape(-1).view(np.uint8)


def _sums(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = numbers ^ _KEYS
    added = ((mixed & _LOW) * (mixed >> _HALF)).sum(2) + numbers.sum(2)[
        ..., [1, 0, 3, 2, 5, 4, 7, 6]
    ]
    lanes = _LANES
    for group in range(4):
        if group > 0:
            lanes = (lanes ^ lanes >> np.uint64(47) ^ _SCRAMBLE) * np.uint64(_PRIME32_1)
        lanes = lanes + added[:, group]
    lanes = lanes ^ _MERGE
    sums = _folded(lanes[:, ::2], lanes[:, 1::2]).sum(1) + np.uint64(
        BLOCK * _PRIME64_1 % 2**64
    )
    sums = (sums ^ sums >> np.uint64(37)) * np.uint64(0x165667919E3779F9)
    return np.asarray(sums ^ sums >> _HALF, np.uint64)


def _folded(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Both halves of the products of 128 bits, one on the other."""
    low, cross = (a & _LOW) * (b & _LOW), (a >> _HALF) * (b & _LOW)
    middle = (a & _LOW) * (b >> _HALF) + (low >> _HALF) + (cross & _LOW)
    high = (a >> _HALF) * (b >> _HALF) + (middle >> _HALF) + (cross >> _HALF)
    return np.asarray(high ^ a * b, np.uint64)
