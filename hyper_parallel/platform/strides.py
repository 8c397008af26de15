# SPDX-License-Identifier: Apache-2.0
"""The strides of a whole tensor, from those of a shard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def whole_stride(shape: Sequence[int], local: Any) -> tuple[int, ...]:
    """The strides of the whole, of that shape, of which ``local`` is a shard."""
    return strides_of_whole(tuple(shape), tuple(local.shape), local.stride())


def strides_of_whole(
    whole: Sequence[int], local: Sequence[int], strides: Sequence[int]
) -> tuple[int, ...]:
    """The strides of a whole whose dims lie in memory in the order in which those of its shard do.

    The order is read from the strides alone: a dim of which a rank has one index says in them where it lies.
    """
    found = []
    for dim, stride in enumerate(strides):
        inner = [
            i
            for i, other in enumerate(strides)
            if 0 < other < stride or (other == stride and i > dim)
        ]
        grown = math.prod(max(whole[i], 1) for i in inner)
        found.append(stride * grown // math.prod(max(local[i], 1) for i in inner))
    return tuple(found)
