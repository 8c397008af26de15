# SPDX-License-Identifier: Apache-2.0
"""Policies of fully_shard: the dtypes of a unit and where its shards are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a unit; the sharded parameters and the optimizer keep the original ones.

    ``param_dtype``: parameters are gathered and used in it. ``reduce_dtype``: gradients are reduced and accumulated in
    it; None means ``param_dtype``. ``output_dtype``: floating-point outputs are cast to it. ``cast_forward_inputs``:
    floating-point inputs are cast to ``param_dtype``.
    """

    param_dtype: Any = None
    reduce_dtype: Any = None
    output_dtype: Any = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """Shards stay on the device that computes."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and the optimizer's state stay in host memory.

    ``pin_memory``: in page-locked memory, which copies faster. Untested on hardware.
    """

    pin_memory: bool = True
