# SPDX-License-Identifier: Apache-2.0
"""Runs a plan on this rank's shard, and its backward: the plan from the gradient's layout back.

    shard = redistribute(shard, layout("dp", "None"), layout("None", "dp"), (8, 8))

A gradient lies as its tensor does, but where a sum is pending every rank has the whole gradient: what every part
contributes to is the same sum. Along one axis a shard and its gradient are one of these pairs, and the gradient of a
gradient goes back to the first of the two:

    Shard        <-> Shard
    Replicate    <-> Replicate          every rank computes the same with it
    Replicate    <-> Partial("sum")     *varied*: ranks compute different things with it
    Partial      <-> Replicate, varied

So a redistribution goes from (layout, varied axes) to (layout, varied axes), its backward from the dual of the target
to the dual of the source, and that is a redistribution as well: gradients of any order are exact.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.layout import Layout, cut
from hyper_parallel.core.dtensor.placement_types import (
    FusedShard,
    Partial,
    Placement,
    Replicate,
)
from hyper_parallel.core.dtensor.redistribution import (
    Box,
    Plan,
    Step,
    box,
    overlap,
    plan,
    volume,
)
from hyper_parallel.platform import Platform, get_platform
from hyper_parallel.platform.transform import chunk_sizes

LINEAR = ("sum", "avg")
_TAG = 0x7264  # shards must not be taken for what the user sends in the same group


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
    ``implicit``: nobody asked for it by name; the ledger tells.
    """
    ndim, platform = len(shape), get_platform()
    source, target = source.bind(ndim), target.bind(ndim)
    for axis in _reduced_first(source, target):
        if platform.is_recorded(
            local
        ):  # backward needs the part as it is now, whatever is changed in place
            local = platform.operator("clone")(local)
        with cause(implicit):
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
        with cause(way.implicit):
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
    """How the gradient of such a tensor lies, and its varied axes."""
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


class cause:  # noqa: N801 - a context, quicker than a generator
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
    """How the gradient of a tensor of this layout lies."""
    return layout.reset_partial()


def run(steps: Plan, local: Any) -> Any:
    """This rank's shard after the plan; for a shard that is not recorded, or where nothing is."""
    platform, before = get_platform(), steps.source
    for step, after in zip(steps.steps, steps.layouts, strict=True):
        inside = before.is_fused and not step.sections
        layout, shape = (
            before.within_pieces(steps.shape) if inside else (before, steps.shape)
        )
        local = _RUN[step.kind](_At(platform, step, layout, shape), local)
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
        mesh = self.before.mesh
        if self.step.axes:
            return self.platform.create_group(mesh.ranks_along(self.step.axes))
        return mesh.get_group(self.step.axis)

    @property
    def place(self) -> tuple[int, ...]:
        return self.before.mesh.own_coordinate("redistribute")

    def sizes_along(self, dim: int) -> list[int]:
        """The sizes of the pieces into which the step's axis, the innermost one, has cut this rank's part of a dim."""
        sizes = self.before.mesh_shape
        outer = [
            (sizes[axis], self.place[axis])
            for axis in self.before.dim_axes[dim]
            if axis != self.step.axis
        ]
        return chunk_sizes(cut(self.shape[dim], outer)[1], sizes[self.step.axis])

    def spans(self, index: int) -> tuple[tuple[int, int], ...]:
        """What a rank along the step's axis has of a dim that is cut section by section."""
        return FusedShard(self.step.dim, self.step.sections).spans(
            self.before.mesh_shape[self.step.axis], index
        )

    def boxes(self, coordinate: Sequence[int]) -> tuple[Box, Box]:
        """What a place of the mesh has before the step, and what it has after an exchange."""
        sizes, target = self.before.mesh_shape, self.step.target or self.before.dim_axes
        return tuple(
            box(self.shape, axes, sizes, coordinate)
            for axes in (self.before.dim_axes, target)
        )  # type: ignore[return-value]


def _slice(at: _At, local: Any) -> Any:
    if at.step.sections:
        spans = at.spans(at.place[at.step.axis])
        return at.platform.cat(
            [_along(local, at.step.dim, *span) for span in spans], at.step.dim
        )
    piece = at.platform.chunk(
        local, at.step.dim, at.before.mesh_shape[at.step.axis], at.place[at.step.axis]
    )
    return at.platform.clone(piece)  # a view would hold on to the whole


def _all_gather(at: _At, local: Any) -> Any:
    dim, gather = at.step.dim, at.platform.get_tensor_transform().all_gather
    if not at.step.sections:
        return gather(local, dim, at.group, at.sizes_along(dim))
    spans = [at.spans(index) for index in range(at.before.mesh_shape[at.step.axis])]
    gathered = gather(
        local, dim, at.group, [sum(size for _, size in pieces) for pieces in spans]
    )
    # Rank by rank the pieces of all sections came, and section by section those of all ranks are wanted.
    sizes = [size for pieces in spans for _, size in pieces]
    starts = [start for pieces in spans for start, _ in pieces]
    came = list(zip(starts, itertools.accumulate(sizes, initial=0), sizes))  # noqa: B905 - one sum more than sizes
    return at.platform.cat(
        [_along(gathered, dim, begin, size) for _, begin, size in sorted(came)], dim
    )


def _along(tensor: Any, dim: int, start: int, size: int) -> Any:
    return tensor[(slice(None),) * dim + (slice(start, start + size),)]


def _all_to_all(at: _At, local: Any) -> Any:
    source = at.step.source
    return at.platform.get_tensor_transform().all_to_all(
        local, source, at.step.dim, at.group, at.sizes_along(source)
    )


def _reduce_scatter(at: _At, local: Any) -> Any:
    return at.platform.get_tensor_transform().reduce_scatter(
        local, at.step.dim, at.step.op, at.group
    )


def _all_reduce(at: _At, local: Any) -> Any:
    return at.platform.get_tensor_transform().all_reduce(local, at.step.op, at.group)


def _part(at: _At, local: Any) -> Any:
    if at.step.op in ("avg", "max", "min") or at.place[at.step.axis] == 0:
        return local
    return at.platform.full_like(local, 0 if at.step.op == "sum" else 1)


def _exchange(at: _At, local: Any) -> Any:
    """Sends every rank what it will have and this one has; of several that have it, the one in its own line sends."""
    partners = _partners(at.before, at.step, at.shape, at.place)
    if partners is not None:
        return _handed_over(at, local, *partners)
    mesh, own = at.before.mesh, at.place
    ranks = mesh.ranks_along(at.step.axes)
    copied = [
        axis
        for axis in at.step.axes
        if not any(axis in axes for axes in at.before.dim_axes)
    ]
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
        flat,
        [volume(part) for part in sends],
        [volume(part) for part in receives],
        at.platform.create_group(ranks),
    )
    return _assembled(at.platform, received, receives, want)


@functools.lru_cache(maxsize=4096)
def _partners(
    before: Layout, step: Step, shape: tuple[int, ...], own: tuple[int, ...]
) -> tuple[int, int] | None:
    """Whose shard this rank gets as it is, and which rank gets this one's; None unless every rank gets a whole one.

    All shards have one shape. No rank sends to one and receives from another: on some backends they would wait for
    each other.
    """
    mesh, sizes = before.mesh, before.mesh_shape
    copied = [
        axis for axis in step.axes if not any(axis in axes for axes in before.dim_axes)
    ]
    places = {
        rank: mesh.coordinate_of(rank) or () for rank in mesh.ranks_along(step.axes)
    }
    have, want = (
        {rank: box(shape, axes, sizes, place) for rank, place in places.items()}
        for axes in (before.dim_axes, step.target)
    )
    if (
        len(
            {
                tuple(size for _, size in one)
                for side in (have, want)
                for one in side.values()
            }
        )
        != 1
    ):
        return None
    origins: dict[int, int] = {}
    targets: dict[int, int] = {}
    for rank, place in places.items():
        line = [
            other
            for other, at in places.items()
            if all(at[axis] == place[axis] for axis in copied)
        ]
        found = [other for other in line if have[other] == want[rank]]
        if len(found) != 1:
            return None
        origins[rank] = found[0]
        if found[0] != rank and targets.setdefault(found[0], rank) != rank:
            return None
    if any(origins[rank] not in (rank, target) for rank, target in targets.items()):
        return None
    [rank] = [rank for rank, place in places.items() if place == own]
    return origins[rank], targets.get(rank, rank)


def _handed_over(at: _At, local: Any, origin: int, target: int) -> Any:
    """The shard that this rank gets, when those who change places know each other."""
    platform, own, group = (
        at.platform,
        at.before.mesh.rank,
        at.group,
    )  # all make the group, also who stays out
    if origin == target:
        return local if origin == own else platform.p2p_exchange(local, target, group)
    if origin == own:
        platform.isend(local, target, group, _TAG).wait()
        return local
    received = platform.empty_like(local)
    platform.irecv(received, origin, group, _TAG).wait()
    return received


def _gather(at: _At, local: Any) -> Any:
    """Every rank's shard, one after the other, and each put where it belongs."""
    mesh, sizes = at.before.mesh, at.before.mesh_shape
    kept = [
        tuple(axis for axis in axes if axis not in at.step.axes)
        for axes in at.before.dim_axes
    ]
    want = box(at.shape, kept, sizes, at.place)
    parts = [
        at.boxes(mesh.coordinate_of(rank) or ())[0]
        for rank in mesh.ranks_along(at.step.axes)
    ]
    counts = [volume(part) for part in parts]
    received = at.platform.get_tensor_transform().all_gather(
        local.reshape(-1), 0, at.group, counts
    )
    if _are_rows(parts, want):
        return received.reshape([size for _, size in want])
    return _assembled(at.platform, received, parts, want)


def _are_rows(parts: Sequence[Box], want: Box) -> bool:
    """Whether the parts, one after the other in memory, are the whole already."""
    (start, _), *others = want
    for (offset, size), *rest in parts:
        if offset != start or rest != others:
            return False
        start += size
    return True


def _nothing(inside: Box) -> Box:
    return tuple((offset, 0) for offset, _ in inside)


def _slices(part: Box, inside: Box) -> tuple[slice, ...]:
    """Where a part lies in the tensor that holds a box."""
    starts = [
        start - offset for (start, _), (offset, _) in zip(part, inside, strict=True)
    ]
    return tuple(
        slice(start, start + size)
        for start, (_, size) in zip(starts, part, strict=True)
    )


def _assembled(
    platform: Platform, received: Any, parts: Sequence[Box], want: Box
) -> Any:
    """The shard from its parts, which lie in ``received`` one after the other."""
    output = platform.empty(
        [size for _, size in want], dtype=received.dtype, device=received.device
    )
    start = 0
    for part in parts:
        stop = start + volume(part)
        if stop > start:
            output[_slices(part, want)] = received[start:stop].reshape(
                [size for _, size in part]
            )
        start = stop
    return output


_RUN: dict[str, Callable[[_At, Any], Any]] = {
    "slice": _slice,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "part": _part,
    "gather": _gather,
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
            result = platform.get_tensor_transform().all_reduce(
                platform.detach(local), ctx.op, ctx.group
            )
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
