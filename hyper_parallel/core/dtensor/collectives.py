# SPDX-License-Identifier: Apache-2.0
"""Runs a plan on this rank's shard, and its backward: the plan from the gradient's layout back.

    shard = redistribute(shard, layout("dp", "None"), layout("None", "dp"), (8, 8))

A gradient lies as its tensor does, but where a reduction is pending every rank has the whole gradient: what every part
contributes to is the same sum.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.layout import Layout, cut
from hyper_parallel.core.dtensor.placement_types import Partial, Replicate
from hyper_parallel.core.dtensor.redistribution import Box, Plan, Step, box, overlap, plan, volume
from hyper_parallel.platform import Platform, get_platform
from hyper_parallel.platform.transform import chunk_sizes

LINEAR = ("sum", "avg")


def redistribute(
    local: Any,
    source: Layout,
    target: Layout,
    shape: Sequence[int],
    summed: Sequence[int] = (),
    *,
    value: Any = None,
    implicit: bool = False,
) -> Any:
    """This rank's shard in the target layout; differentiable.

    ``summed``: axes on which the gradient will arrive in parts, because what is computed from the shard differs there
    from rank to rank. A gather is then a reduce-scatter in backward, and a shard that stays is an all-reduce.
    ``value``: the result, where it is known from before; nothing is communicated then, except in backward.
    ``implicit``: nobody asked for it by name; the ledger tells.
    """
    ndim = len(shape)
    source, target = source.bind(ndim), target.bind(ndim)
    for axis, (before, after) in enumerate(zip(source.placements, target.placements, strict=True)):
        # A maximum is not linear in its parts: it is taken first, and its gradient goes to the part that won.
        if isinstance(before, Partial) and before.reduce_op not in LINEAR and after != before:
            with cause(implicit):
                local = _functions()["reduce"].apply(local, source, axis)
            source, value = _with(source, axis, Replicate()), None
    arriving = gradient_layout(target)
    for axis in summed:
        arriving = _with(arriving, axis, Partial())
    if source is target and not summed:
        return local
    return _functions()["redistribute"].apply(local, value, _Way(source, target, arriving, tuple(shape), implicit))


class _Way(NamedTuple):
    """From one layout to another: how the gradient arrives, and whether anybody asked for it."""

    source: Layout
    target: Layout
    arriving: Layout
    shape: tuple[int, ...]
    implicit: bool


class _Cause(threading.local):
    implicit = False


_CAUSE = _Cause()


@contextmanager
def cause(implicit: bool) -> Iterator[None]:
    """What is communicated inside was asked for by name, or was not."""
    before = _CAUSE.implicit
    _CAUSE.implicit = implicit
    try:
        yield
    finally:
        _CAUSE.implicit = before


def is_implicit() -> bool:
    """Whether what this thread communicates now was asked for by nobody."""
    return _CAUSE.implicit


@functools.lru_cache(maxsize=4096)
def gradient_layout(layout: Layout) -> Layout:
    """How the gradient of a tensor of this layout lies."""
    return layout.reset_partial()


def run(steps: Plan, local: Any) -> Any:
    """This rank's shard after the plan, outside the graph."""
    platform = get_platform()
    before = steps.source
    with platform.no_grad():
        for step, after in zip(steps.steps, steps.layouts(), strict=True):
            local = _RUN[step.kind](_At(platform, step, before, steps.shape), local)
            before = after
    return local


class _At(NamedTuple):
    """Where a step is run: the layout before it, and the global shape."""

    platform: Platform
    step: Step
    before: Layout
    shape: tuple[int, ...]

    @property
    def group(self) -> Any:
        return self.before.mesh.get_group(self.step.axis)

    @property
    def place(self) -> tuple[int, ...]:
        return self.before.mesh.own_coordinate(f"redistributing {self.before}")

    def sizes_along(self, dim: int) -> list[int]:
        """The sizes of the pieces into which the step's axis, the innermost one, has cut this rank's part of a dim."""
        sizes = self.before.mesh_shape
        outer = [(sizes[axis], self.place[axis]) for axis in self.before.dim_axes[dim] if axis != self.step.axis]
        return chunk_sizes(cut(self.shape[dim], outer)[1], sizes[self.step.axis])

    def boxes(self, coordinate: Sequence[int]) -> tuple[Box, Box]:
        """What a place of the mesh has before the step, and what it has after an exchange."""
        sizes = self.before.mesh_shape
        return tuple(box(self.shape, axes, sizes, coordinate) for axes in (self.before.dim_axes, self.step.target))  # type: ignore[return-value]


def _slice(at: _At, local: Any) -> Any:
    piece = at.platform.chunk(local, at.step.dim, at.before.mesh_shape[at.step.axis], at.place[at.step.axis])
    return at.platform.clone(piece)  # a view would hold on to the whole


def _all_gather(at: _At, local: Any) -> Any:
    dim = at.step.dim
    return at.platform.get_tensor_transform().all_gather(local, dim, at.group, at.sizes_along(dim))


def _all_to_all(at: _At, local: Any) -> Any:
    source = at.step.source
    return at.platform.get_tensor_transform().all_to_all(local, source, at.step.dim, at.group, at.sizes_along(source))


def _reduce_scatter(at: _At, local: Any) -> Any:
    return at.platform.get_tensor_transform().reduce_scatter(local, at.step.dim, at.step.op, at.group)


def _all_reduce(at: _At, local: Any) -> Any:
    return at.platform.get_tensor_transform().all_reduce(local, at.step.op, at.group)


def _part(at: _At, local: Any) -> Any:
    if at.step.op in ("avg", "max", "min") or at.place[at.step.axis] == 0:
        return local
    return at.platform.full_like(local, 0 if at.step.op == "sum" else 1)


def _exchange(at: _At, local: Any) -> Any:
    """Sends every rank what it will have and this one has; of several that have it, the one in its own line sends."""
    mesh, own = at.before.mesh, at.place
    ranks = mesh.ranks_along(at.step.axes)
    copied = [axis for axis in at.step.axes if not any(axis in axes for axes in at.before.dim_axes)]
    have, want = at.boxes(own)
    sends, receives = [], []
    for rank in ranks:
        other = mesh.coordinate_of(rank)
        assert other is not None
        if all(other[axis] == own[axis] for axis in copied):
            theirs, wanted = at.boxes(other)
            sends.append(overlap(have, wanted))
            receives.append(overlap(theirs, want))
        else:
            sends.append(_nothing(have))
            receives.append(_nothing(want))
    flat = at.platform.cat([local[_slices(part, have)].reshape(-1) for part in sends])
    received = at.platform.differentiable_all_to_all_single(
        flat, [volume(part) for part in sends], [volume(part) for part in receives], at.platform.create_group(ranks)
    )
    return _assembled(at.platform, received, receives, want)


def _nothing(inside: Box) -> Box:
    return tuple((offset, 0) for offset, _ in inside)


def _slices(part: Box, inside: Box) -> tuple[slice, ...]:
    """Where a part lies in the tensor that holds a box."""
    starts = [start - offset for (start, _), (offset, _) in zip(part, inside, strict=True)]
    return tuple(slice(start, start + size) for start, (_, size) in zip(starts, part, strict=True))


def _assembled(platform: Platform, received: Any, parts: Sequence[Box], want: Box) -> Any:
    """The shard from its parts, which lie in ``received`` one after the other."""
    output = platform.empty([size for _, size in want], dtype=received.dtype, device=received.device)
    start = 0
    for part in parts:
        stop = start + volume(part)
        if stop > start:
            output[_slices(part, want)] = received[start:stop].reshape([size for _, size in part])
        start = stop
    return output


_RUN: dict[str, Callable[[_At, Any], Any]] = {
    "slice": _slice,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "part": _part,
    "exchange": _exchange,
}


@functools.lru_cache(maxsize=4096)
def _with(layout: Layout, axis: int, placement: Any) -> Layout:
    placements = list(layout.placements)
    placements[axis] = placement
    return layout.with_placements(placements)


@functools.cache
def _functions() -> dict[str, Any]:
    """The autograd functions, made when the framework is known."""
    platform = get_platform()

    class Redistribute(platform.Function):  # type: ignore[name-defined, misc]
        @staticmethod
        def forward(ctx: Any, local: Any, value: Any, way: _Way) -> Any:
            ctx.way = way
            if value is None:
                with cause(way.implicit):
                    value = run(plan(way.source, way.target, way.shape, platform.get_element_size(local)), local)
            return value.detach()  # a tensor of its own in the graph, which may share its memory

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            way = ctx.way
            back = redistribute(grad, way.arriving, gradient_layout(way.source), way.shape, implicit=way.implicit)
            share = _share_of_parts(way.source, way.target)
            return back if share == 1 else back * share, None, None

    class Reduce(platform.Function):  # type: ignore[name-defined, misc]
        @staticmethod
        def forward(ctx: Any, local: Any, layout: Layout, axis: int) -> Any:
            ctx.op, ctx.group = layout.placements[axis].reduce_op, layout.mesh.get_group(axis)  # type: ignore[attr-defined]
            result = platform.get_tensor_transform().all_reduce(local.detach(), ctx.op, ctx.group)
            ctx.save_for_backward(local, result)
            return result

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            # Every rank has the whole gradient, so there is nothing to add up.
            data, result = ctx.saved_tensors
            return platform.reduction_gradient(ctx.op, grad, data, result, ctx.group), None, None

    return {"redistribute": Redistribute, "reduce": Reduce}


def _share_of_parts(source: Layout, target: Layout) -> float:
    """What an averaged part contributes: one over the number of parts, for every average that was taken."""
    taken = [
        size
        for size, before, after in zip(source.mesh_shape, source.placements, target.placements, strict=True)
        if before.is_partial("avg") and not after.is_partial("avg")
    ]
    return 1.0 / math.prod(taken)
