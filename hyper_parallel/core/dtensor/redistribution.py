# SPDX-License-Identifier: Apache-2.0
"""The cheapest steps from one layout to another, as a value.

    plan(layout("dp", "tp"), layout("None", "dp"), (8, 8), itemsize=4).explain()

A pure function of the two layouts and the global shape, so every rank finds the same plan, and it can be tested and
printed without processes. The cost of a plan is the number of bytes that a rank receives, plus STEP_BYTES per step that
communicates: small tensors need few steps, large ones few bytes. The search is exhaustive (uniform
cost), over all layouts of the tensor on the mesh.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hyper_parallel.core.dtensor.geometry import Box, nested_span, overlap, volume
from hyper_parallel.core.dtensor.layout import Layout, placements_of
from hyper_parallel.core.dtensor.placement_types import (
    Placement,
    Replicate,
    Shard,
    commute,
)
from hyper_parallel.platform.error_codes import coded

# What starting a collective costs, in bytes that could have been received meanwhile.
STEP_BYTES = 1 << 13


@dataclass(frozen=True)
class Step:
    """One move, along one axis or several.

    kind             axis was              axis is then
    slice            Replicate             Shard(dim), innermost
    all_gather       Shard(dim), innermost Replicate
    all_to_all       Shard(source), inn.   Shard(dim), innermost
    reduce_scatter   Partial(op)           Shard(dim), innermost
    all_reduce       Partial(op)           Replicate
    part             Replicate             Partial(op): the value on the first rank, op's neutral one on the others
    gather           all_gather of several axes at once, which may shard different dims
    all_reduce       also of several axes at once
    exchange         everything that is cut is cut anew, over all axes involved: everyone gets from the others just what
                     it lacks
    slice and all_gather with a placement: to and from that irregular placement
    """

    kind: str
    axis: int
    dim: int = -1
    source: int = -1
    op: str = ""
    nbytes: int = 0  # that a rank receives, at the most
    axes: tuple[int, ...] = ()  # where there are several
    target: tuple[
        tuple[int, ...], ...
    ] = ()  # of an exchange: for each dim the axes that cut it then
    placement: Shard | None = None  # the irregular placement to slice to or gather from
    layout: Layout | None = None  # of an exchange to or from irregular placements

    def __str__(self) -> str:
        where = {
            "all_to_all": f" dim {self.source} -> {self.dim}",
            "reduce_scatter": f" {self.op} to dim {self.dim}",
            "exchange": "",
            "gather": "",
        }.get(
            self.kind,
            f" dim {self.dim}" if self.dim >= 0 else f" {self.op}" if self.op else "",
        )
        return f"{self.kind}{where}"


class State(NamedTuple):
    """A layout while the search goes on: for each dim the axes that cut it, outermost first; what is pending."""

    dim_axes: tuple[tuple[int, ...], ...]
    partial: tuple[str | None, ...]


@dataclass(frozen=True)
class Plan:
    """The steps from one layout to another for tensors of one shape."""

    source: Layout
    target: Layout
    shape: tuple[int, ...]
    itemsize: int
    steps: tuple[Step, ...]

    @property
    def nbytes(self) -> int:
        """The maximum number of bytes that a rank receives."""
        return sum(step.nbytes for step in self.steps)

    @property
    def cost(self) -> int:
        """The cost that the search minimizes."""
        return sum(_cost(step) for step in self.steps)

    @functools.cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout after every step."""
        return tuple(
            itertools.accumulate(self.steps, _layout_after, initial=self.source)
        )[1:]

    def explain(self) -> str:
        """The plan as a table: each step with its axis, the placements after it and its bytes."""
        names = self.source.alias_name
        head = f"{self.shape} on {self.source.to_string()} -> [{', '.join(map(str, self.target.placements))}]"
        lines = [f"{head}: {len(self.steps)} steps, {self.nbytes} bytes a rank"]
        for number, (step, layout) in enumerate(
            zip(self.steps, self.layouts, strict=True), 1
        ):
            after = f"[{', '.join(map(str, layout.placements))}]"
            axes = "+".join(names[axis] for axis in step.axes or (step.axis,))
            lines.append(
                f"  {number}. {axes:<8} {step!s:<28} {after:<24} {step.nbytes:>12} B"
            )
        return "\n".join(lines)


def plan(
    source: Layout, target: Layout, shape: Sequence[int], itemsize: int = 4
) -> Plan:
    """The cheapest steps for a tensor of this global shape from one layout to another on the same mesh."""
    if source.mesh != target.mesh:
        raise coded(
            ValueError,
            "HP224",
            f"redistribute: {source} and {target} are on different meshes: {source.mesh}, {target.mesh}",
        )
    ndim = len(shape)
    return _plan(source.bind(ndim), target.bind(ndim), tuple(shape), itemsize)


@functools.lru_cache(maxsize=4096)
def _plan(
    source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int
) -> Plan:
    for layout in (source, target):
        # Raises if an irregular placement does not fit the shape.
        layout.local_shape(shape, (0,) * layout.mesh.ndim)
    # Axes whose irregular placement changes are replicated in between.
    kept = dict(source.irregular.items() & target.irregular.items())
    gathers = [
        _gather_irregular(source, axis, shape, itemsize)
        for axis in source.irregular
        if axis not in kept
    ]
    slices = [
        Step("slice", axis, placement.dim, placement=placement)
        for axis, placement in target.irregular.items()
        if axis not in kept
    ]
    start, goal = _replicate_others(source, kept), _replicate_others(target, kept)
    steps = (*gathers, *_search_between(start, goal, shape, itemsize), *slices)
    stepwise = Plan(source, target, shape, itemsize, steps)
    if not (gathers or slices) or source.partial != target.partial:
        return stepwise
    exchange = _exchange_irregular(source, target, shape, itemsize)
    direct = Plan(source, target, shape, itemsize, (exchange,))
    return direct if 0 < direct.cost < stepwise.cost else stepwise


def _replicate_others(layout: Layout, kept: Mapping[int, Shard]) -> Layout:
    """The layout with Replicate on the irregular axes that are not kept."""
    placements = [
        Replicate() if axis in layout.irregular and axis not in kept else placement
        for axis, placement in enumerate(layout.placements)
    ]
    return layout.with_placements(placements)


def _gather_irregular(
    layout: Layout, axis: int, shape: Sequence[int], itemsize: int
) -> Step:
    placement = layout.irregular[axis]
    largest = math.prod(layout.largest_local_shape(shape))
    nbytes = largest * itemsize * (layout.mesh_shape[axis] - 1)
    return Step("all_gather", axis, placement.dim, nbytes=nbytes, placement=placement)


def _exchange_irregular(
    source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int
) -> Step:
    """The single step to the target: every rank receives exactly what it lacks."""
    changed = [
        axis
        for axis, pair in enumerate(
            zip(source.placements, target.placements, strict=True)
        )
        if pair[0] != pair[1]
    ]
    axes = tuple(changed)
    lacking = 0
    for coordinate in _coordinates(source.mesh_shape, axes):
        have = source.region_of(shape, coordinate)
        want = target.region_of(shape, coordinate)
        lacking = max(lacking, want.volume - want.shared_with(have))
    nbytes = lacking * itemsize
    return Step("exchange", axes[0], nbytes=nbytes, axes=axes, layout=target)


def _coordinates(
    mesh_shape: Sequence[int], axes: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Every coordinate along these axes, 0 along the others."""
    ranges = (
        range(ranks) if axis in axes else range(1)
        for axis, ranks in enumerate(mesh_shape)
    )
    return itertools.product(*ranges)


def _search_between(
    source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int
) -> tuple[Step, ...]:
    """The steps between layouts with the same irregular placements, on the other axes."""
    if source is target:
        return ()
    sizes, largest = list(shape), source.largest_local_shape(shape)
    fixed = []
    for axis, placement in source.irregular.items():
        sizes[placement.dim] = largest[placement.dim]
        fixed.append((axis, placement.dim))
    bound = _Bound(source.mesh_shape, tuple(sizes), itemsize, tuple(fixed))
    return _search(bound, _state(source), _state(target))


class _Bound(NamedTuple):
    """What steps can be taken, and what their cost depends on besides the state."""

    mesh_shape: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: int
    fixed: tuple[tuple[int, int], ...] = ()  # (axis, dim) that stay as they are

    @property
    def axes(self) -> list[int]:
        """The axes that may move something."""
        kept = [axis for axis, _ in self.fixed]
        return [axis for axis in range(len(self.mesh_shape)) if axis not in kept]

    @property
    def dims(self) -> list[int]:
        """The dims that they may cut."""
        kept = [dim for _, dim in self.fixed]
        return [dim for dim in range(len(self.shape)) if dim not in kept]

    def local_sizes(self, state: State) -> list[int]:
        """The shape of the largest shard: that of the first rank, in torch.chunk's way of cutting."""
        sizes = []
        for size, axes in zip(self.shape, state.dim_axes, strict=True):
            for axis in axes:
                size = -(-size // self.mesh_shape[axis])  # noqa: PLW2901 - cut again and again
            sizes.append(size)
        return sizes

    def box(self, state: State, coordinate: Sequence[int]) -> Box:
        """What a coordinate holds in a state."""
        spans = []
        for size, axes in zip(self.shape, state.dim_axes, strict=True):
            chunks = [(self.mesh_shape[axis], coordinate[axis]) for axis in axes]
            spans.append(nested_span(size, chunks))
        return tuple(spans)

    def share(self, sizes: Sequence[int], dim: int, ranks: int) -> int:
        """The bytes a rank receives when everyone sends each other one piece of that dim of such a shard."""
        pieces = [
            -(-size // ranks) if d == dim else size for d, size in enumerate(sizes)
        ]
        return math.prod(pieces) * self.itemsize * (ranks - 1)


def _search(bound: _Bound, start: State, goal: State) -> tuple[Step, ...]:
    """Uniform-cost search; ties are broken by the number of steps and then by the order in which states are found."""
    counter = itertools.count()
    queue: list[tuple[int, int, int, State, tuple[Step, ...]]] = [
        (0, 0, next(counter), start, ())
    ]
    done: set[State] = set()
    while queue:
        cost, count, _, state, steps = heapq.heappop(queue)
        if state == goal:
            return steps
        if state in done:
            continue
        done.add(state)
        for step in _steps(bound, state, goal):
            after = _after(state, step)
            if after not in done:
                heapq.heappush(
                    queue,
                    (
                        cost + _cost(step),
                        count + 1,
                        next(counter),
                        after,
                        (*steps, step),
                    ),
                )
    raise AssertionError(
        f"no way from {start} to {goal}"
    )  # every state can be gathered and cut again


def _steps(bound: _Bound, state: State, goal: State) -> Iterator[Step]:
    """Every step that can be taken from a state."""
    innermost = {axes[-1]: dim for dim, axes in enumerate(state.dim_axes) if axes}
    cutting = {axis for axes in state.dim_axes for axis in axes}
    for axis in bound.axes:
        if axis in innermost:
            yield from _from_shard(bound, state, axis, innermost[axis])
        elif state.partial[axis] is not None:
            yield from _from_partial(bound, state, axis)
        elif axis not in cutting:
            yield from _from_replicate(bound, state, goal, axis)
    yield from _along_several(bound, state, goal)
    if state.partial == goal.partial and state != goal:
        exchange = _exchange(bound, state, goal)
        if exchange.nbytes:  # else slices do, without communication
            yield exchange  # last: where it costs the same, a named collective is better


def _from_shard(bound: _Bound, state: State, axis: int, dim: int) -> Iterator[Step]:
    sizes, ranks = bound.local_sizes(state), bound.mesh_shape[axis]
    yield Step(
        "all_gather", axis, dim, nbytes=math.prod(sizes) * bound.itemsize * (ranks - 1)
    )
    for other in bound.dims:
        if other != dim:
            yield Step(
                "all_to_all", axis, other, dim, nbytes=bound.share(sizes, other, ranks)
            )


def _from_partial(bound: _Bound, state: State, axis: int) -> Iterator[Step]:
    sizes, ranks, op = (
        bound.local_sizes(state),
        bound.mesh_shape[axis],
        state.partial[axis] or "",
    )
    nbytes = math.prod(sizes) * bound.itemsize
    yield Step("all_reduce", axis, op=op, nbytes=2 * -(-nbytes // ranks) * (ranks - 1))
    for dim in bound.dims:
        yield Step(
            "reduce_scatter", axis, dim, op=op, nbytes=bound.share(sizes, dim, ranks)
        )


def _from_replicate(
    bound: _Bound, state: State, goal: State, axis: int
) -> Iterator[Step]:
    yield from (Step("slice", axis, dim) for dim in bound.dims)
    wanted = goal.partial[axis]
    if wanted is not None and commute([*state.partial, wanted]):
        yield Step("part", axis, op=wanted)


def _along_several(bound: _Bound, state: State, goal: State) -> Iterator[Step]:
    """What takes one collective where axes one by one would take as many: no more bytes, and fewer turns."""
    wanted = {axis for axes in goal.dim_axes for axis in axes}
    inner = [_innermost(axes, wanted) for axes in state.dim_axes]
    axes = tuple(sorted(axis for one in inner for axis in one))
    sizes = bound.local_sizes(state)
    if len(axes) > 1:
        others = math.prod(bound.mesh_shape[axis] for axis in axes) - 1
        yield Step(
            "gather",
            axes[0],
            nbytes=math.prod(sizes) * bound.itemsize * others,
            axes=axes,
        )
    yield from _reduce_several(bound, state, goal)


def _reduce_several(bound: _Bound, state: State, goal: State) -> Iterator[Step]:
    sizes = bound.local_sizes(state)
    for op in sorted({op for op in state.partial if op is not None}):
        pending = enumerate(zip(state.partial, goal.partial, strict=True))
        axes = tuple(a for a, (now, wanted_op) in pending if now == op != wanted_op)
        if len(axes) > 1:
            ranks = math.prod(bound.mesh_shape[axis] for axis in axes)
            nbytes = 2 * -(-math.prod(sizes) * bound.itemsize // ranks) * (ranks - 1)
            yield Step("all_reduce", axes[0], op=op, nbytes=nbytes, axes=axes)


def _innermost(axes: Sequence[int], wanted: set[int]) -> list[int]:
    """The innermost axes of a dim that the goal does not cut anything by."""
    return list(itertools.takewhile(lambda axis: axis not in wanted, reversed(axes)))


def _exchange(bound: _Bound, state: State, goal: State) -> Step:
    """The step that leads straight to the goal."""
    changed = [
        pair
        for pair in zip(state.dim_axes, goal.dim_axes, strict=True)
        if pair[0] != pair[1]
    ]
    axes = tuple(sorted({axis for pair in changed for side in pair for axis in side}))
    lacking = 0
    for coordinate in _coordinates(bound.mesh_shape, axes):
        want = bound.box(goal, coordinate)
        shared = overlap(bound.box(state, coordinate), want)
        lacking = max(lacking, volume(want) - (volume(shared) if shared else 0))
    return Step(
        "exchange",
        axes[0],
        nbytes=lacking * bound.itemsize,
        axes=axes,
        target=goal.dim_axes,
    )


def _cost(step: Step) -> int:
    return (
        step.nbytes + STEP_BYTES if step.nbytes else 0
    )  # nothing to receive, nothing to wait for


def _after(state: State, step: Step) -> State:
    if step.kind == "exchange":
        return State(step.target, state.partial)
    dims, partial = list(state.dim_axes), list(state.partial)
    if step.kind == "gather":
        return State(
            tuple(tuple(a for a in axes if a not in step.axes) for axes in dims),
            state.partial,
        )
    if step.kind in ("all_gather", "all_to_all"):
        left = step.source if step.kind == "all_to_all" else step.dim
        assert dims[left][-1] == step.axis
        dims[left] = dims[left][:-1]
    if step.kind in ("slice", "all_to_all", "reduce_scatter"):
        dims[step.dim] = (*dims[step.dim], step.axis)
    for axis in step.axes or (step.axis,):
        partial[axis] = step.op if step.kind == "part" else None
    return State(tuple(dims), tuple(partial))


def _layout_after(layout: Layout, step: Step) -> Layout:
    """The layout after a step; irregular placements stay unless the step is about one."""
    if step.layout is not None:
        return step.layout
    irregular: dict[int, Placement] = dict(layout.irregular)
    state = _state(layout)
    if step.placement is None:
        state = _after(state, step)
    elif step.kind == "slice":
        irregular[step.axis] = step.placement
    else:
        del irregular[step.axis]
    others = enumerate(placements_of(*state, layout.mesh_shape))
    placements = [irregular.get(axis, placement) for axis, placement in others]
    return layout.with_placements(placements)


def _state(layout: Layout) -> State:
    """The layout's state on the axes that the search may change."""
    dim_axes = [
        tuple(axis for axis in axes if axis not in layout.irregular)
        for axes in layout.dim_axes
    ]
    return State(tuple(dim_axes), tuple(layout.partial))
