# SPDX-License-Identifier: Apache-2.0
"""Runs a plan on this rank's shard, and its backward: the plan from the gradient's layout back.

    shard = redistribute(shard, layout("dp", "None"), layout("None", "dp"), (8, 8))

A gradient has the layout of its tensor, but is replicated where the tensor is Partial: every part contributes to the
same sum. Along one axis the placements of a tensor and its gradient are one of these pairs, and the gradient of the
gradient has the first of the two again:

    Shard        <-> Shard
    Replicate    <-> Replicate          every rank uses it in the same computation
    Replicate    <-> Partial("sum")     *varied*: ranks use it in different computations
    Partial      <-> Replicate, varied

So a redistribution goes from (layout, varied axes) to (layout, varied axes), its backward from the dual of the target
to the dual of the source, and that is a redistribution as well: gradients of any order are exact.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Partial, Placement, Replicate
from hyper_parallel.core.dtensor.redistribution import plan
from hyper_parallel.core.dtensor.steps import run
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.pending import start_all_reduce

LINEAR = ("sum", "avg")


def redistribute(
    local: Any,
    source: Layout,
    target: Layout,
    shape: Sequence[int],
    summed: Sequence[int] = (),
    *,
    varied: Sequence[int] = (),
    value: Any = None,
    implicit: bool = False,
) -> Any:
    """This rank's shard in the target layout; differentiable, any number of times.

    ``summed``: axes on which the gradient will arrive in parts, because what is computed from the shard differs there
    from rank to rank. A gather is then a reduce-scatter in backward, and a shard that stays is an all-reduce.
    ``varied``: axes on which the source is Replicate and its gradient is to be handed back in parts.
    ``value``: the result, where it is known from before; nothing is communicated then, except in backward.
    ``implicit``: no call requested it by name; the ledger records this.
    """
    ndim, platform = len(shape), get_platform()
    source, target = source.bind(ndim), target.bind(ndim)
    for axis in _reduced_first(source, target):
        if platform.is_recorded(
            local
        ):  # backward needs the part as it is now, whatever is changed in place
            local = platform.operator("clone")(local)
        with attributed(implicit):
            local = _functions()["reduce"].apply(local, source, axis, tuple(shape))
        source, value = _with(source, axis, Replicate()), None
    summed, varied = tuple(summed), tuple(varied)
    recorded = platform.is_recorded(local)
    if source is target and (summed == varied or not recorded):
        return local
    way = _Way(source, varied, target, summed, tuple(shape), implicit)
    if recorded:
        return _functions()["redistribute"].apply(local, value, way)
    return _moved(way, local, value)


def _moved(way: _Way, local: Any, value: Any) -> Any:
    """The shard by this way, outside the graph; a tensor of its own, which may share its memory."""
    if value is None:
        with attributed(way.implicit):
            value = run(
                plan(
                    way.source,
                    way.target,
                    way.shape,
                    get_platform().get_element_size(local),
                ),
                local,
            )
    return get_platform().detach(value)


@functools.lru_cache(maxsize=4096)
def _reduced_first(source: Layout, target: Layout) -> tuple[int, ...]:
    """The axes of reductions that are not linear in their parts: they are taken first, and their gradient goes to the
    part that won."""
    pairs = enumerate(zip(source.placements, target.placements, strict=True))
    return tuple(
        axis
        for axis, (before, after) in pairs
        if is_nonlinear(before) and after != before
    )


class _Way(NamedTuple):
    """From one layout to another, each with its varied axes, and whether nobody asked for it."""

    source: Layout
    varied: tuple[int, ...]
    target: Layout
    summed: tuple[int, ...]
    shape: tuple[int, ...]
    implicit: bool


@functools.lru_cache(maxsize=4096)
def _backward_way(way: _Way) -> tuple[_Way, float, bool]:
    """The way of the gradient, its factor, and whether this rank's part of it counts."""
    arriving, arriving_varied = _dual(way.target, way.summed)
    leaving, leaving_varied = _dual(way.source, way.varied)
    counts = True
    for axis, (before, after) in enumerate(
        zip(way.source.placements, way.target.placements, strict=True)
    ):
        if is_nonlinear(after) and before != after:
            # Each rank has the gradient of its own part of the maximum or product.
            arriving = _with(arriving, axis, Partial())
            if after.is_partial("prod"):  # all parts but the first are ones
                counts = (
                    counts and way.source.mesh.own_coordinate("redistribute")[axis] == 0
                )
    back = _Way(
        arriving, arriving_varied, leaving, leaving_varied, way.shape, way.implicit
    )
    return back, _share_of_parts(way.source, way.target), counts


@functools.lru_cache(maxsize=4096)
def _dual(layout: Layout, varied: tuple[int, ...]) -> tuple[Layout, tuple[int, ...]]:
    """The layout of the gradient of such a tensor, and its varied axes."""
    found = gradient_layout(layout)
    for axis in varied:
        found = _with(found, axis, Partial())
    return found, pending_sums(layout)


@functools.lru_cache(maxsize=4096)
def pending_sums(layout: Layout) -> tuple[int, ...]:
    """The axes along which a sum or an average is pending."""
    placements = enumerate(layout.placements)
    return tuple(
        axis for axis, p in placements if isinstance(p, Partial) and not is_nonlinear(p)
    )


def is_nonlinear(placement: Placement) -> bool:
    """Whether a pending reduction is none that may be taken after other linear operators."""
    return isinstance(placement, Partial) and placement.reduce_op not in LINEAR


class _Cause(threading.local):
    implicit = False


_CAUSE = _Cause()


class attributed:  # noqa: N801 - a context, quicker than a generator
    """What is communicated inside was asked for by name, or was not."""

    def __init__(self, implicit: bool) -> None:
        self._implicit = implicit

    def __enter__(self) -> None:
        self._before, _CAUSE.implicit = _CAUSE.implicit, self._implicit

    def __exit__(self, *_: object) -> None:
        _CAUSE.implicit = self._before


def is_implicit() -> bool:
    """Whether what this thread communicates now was asked for by nobody."""
    return _CAUSE.implicit


@functools.lru_cache(maxsize=4096)
def gradient_layout(layout: Layout) -> Layout:
    """The layout of the gradient of a tensor of this layout."""
    return layout.reset_partial()


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
            return _moved(way, local, value)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return _back(grad, ctx.way), None, None

    class Reduce(platform.Function):  # type: ignore[name-defined, misc]
        @staticmethod
        def forward(
            ctx: Any, local: Any, layout: Layout, axis: int, shape: tuple[int, ...]
        ) -> Any:
            ctx.layout, ctx.axis, ctx.shape = layout, axis, shape
            placement = layout.placements[axis]
            assert isinstance(placement, Partial)
            ctx.op, ctx.group = placement.reduce_op, layout.mesh.get_group(axis)
            result = start_all_reduce(platform, local, ctx.op, ctx.group).finish()
            ctx.save_for_backward(local, result)
            return result

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            # Every rank has the whole gradient, so there is nothing to add up; what it does with it is its own.
            data, result = ctx.saved_tensors
            layout = gradient_layout(ctx.layout)
            grad = redistribute(
                grad, layout, layout, ctx.shape, (ctx.axis,), implicit=True
            )
            return (
                platform.reduction_gradient(ctx.op, grad, data, result, ctx.group),
                None,
                None,
                None,
            )

    return {"redistribute": Redistribute, "reduce": Reduce}


def redistribute_back(
    grad: Any, source: Layout, target: Layout, shape: Sequence[int]
) -> Any:
    """The gradient of the source's shard, from that of the target's."""
    return _back(grad, _Way(source, (), target, (), tuple(shape), implicit=False))


def _back(grad: Any, forward: _Way) -> Any:
    way, factor, counts = _backward_way(forward)
    if not counts:
        platform = get_platform()
        grad = platform.keep_in_graph(platform.full_like(grad, 0), [grad])
    back = redistribute(
        grad,
        way.source,
        way.target,
        way.shape,
        way.summed,
        varied=way.varied,
        implicit=way.implicit,
    )
    return back if factor == 1 else back * factor


@functools.lru_cache(maxsize=4096)
def _share_of_parts(source: Layout, target: Layout) -> float:
    """What the gradient of the target is multiplied by: a part of an average has one over the number of parts of it."""
    share = 1.0
    for size, before, after in zip(
        source.mesh_shape, source.placements, target.placements, strict=True
    ):
        share /= size if before.is_partial("avg") else 1
        share *= size if after.is_partial("avg") else 1
    return share


# --- gradients as users see them


def gradient_of_whole(local: Any, layout: Layout, shape: Sequence[int]) -> Any:
    """The gradient of a tensor by its value, from the gradient of this rank's shard; nothing but a sum is pending."""
    lying = gradient_layout(layout.bind(len(shape)))
    return redistribute(local, lying, lying, shape, varied=pending_sums(layout))


def gradient_of_shard(local: Any, layout: Layout, shape: Sequence[int]) -> Any:
    """The reverse: the gradient of this rank's shard of a tensor, from the gradient by its value."""
    lying = gradient_layout(layout.bind(len(shape)))
    return redistribute(local, lying, lying, shape, pending_sums(layout))
