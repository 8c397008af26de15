# SPDX-License-Identifier: Apache-2.0
"""Runs the steps of a redistribution plan on this rank's shard, each in two halves.

    pending = start(step, layout, shape, shard)     the collective is under way
    shard = pending.finish()                        it has ended

``run`` does both for every step of a plan. Everything here is outside the graph.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.geometry import (
    Region,
    Spans,
    chunk_sizes,
    nested_span,
    overlap,
    slices_within,
    volume,
)
from hyper_parallel.core.dtensor.layout import Layout, placements_of
from hyper_parallel.core.dtensor.placement_types import Replicate
from hyper_parallel.core.dtensor.redistribution import Plan, Step
from hyper_parallel.platform import Platform, get_platform
from hyper_parallel.platform.pending import (
    Pending,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)

_TAG = 0x7264  # shards must not be taken for what the user sends in the same group


def run(plan: Plan, local: Any) -> Any:
    """This rank's shard after the plan."""
    if 0 in plan.shape and plan.steps:
        return _make_empty(plan, local)
    before = plan.source
    for step, after in zip(plan.steps, plan.layouts, strict=True):
        local = start(step, before, plan.shape, local).finish()
        before = after
    return local


def _make_empty(plan: Plan, local: Any) -> Any:
    """The shard of a tensor without elements, for which nothing is communicated."""
    shape = plan.target.local_shape(plan.shape)
    return get_platform().empty(shape, dtype=local.dtype, device=local.device)


class PendingPlan:
    """A plan under way: all steps up to the first that communicates are done or started."""

    def __init__(self, plan: Plan, local: Any) -> None:
        self._plan, self._next = plan, 0
        self._pending = Pending.done(local)
        if 0 in plan.shape and plan.steps:
            self._pending = Pending.done(_make_empty(plan, local))
            self._next = len(plan.steps)
        while self._next < len(plan.steps):
            is_local = plan.steps[self._next].nbytes == 0
            self._start_next(self._pending.finish())
            if not is_local:
                break

    def _start_next(self, local: Any) -> None:
        plan, number = self._plan, self._next
        before = plan.layouts[number - 1] if number else plan.source
        self._pending = start(plan.steps[number], before, plan.shape, local)
        self._next = number + 1

    def finish(self) -> Any:
        """This rank's shard after the plan."""
        while self._next < len(self._plan.steps):
            self._start_next(self._pending.finish())
        return self._pending.finish()


def start(step: Step, before: Layout, shape: tuple[int, ...], local: Any) -> Pending:
    """Starts one step on a shard of this layout, of a tensor of this global shape."""
    if step.placement is None and step.layout is None:
        before, shape = before.within_spans(shape)
    return _START[step.kind](_At(get_platform(), step, before, shape), local)


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
        """The sizes of the chunks into which the step's axis divides this rank's part of a dim."""
        mesh_shape = self.before.mesh_shape
        outer = [
            (mesh_shape[axis], self.place[axis])
            for axis in self.before.dim_axes[dim]
            if axis != self.step.axis
        ]
        size = nested_span(self.shape[dim], outer)[1]
        return chunk_sizes(size, mesh_shape[self.step.axis])

    def spans(self, index: int) -> Spans:
        """What a rank along the step's axis holds of a dim with an irregular placement."""
        placement = self.step.placement
        assert placement is not None
        size, ranks = self.shape[placement.dim], self.before.mesh_shape[self.step.axis]
        return placement.spans(size, ranks, index)

    @property
    def after(self) -> Layout:
        """The layout after an exchange."""
        if self.step.layout is not None:
            return self.step.layout
        partial = tuple(self.before.partial)
        placements = placements_of(self.step.target, partial, self.before.mesh_shape)
        return self.before.with_placements(placements)


def _slice(at: _At, local: Any) -> Pending:
    if at.step.placement is not None:
        spans = at.spans(at.place[at.step.axis])
        parts = [_along(local, at.step.dim, *span) for span in spans]
        return Pending.done(at.platform.cat(parts, at.step.dim))
    piece = at.platform.chunk(
        local, at.step.dim, at.before.mesh_shape[at.step.axis], at.place[at.step.axis]
    )
    # A view would keep the whole alive.
    return Pending.done(at.platform.clone(piece))


def _all_gather(at: _At, local: Any) -> Pending:
    dim = at.step.dim
    if at.step.placement is None:
        sizes = at.sizes_along(dim)
        return start_all_gather(at.platform, local, dim, sizes, at.group)
    ranks = range(at.before.mesh_shape[at.step.axis])
    spans = [span for index in ranks for span in at.spans(index)]
    sizes = [sum(size for _, size in at.spans(index)) for index in ranks]
    pending = start_all_gather(at.platform, local, dim, sizes, at.group)

    def sort() -> Any:
        # The spans arrive rank by rank; they are wanted in the order of the dim.
        gathered = pending.finish()
        begins = itertools.accumulate((size for _, size in spans), initial=0)
        order = sorted(
            (offset, begin, size)
            for (offset, size), begin in zip(spans, begins, strict=False)
            if size
        )
        parts = [_along(gathered, dim, begin, size) for _, begin, size in order]
        return at.platform.cat(parts, dim) if parts else gathered

    return Pending(None, sort)


def _along(tensor: Any, dim: int, start: int, size: int) -> Any:
    return tensor[(slice(None),) * dim + (slice(start, start + size),)]


def _all_to_all(at: _At, local: Any) -> Pending:
    source, dim = at.step.source, at.step.dim
    ranks = at.before.mesh_shape[at.step.axis]
    split_sizes = chunk_sizes(local.shape[dim], ranks)
    gather_sizes = at.sizes_along(source)
    return start_all_to_all(
        at.platform, local, source, dim, gather_sizes, split_sizes, at.group
    )


def _reduce_scatter(at: _At, local: Any) -> Pending:
    dim, ranks = at.step.dim, at.before.mesh_shape[at.step.axis]
    sizes = chunk_sizes(local.shape[dim], ranks)
    return start_reduce_scatter(at.platform, local, dim, sizes, at.step.op, at.group)


def _all_reduce(at: _At, local: Any) -> Pending:
    return start_all_reduce(at.platform, local, at.step.op, at.group)


def _part(at: _At, local: Any) -> Pending:
    if at.step.op in ("avg", "max", "min") or at.place[at.step.axis] == 0:
        return Pending.done(local)
    neutral = 0 if at.step.op == "sum" else 1
    return Pending.done(at.platform.full_like(local, neutral))


def _exchange(at: _At, local: Any) -> Pending:
    """Sends every rank what it lacks and this one has."""
    partners = _partners(at.before, at.after, at.step.axes, at.shape, at.place)
    if partners is not None:
        return Pending.done(_hand_over(at, local, *partners))
    swap = _swap_of(at.before, at.after, at.step.axes, at.shape, at.place)
    pieces = [local[part].reshape(-1) for parts in swap.sends for part in parts]
    flat = (
        at.platform.cat(pieces)
        if pieces
        else at.platform.empty((0,), dtype=local.dtype, device=local.device)
    )
    received, handle = at.platform.exchange(
        "all_to_all_single", flat, swap.send_counts, swap.receive_counts, at.group
    )

    def assemble() -> Any:
        return _assemble(at.platform, received, swap.receives, swap.shape)

    return Pending(handle, assemble)


class _Swap(NamedTuple):
    """What one rank sends and receives in an exchange, as slices of its shard."""

    sends: tuple[tuple[tuple[slice, ...], ...], ...]  # for each rank
    receives: tuple[tuple[slice, ...], ...]  # of all ranks, in their order
    send_counts: list[int]
    receive_counts: list[int]
    shape: tuple[int, ...]  # of the shard afterwards


@functools.lru_cache(maxsize=4096)
def _swap_of(
    before: Layout,
    after: Layout,
    axes: tuple[int, ...],
    shape: tuple[int, ...],
    own: tuple[int, ...],
) -> _Swap:
    """The slices to exchange; of several ranks that hold the same, the one on this rank's line sends."""
    have, want = before.region_of(shape, own), after.region_of(shape, own)
    lines = _replicating_axes(before, axes)
    sends, receives = [], []
    send_counts, receive_counts = [], []
    for rank in before.mesh.ranks_along(axes):
        other = before.mesh.coordinate_of(rank) or ()
        to_send, to_receive = [], []
        if all(other[axis] == own[axis] for axis in lines):
            to_send = _shared_parts(have, after.region_of(shape, other))
            to_receive = _shared_parts(before.region_of(shape, other), want)
        sends.append(tuple(part.in_source for part in to_send))
        receives += [part.in_target for part in to_receive]
        send_counts.append(sum(part.elements for part in to_send))
        receive_counts.append(sum(part.elements for part in to_receive))
    return _Swap(tuple(sends), tuple(receives), send_counts, receive_counts, want.shape)


def _replicating_axes(layout: Layout, axes: Sequence[int]) -> list[int]:
    """Those of the axes along which every rank holds the same."""
    sharding = {axis for dim in layout.dim_axes for axis in dim}
    return [axis for axis in axes if axis not in sharding]


class _SharedPart(NamedTuple):
    """A box that is in two regions, as slices of the local tensors that store them."""

    in_source: tuple[slice, ...]
    in_target: tuple[slice, ...]
    elements: int


def _shared_parts(source: Region, target: Region) -> list[_SharedPart]:
    parts = []
    for source_box, source_start in source.boxes():
        for target_box, target_start in target.boxes():
            part = overlap(source_box, target_box)
            if part is not None:
                in_source = slices_within(part, source_box, source_start)
                in_target = slices_within(part, target_box, target_start)
                parts.append(_SharedPart(in_source, in_target, volume(part)))
    return parts


@functools.lru_cache(maxsize=4096)
def _partners(
    before: Layout,
    after: Layout,
    axes: tuple[int, ...],
    shape: tuple[int, ...],
    own: tuple[int, ...],
) -> tuple[int, int] | None:
    """Whose shard this rank gets as it is, and which rank gets this one's.

    None unless every rank gets a whole shard, all shards have one shape, and no rank sends
    to one and receives from another: on some backends they would wait for each other.
    """
    mesh = before.mesh
    places = {rank: mesh.coordinate_of(rank) or () for rank in mesh.ranks_along(axes)}
    have = {rank: before.region_of(shape, place) for rank, place in places.items()}
    want = {rank: after.region_of(shape, place) for rank, place in places.items()}
    regions = [*have.values(), *want.values()]
    if len({region.shape for region in regions}) != 1:
        return None
    lines = _replicating_axes(before, axes)
    origins = _find_origins(places, have, want, lines)
    if origins is None:
        return None
    targets = _find_targets(origins)
    if targets is None:
        return None
    [rank] = [rank for rank, place in places.items() if place == own]
    return origins[rank], targets.get(rank, rank)


def _find_origins(
    places: dict[int, tuple[int, ...]],
    have: dict[int, Region],
    want: dict[int, Region],
    lines: Sequence[int],
) -> dict[int, int] | None:
    """For each rank the one on its line that holds what it wants; None unless there is exactly one."""
    origins = {}
    for rank, place in places.items():
        holders = [
            other
            for other, at in places.items()
            if have[other].spans == want[rank].spans
            and all(at[axis] == place[axis] for axis in lines)
        ]
        if len(holders) != 1:
            return None
        origins[rank] = holders[0]
    return origins


def _find_targets(origins: dict[int, int]) -> dict[int, int] | None:
    """For each rank that sends its shard the one that gets it.

    None if several get it, or if a rank would send to one and receive from another.
    """
    targets: dict[int, int] = {}
    for rank, origin in origins.items():
        if origin != rank and targets.setdefault(origin, rank) != rank:
            return None
    if any(origins[rank] not in (rank, target) for rank, target in targets.items()):
        return None
    return targets


def _hand_over(at: _At, local: Any, origin: int, target: int) -> Any:
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


def _gather(at: _At, local: Any) -> Pending:
    """Every rank's shard, one after the other, and each put where it belongs."""
    mesh = at.before.mesh
    places = [mesh.coordinate_of(rank) or () for rank in mesh.ranks_along(at.step.axes)]
    regions = [at.before.region_of(at.shape, place) for place in places]
    gathered = [
        Replicate() if axis in at.step.axes else placement
        for axis, placement in enumerate(at.before.placements)
    ]
    want = at.before.with_placements(gathered).region_of(at.shape, at.place)
    counts = [region.volume for region in regions]
    pending = start_all_gather(at.platform, local.reshape(-1), 0, counts, at.group)

    def assemble() -> Any:
        received = pending.finish()
        if _are_rows(regions, want):
            return received.reshape(want.shape)
        parts = [part for region in regions for part in _shared_parts(region, want)]
        slices = [part.in_target for part in parts]
        return _assemble(at.platform, received, slices, want.shape)

    return Pending(None, assemble)


def _are_rows(regions: Sequence[Region], want: Region) -> bool:
    """Whether the regions, one after the other in memory, are the whole already."""
    (((start, _),), *others) = want.spans
    for region in regions:
        ((offset, size),), *rest = region.spans
        if offset != start or rest != others:
            return False
        start += size
    return True


def _assemble(
    platform: Platform,
    received: Any,
    parts: Sequence[tuple[slice, ...]],
    shape: Sequence[int],
) -> Any:
    """The shard from its parts, which lie in ``received`` one after the other."""
    output = platform.empty(shape, dtype=received.dtype, device=received.device)
    start = 0
    for part in parts:
        sizes = [one.stop - one.start for one in part]
        stop = start + math.prod(sizes)
        output[part] = received[start:stop].reshape(sizes)
        start = stop
    return output


_START: dict[str, Callable[[_At, Any], Pending]] = {
    "slice": _slice,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "part": _part,
    "gather": _gather,
    "exchange": _exchange,
}
