# SPDX-License-Identifier: Apache-2.0
"""Adds up parts of parameters' gradients over the ranks at the end of backward, many parameters in one collective.

A copied parameter whose uses differ from rank to rank gets a part of its gradient on each: norms between shards of a
sequence, everything along a data axis. Nothing in backward waits for such a sum, so the parts are kept until backward
has ended, laid end to end, and summed together. Who asks for a gradient itself, by a hook or ``autograd.grad``, gets
the sum at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

from hyper_parallel.core.dtensor.collectives import cause, redistribute
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Partial
from hyper_parallel.platform import get_platform

LARGEST_BUCKET = 1 << 25  # bytes


def summed_later(
    leaf: Any, layout: Layout, shape: Sequence[int], axes: tuple[int, ...]
) -> Any:
    """A parameter's shard by a route on which the gradient comes in parts along these axes."""
    return _function().apply(leaf, layout, shape, axes)


class _Parts:
    """What one backward has left to add up; as long as that backward lasts."""

    def __init__(self) -> None:
        self._found: dict[
            Any, list[tuple[Any, Any]]
        ] = {}  # by ranks and dtype: parameters and parts

    def add(self, leaf: Any, part: Any, layout: Layout, axes: tuple[int, ...]) -> None:
        key = (tuple(layout.mesh.ranks_along(axes)), part.dtype)
        self._found.setdefault(key, []).append((leaf, part))

    def sum(self) -> None:
        """Adds everything up, and to the gradients."""
        platform = get_platform()
        with platform.no_grad(), cause(implicit=True):
            for (ranks, _), found in self._found.items():
                group = platform.create_group(list(ranks))
                for bucket in _buckets(found):
                    flat = platform.cat([part.reshape(-1) for _, part in bucket])
                    whole = platform.get_tensor_transform().all_reduce(
                        flat, "sum", group
                    )
                    start = 0
                    for leaf, part in bucket:
                        size = math.prod(part.shape)
                        platform.accumulate_gradient(
                            leaf, whole[start : start + size].reshape(part.shape)
                        )
                        start += size


_PARTS: WeakValueDictionary[int, _Parts] = (
    WeakValueDictionary()
)  # by backward; the framework holds them while it lasts


def _buckets(found: list[tuple[Any, Any]]) -> Iterator[list[tuple[Any, Any]]]:
    size = get_platform().get_element_size(found[0][1])
    bucket: list[tuple[Any, Any]] = []
    nbytes = 0
    for leaf, part in found:
        more = math.prod(part.shape) * size
        if bucket and nbytes + more > LARGEST_BUCKET:
            yield bucket
            bucket, nbytes = [], 0
        bucket.append((leaf, part))
        nbytes += more
    yield bucket


@functools.cache
def _function() -> Any:
    platform = get_platform()

    class SummedLater(platform.Function):  # type: ignore[name-defined, misc]
        @staticmethod
        def forward(
            ctx: Any,
            leaf: Any,
            layout: Layout,
            shape: Sequence[int],
            axes: tuple[int, ...],
        ) -> Any:
            ctx.leaf, ctx.layout, ctx.shape, ctx.axes = leaf, layout, shape, axes
            return platform.detach(leaf)

        @staticmethod
        def backward(ctx: Any, part: Any) -> Any:
            if platform.accumulates_gradient(ctx.leaf):
                number = platform.backward_number()
                parts = _PARTS.get(number)
                if parts is None:
                    parts = _PARTS[number] = _Parts()
                    platform.after_backward(parts.sum)
                parts.add(ctx.leaf, part, ctx.layout, ctx.axes)
                return None, None, None, None
            arriving = list(ctx.layout.placements)
            for axis in ctx.axes:
                arriving[axis] = Partial()
            source = ctx.layout.with_placements(arriving)
            return (
                redistribute(part, source, ctx.layout, ctx.shape, implicit=True),
                None,
                None,
                None,
            )

    return SummedLater
