# SPDX-License-Identifier: Apache-2.0
"""Tensors packed one behind the other in bytes of host memory, for frameworks that cannot view bytes as numbers.

packed = pack_bytes(platform, b"header", [x, y])
unpack_bytes(platform, packed, 6, [("float32", (2, 3)), ("int64", (4,))])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.platform.contract.memory import round_up

if TYPE_CHECKING:
    from hyper_parallel.platform.platform import Platform


def pack_bytes(platform: Platform, header: bytes, tensors: Sequence[Any]) -> Any:
    """``Platform.pack_bytes`` by way of numpy."""
    pieces = [np.frombuffer(header, np.uint8)]
    pieces += [_view_bytes(platform, tensor) for tensor in tensors]
    packed = np.zeros(sum(round_up(piece.size) for piece in pieces), np.uint8)
    start = 0
    for piece in pieces:
        packed[start : start + piece.size] = piece
        start += round_up(piece.size)
    return platform.tensor_from_bytes(packed, "uint8", packed.shape)


def unpack_bytes(
    platform: Platform,
    packed: Any,
    start: int,
    specs: Sequence[tuple[str, Sequence[int]]],
) -> list[Any]:
    """``Platform.unpack_bytes`` by way of numpy."""
    data, start, tensors = _view_bytes(platform, packed), round_up(start), []
    for dtype, shape in specs:
        empty = platform.empty((0,), platform.str_to_dtype(dtype))
        stop = start + math.prod(shape) * platform.get_element_size(empty)
        own = data[start:stop].copy()
        tensors.append(platform.tensor_from_bytes(own, dtype, shape))
        start += round_up(stop - start)
    return tensors


def _view_bytes(platform: Platform, tensor: Any) -> Any:
    memory = platform.tensor_memory(platform.host_tensor(tensor))
    return memory.reshape(-1).view(np.uint8)
