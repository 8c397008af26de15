# SPDX-License-Identifier: Apache-2.0
"""Reduces the gradients of parameters in buckets that start while backward runs and end with it.

A replicated parameter that ranks use differently gets a part of its gradient on each rank: norms between shards of a
sequence, everything along a data axis. Nothing in backward waits for the sum, so the parts of many parameters are
collected in a bucket. A full bucket is all-reduced in the background while backward goes on; when backward ends, the
rest is started and everything is finished. Whoever asks for a gradient itself, by a hook or ``autograd.grad``, gets the
sum at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from hyper_parallel.core.dtensor.collectives import attributed, redistribute
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Partial
from hyper_parallel.platform import get_platform

# Small enough that the last bucket, which nothing hides, is short; large enough that
# the latency of a collective does not count.
BUCKET_BYTES = 1 << 22


def reduce_later(
    leaf: Any, layout: Layout, shape: Sequence[int], axes: tuple[int, ...]
) -> Any:
    """A parameter's shard by a route on which the gradient comes in parts along these axes."""
    get_platform().forget_failed_backwards()
    return _function().apply(leaf, layout, shape, axes)


class Part:
    """This rank's part of a parameter's gradient, in a bucket."""

    def __init__(self, bucket: Bucket, gradient: Any) -> None:
        self.bucket, self.gradient = bucket, gradient
        self.complete: Callable[[Any], None] | None = None  # takes the sum

    def sum_now(self) -> Any:
        """The sum over the ranks, for whoever cannot wait until backward ends."""
        self.complete = None
        self.bucket.start()
        return self.bucket.sum_of(self)


class Bucket:
    """Parts of one dtype that the same ranks add up in one collective."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self._parts: list[Part] = []
        self._nbytes = 0
        self._sums: Any = None
        self._handle: Any = None

    @property
    def is_started(self) -> bool:
        """Whether the collective is under way, so that no part can be added."""
        return self._sums is not None

    def add(self, gradient: Any) -> Part:
        """Adds a part; the bucket starts when it is full."""
        part = Part(self, gradient)
        self._parts.append(part)
        size = get_platform().get_element_size(gradient)
        self._nbytes += math.prod(gradient.shape) * size
        return part

    @property
    def is_full(self) -> bool:
        return self._nbytes >= BUCKET_BYTES

    def start(self) -> None:
        """Starts the collective, unless it is under way."""
        if self.is_started:
            return
        platform = get_platform()
        with platform.no_grad(), attributed(implicit=True):
            group = platform.create_group(list(self._ranks))
            flat = [part.gradient.reshape(-1) for part in self._parts]
            self._sums, self._handle = platform.all_reduce(
                platform.cat(flat), group, async_op=True
            )

    def sum_of(self, wanted: Part) -> Any:
        """The sum that a part belongs to, once it is there."""
        self._handle.wait()
        start = 0
        for part in self._parts:
            stop = start + math.prod(part.gradient.shape)
            if part is wanted:
                return self._sums[start:stop].reshape(part.gradient.shape)
            start = stop
        raise AssertionError("a part of another bucket")

    def finish(self) -> None:
        """Waits for the collective and hands out the sums."""
        self._handle.wait()
        start = 0
        for part in self._parts:
            stop = start + math.prod(part.gradient.shape)
            if part.complete is not None:
                part.complete(self._sums[start:stop].reshape(part.gradient.shape))
            start = stop


class Reducer:
    """The buckets of one backward; it lives as long as that backward."""

    def __init__(self) -> None:
        self._open: dict[Any, Bucket] = {}  # by ranks and dtype
        self._buckets: list[Bucket] = []  # in the order in which they are started

    def add(self, leaf: Any, gradient: Any, ranks: tuple[int, ...]) -> Any:
        """Takes this rank's part of a leaf's gradient; returns what backward returns for it."""
        key = (ranks, gradient.dtype)
        bucket = self._open.get(key)
        if bucket is None or bucket.is_started:
            bucket = self._open[key] = Bucket(ranks)
            self._buckets.append(bucket)
        part = bucket.add(gradient)
        returned, part.complete = get_platform().defer_gradient(
            leaf, gradient, part.sum_now
        )
        if bucket.is_full:
            bucket.start()
        return returned

    def finish(self) -> None:
        """Starts what is left, and completes every gradient."""
        for bucket in self._buckets:
            bucket.start()
        with get_platform().no_grad():
            for bucket in self._buckets:
                bucket.finish()


# By backward; the framework holds them while it lasts.
_REDUCERS: WeakValueDictionary[int, Reducer] = WeakValueDictionary()


def _current_reducer() -> Reducer:
    platform = get_platform()
    number = platform.backward_number()
    reducer = _REDUCERS.get(number)
    if reducer is None:
        reducer = _REDUCERS[number] = Reducer()
        platform.after_backward(reducer.finish)
    return reducer


@functools.cache
def _function() -> Any:
    platform = get_platform()

    class ReduceLater(platform.Function):  # type: ignore[name-defined, misc]
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
            if platform.can_defer_gradient(ctx.leaf):
                ranks = tuple(ctx.layout.mesh.ranks_along(ctx.axes))
                later = _current_reducer().add(ctx.leaf, part, ranks)
                return later, None, None, None
            arriving = list(ctx.layout.placements)
            for axis in ctx.axes:
                arriving[axis] = Partial()
            source = ctx.layout.with_placements(arriving)
            whole = redistribute(part, source, ctx.layout, ctx.shape, implicit=True)
            return whole, None, None, None

    return ReduceLater
