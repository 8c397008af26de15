# SPDX-License-Identifier: Apache-2.0
"""All functions by the names that the rules have for them, and which of them an NPU has itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.platform.mindspore.cpu.functions import (
    attention,
    differences,
    draws,
    lookups,
    losses,
    moves,
    norms,
    pointwise,
    products,
    reductions,
    signals,
    windows,
)

_FAMILIES = (
    pointwise, products, reductions, moves, lookups, differences, windows, norms, losses, attention, signals, draws,
)  # fmt: skip
# Those that MindSpore itself has with these arguments, and with kernels on an NPU. Untested on hardware.
ON_NPU = frozenset(
    """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d addbmm addmm addmv baddbmm batch_norm bmm conv1d conv2d
    conv3d conv_transpose2d dot einsum group_norm layer_norm mm mv outer softmax
    """.split()  # noqa: SIM905 - a list of so many would take a page
)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: one for family in _FAMILIES for name, one in family.FUNCTIONS.items()
}
