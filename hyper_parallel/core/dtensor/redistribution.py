# SPDX-License-Identifier: Apache-2.0
"""From one layout to another: the cheapest steps, as a value.

    plan(layout("dp", "tp"), layout("None", "dp"), (8, 8), itemsize=4).explain()

A pure function of the two layouts and the global shape, so every rank finds the same plan, and it can be tested and
printed without any process. The cost of a plan is the bytes that a rank receives, and for each step that communicates
as much as STEP_BYTES would cost: small tensors want few steps, large ones few bytes. The search is exhaustive (uniform
cost), over all layouts of the tensor on the mesh.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from hyper_parallel.core.dtensor.layout import Layout, cut, placements_of
from hyper_parallel.core.dtensor.placement_types import (
    FusedShard,
    Partial,
    Placement,
    Replicate,
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
    gather           all_gather of several axes at once, which may cut different dims
    all_reduce       also of several axes at once
    exchange         everything that is cut is cut anew, over all axes involved: everyone gets from the others just what
                     it lacks
    slice and all_gather with sections: to and from FusedShard(dim, sections)
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
    sections: tuple[int, ...] = ()  # into which the dim is cut

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
        """The bytes that a rank receives, at the most."""
        return sum(step.nbytes for step in self.steps)

    @property
    def cost(self) -> int:
        """What the search made as small as possible."""
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
    """The cheapest steps that lead a tensor of this global shape from one layout to another on the same mesh."""
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
    if not (source.is_fused or target.is_fused):
        return Plan(
            source, target, shape, itemsize, _searched(source, target, shape, itemsize)
        )
    for layout in (source, target):
        layout.local_shape(
            shape, (0,) * layout.mesh.ndim
        )  # which checks that sections add up
    # What is cut section by section on one side only is whole in between.
    kept = source.fused.items() & target.fused.items()
    start, goal = (_whole_between(layout, kept) for layout in (source, target))
    gathers = [
        _sections_gathered(source, axis, shape, itemsize)
        for axis in source.fused
        if axis not in dict(kept)
    ]
    slices = [
        Step("slice", a, p.dim, sections=p.sections)
        for a, p in target.fused.items()
        if (a, p) not in kept
    ]
    return Plan(
        source,
        target,
        shape,
        itemsize,
        (*gathers, *_searched(start, goal, shape, itemsize), *slices),
    )


def _whole_between(layout: Layout, kept: Set[tuple[int, FusedShard]]) -> Layout:
    changed = [
        axis
        for axis, placement in layout.fused.items()
        if (axis, placement) not in kept
    ]
    return layout.with_placements(
        [
            Replicate() if axis in changed else p
            for axis, p in enumerate(layout.placements)
        ]
    )


def _sections_gathered(
    layout: Layout, axis: int, shape: Sequence[int], itemsize: int
) -> Step:
    placement, first = layout.fused[axis], (0,) * layout.mesh.ndim
    nbytes = (
        math.prod(layout.local_shape(shape, first))
        * itemsize
        * (layout.mesh_shape[axis] - 1)
    )
    return Step(
        "all_gather", axis, placement.dim, nbytes=nbytes, sections=placement.sections
    )


def _searched(
    source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int
) -> tuple[Step, ...]:
    """The steps between layouts that cut the same dims section by section: the other axes see a tensor of their own."""
    first = (0,) * source.mesh.ndim
    inside, sizes = source.within_pieces(shape, first)
    fused = tuple((axis, placement.dim) for axis, placement in source.fused.items())
    bound = _Bound(source.mesh_shape, sizes, itemsize, fused)
    return _search(bound, _state(inside), _state(target.within_pieces(shape, first)[0]))


class _Bound(NamedTuple):
    """What steps can be taken, and what their cost depends on besides the state."""

    mesh_shape: tuple[int, ...]
    shape: tuple[int, ...]
    itemsize: int
    fused: tuple[tuple[int, int], ...] = ()  # (axis, dim) that stay as they are

    @property
    def axes(self) -> list[int]:
        """The axes that may move something."""
        kept = [axis for axis, _ in self.fused]
        return [axis for axis in range(len(self.mesh_shape)) if axis not in kept]

    @property
    def dims(self) -> list[int]:
        """The dims that they may cut."""
        kept = [dim for _, dim in self.fused]
        return [dim for dim in range(len(self.shape)) if dim not in kept]

    def local_sizes(self, state: State) -> list[int]:
        """The shape of the largest shard: that of the first rank, in torch.chunk's way of cutting."""
        sizes = []
        for size, axes in zip(self.shape, state.dim_axes, strict=True):
            for axis in axes:
                size = -(-size // self.mesh_shape[axis])  # noqa: PLW2901 - cut again and again
            sizes.append(size)
        return sizes

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
            yield from (Step("slice", axis, dim) for dim in bound.dims)
            wanted = goal.partial[axis]
            if wanted is not None and commute([*state.partial, wanted]):
                yield Step("part", axis, op=wanted)
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
    for op in sorted({op for op in state.partial if op is not None}):
        axes = tuple(
            a
            for a, pending in enumerate(state.partial)
            if pending == op != goal.partial[a]
        )
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
    for coordinate in itertools.product(
        *(range(n) if a in axes else (0,) for a, n in enumerate(bound.mesh_shape))
    ):
        have, want = (
            box(bound.shape, s.dim_axes, bound.mesh_shape, coordinate)
            for s in (state, goal)
        )
        lacking = max(lacking, volume(want) - volume(overlap(have, want)))
    return Step(
        "exchange",
        axes[0],
        nbytes=lacking * bound.itemsize,
        axes=axes,
        target=goal.dim_axes,
    )


Box = tuple[tuple[int, int], ...]  # (offset, size) along each dim


def box(
    shape: Sequence[int],
    dim_axes: Sequence[Sequence[int]],
    mesh_shape: Sequence[int],
    at: Sequence[int],
) -> Box:
    """What a place of the mesh has of a tensor whose dims are cut by these axes."""
    return tuple(
        cut(size, [(mesh_shape[axis], at[axis]) for axis in axes])
        for size, axes in zip(shape, dim_axes, strict=True)
    )


def overlap(left: Box, right: Box) -> Box:
    """What two boxes share; a size of 0 somewhere if nothing."""
    shared = []
    for (a, n), (b, m) in zip(left, right, strict=True):
        start = max(a, b)
        shared.append((start, max(0, min(a + n, b + m) - start)))
    return tuple(shared)


def volume(of: Box) -> int:
    """The number of elements in a box."""
    return math.prod(size for _, size in of)


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
    """The layout after a step; axes that cut section by section stay, unless the step is about one of them."""
    placements: dict[int, Placement] = dict(layout.fused)
    state = _state(
        layout.with_placements(
            [
                Replicate() if a in placements else p
                for a, p in enumerate(layout.placements)
            ]
        )
    )
    if not step.sections:
        state = _after(state, step)
    elif step.kind == "slice":
        placements[step.axis] = FusedShard(step.dim, step.sections)
    else:
        del placements[step.axis]
    others = enumerate(placements_of(*state, layout.mesh_shape))
    return layout.with_placements(
        [placements.get(axis, placement) for axis, placement in others]
    )


def _state(layout: Layout) -> State:
    return State(
        layout.dim_axes,
        tuple(
            p.reduce_op if isinstance(p, Partial) else None for p in layout.placements
        ),
    )
