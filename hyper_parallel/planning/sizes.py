# SPDX-License-Identifier: Apache-2.0
"""The bytes of parameters on one device, and on each rank of a mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.expert_parallel import BaseExpertParallel
from hyper_parallel.core.modules.style import ParallelStyle
from hyper_parallel.core.tensor_parallel.base import LayoutStyle
from hyper_parallel.platform import get_platform

platform = get_platform()


def count_bytes(
    modules: Sequence[Any], style: ParallelStyle | None, axes: Mapping[str, int]
) -> tuple[int, int]:
    """(on one device, on the first rank) of the modules' own parameters; those that they share count once."""
    whole = held = 0
    seen: set[int] = set()
    for module in modules:
        placements = _placements(module, style, axes.get("tp", 1))
        for name, tensor in platform.own_tensors(module):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            whole += int(tensor.nbytes)
            shape = tuple(tensor.shape)
            parts = _count_parts(style, shape, axes)
            local = _local_elements(shape, placements.get(name), axes.get("tp", 1))
            held += local * platform.get_element_size(tensor) // parts
    return whole, held // axes.get("dp_shard", 1)


def _placements(module: Any, style: ParallelStyle | None, ranks: int) -> dict[str, Any]:
    if not isinstance(style, LayoutStyle) or ranks == 1:
        return {}
    mesh = DeviceMesh("cpu", list(range(ranks)), mesh_dim_names=("tp",))
    return dict(style.layouts(module, mesh).parameters)


def _local_elements(shape: tuple[int, ...], placement: Any, ranks: int) -> int:
    if placement is None or ranks == 1:
        return math.prod(shape)
    layout = Layout((ranks,), ("tp",))([placement]).bind(len(shape))
    return math.prod(layout.local_shape(shape, (0,)))


def _count_parts(
    style: ParallelStyle | None, shape: tuple[int, ...], axes: Mapping[str, int]
) -> int:
    """Into how many parts a weight of experts is divided."""
    if not isinstance(style, BaseExpertParallel) or len(shape) < 2:
        return 1
    by_expert = axes.get("ep", 1)
    is_divided = type(style).__name__ == "ExpertTensorParallel" and len(shape) == 3
    return by_expert * (axes.get("tp", 1) if is_divided else 1)
