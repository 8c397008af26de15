# SPDX-License-Identifier: Apache-2.0
"""Redistribution in another dtype: fewer bytes forward, or more precise sums backward.

    y = x.redistribute(mesh, [Replicate()], forward_dtype=bfloat16, backward_dtype=float32)

The shard is cast before it is communicated and the result stays so; its gradient is cast before it is communicated, and
cast back to the dtype of the shard afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.collectives import redistribute, redistribute_back
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded


class _Way(NamedTuple):
    source: Layout
    target: Layout
    shape: tuple[int, ...]


def redistribute_as(
    local: Any,
    source: Layout,
    target: Layout,
    shape: Sequence[int],
    forward_dtype: Any,
    backward_dtype: Any,
) -> Any:
    """This rank's shard in the target layout, in ``forward_dtype``; its gradient is communicated in the other."""
    if any(op not in (None, "sum", "avg") for op in source.partial):
        raise coded(
            ValueError,
            "HP224",
            f"redistribute: forward_dtype and backward_dtype: {source} leaves a reduction pending that is no sum; "
            "reduce_partial() first",
        )
    forward = local.dtype if forward_dtype is None else forward_dtype
    backward = local.dtype if backward_dtype is None else backward_dtype
    way = _Way(source.bind(len(shape)), target.bind(len(shape)), tuple(shape))
    return _function().apply(local, way, forward, backward)


@functools.cache
def _function() -> Any:
    platform = get_platform()

    class RedistributeAs(platform.Function):  # type: ignore[name-defined, misc]
        @staticmethod
        def forward(
            ctx: Any, local: Any, way: _Way, dtype: Any, backward_dtype: Any
        ) -> Any:
            ctx.way, ctx.dtype, ctx.backward_dtype = way, local.dtype, backward_dtype
            moved = redistribute(platform.detach(local).to(dtype), *way)
            return platform.detach(moved)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            back = redistribute_back(grad.to(ctx.backward_dtype), *ctx.way)
            return back.to(ctx.dtype), None, None, None

    return RedistributeAs
