# SPDX-License-Identifier: Apache-2.0
"""Whether reshaping gives a view or a copy: on a shard the same as on one device.

A shard may be reshaped without a copy where the whole cannot: a dim of which this rank has one index, or nothing, can
be merged with any other. A change in place would then reach the base here and not on one device, so a copy is made.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.strides import strides_of_whole

platform = get_platform()

Sizes = tuple[int, ...]


def reshape_shard(here: ShardContext) -> Callable[..., Any]:
    """The reshaping of a shard to this rank's piece of the result."""
    size = here.shape()
    if not platform.counts_changes:
        return lambda shard, *_, **__: shard.reshape(size)
    whole, new = here.operand_shape(0), tuple(here.plan.shapes[0])
    local = tuple(here.plan.operands[0].local_shape(whole, here.place))
    usual = _contiguous_strides(local)

    def reshape(shard: Any, *_: Any, **__: Any) -> Any:
        result, strides = shard.reshape(size), shard.stride()
        copied = strides != usual and _is_view_of_shard_alone(
            whole, local, strides, new, size
        )
        return _copy_in_order(result) if copied else result

    return reshape


def contiguous_shard(whole: Sizes, shard: Any) -> Any:
    """The shard itself where the whole, of that shape, would be contiguous; else a copy."""
    local = shard.contiguous()
    if local is not shard or not platform.counts_changes:
        return local
    return (
        shard
        if _is_contiguous_whole(whole, tuple(shard.shape), shard.stride())
        else _copy_in_order(shard)
    )


def _copy_in_order(shard: Any) -> Any:
    """A copy with the strides of a contiguous tensor; clone() would keep those of dims of one."""
    return platform.changed(
        platform.empty(tuple(shard.shape), dtype=shard.dtype, device=shard.device),
        shard,
    )


@functools.lru_cache(maxsize=1 << 12)
def _is_contiguous_whole(whole: Sizes, local: Sizes, strides: Sizes) -> bool:
    """Whether a whole is contiguous of which a contiguous shard has these strides."""
    steps = zip(
        whole,
        strides_of_whole(whole, local, strides),
        _contiguous_strides(whole),
        strict=True,
    )
    return all(size == 1 or stride == usual for size, stride, usual in steps)


@functools.lru_cache(maxsize=1 << 12)
def _is_view_of_shard_alone(
    whole: Sizes, local: Sizes, strides: Sizes, new: Sizes, size: Sizes
) -> bool:
    """Whether a shard with these strides has a view of that size, but the whole has none of its new shape."""
    if not platform.can_view(local, strides, size):
        return False
    return not platform.can_view(whole, strides_of_whole(whole, local, strides), new)


def _contiguous_strides(sizes: Sizes) -> Sizes:
    return tuple(
        math.prod(max(size, 1) for size in sizes[i + 1 :]) for i in range(len(sizes))
    )
