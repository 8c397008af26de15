# SPDX-License-Identifier: Apache-2.0
"""The strides of a whole tensor, from those of a shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def whole_stride(shape: Sequence[int], local: Any) -> tuple[int, ...]:
    """The strides of a dense tensor whose dims lie in memory in the order of the shard's."""
    order = list(range(len(shape)))
    if not local.is_contiguous():
        order.sort(key=local.stride().__getitem__, reverse=True)
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * max(shape[dim], 1)
    return tuple(strides)
