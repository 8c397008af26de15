# SPDX-License-Identifier: Apache-2.0
"""What operators do to a tensor that is cut section by section: keep that, take it apart, or have it cut as one.

qkv = linear(x, weight)               weight is FusedShard(0, (16, 8, 8)), so qkv is FusedShard(-1, (16, 8, 8))
q, k, v = qkv.split((16, 8, 8), -1)   views of the shard, each Shard(-1)
qkv.softmax(-1)                       sees Shard(-1), for which qkv is gathered and cut anew

A plan is made as if each dim were cut as one. What does not care about the order of a dim's elements may then run on
sections as well, and all tensors of the call that have the dim are cut so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.modes import MODES
from hyper_parallel.core.dtensor.placement_types import FusedShard, Placement, Shard
from hyper_parallel.core.dtensor.routes import local_for
from hyper_parallel.core.shard.arguments import (
    check_explicit,
    flat,
    refuse_copy,
    replaced,
)
from hyper_parallel.core.shard.binding import flat as bound_tensors
from hyper_parallel.core.shard.execution import Run, copied_back
from hyper_parallel.core.shard.ops.indexing import ALL, spread
from hyper_parallel.core.shard.ops.operator import OPERATORS, Operator
from hyper_parallel.core.shard.propagate import OpPlan
from hyper_parallel.core.shard.rule import BoundRule
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import OpName
from hyper_parallel.platform.transform import chunk_sizes

platform = get_platform()

# Operators that ask their rank for nothing but the shape of its result.
SHAPED = (
    "broadcast_to expand flatten narrow ravel reshape squeeze unflatten unsqueeze view"
)
# Operators that do it all by themselves, and are right for every layout.
ANY_LAYOUT = (
    "contiguous copy zero zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full new_tensor "
    "to type_as view_as reshape_as expand_as atleast_1d atleast_2d atleast_3d hsplit vsplit dsplit slice slice_copy "
    "sum_to_size alias_copy init bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_ "
    "rand_like randn_like randint_like vector_norm norm amax amin cross_entropy"
)


def any_fused(tensors: Sequence[DTensor]) -> bool:
    """Whether any of them is cut section by section."""
    return any(tensor._layout.is_fused for tensor in tensors)


# --- sections that stay


def unfused(layouts: Sequence[Any]) -> list[Any]:
    """The layouts of operands with each dim cut as one."""
    return [
        tuple(one.unfused() for one in item)
        if isinstance(item, tuple)
        else item and item.unfused()
        for item in layouts
    ]


def with_sections(
    op: Operator,
    bound: BoundRule,
    made: OpPlan | None,
    layouts: Sequence[Any],
    inplace: bool,
) -> OpPlan | None:
    """The plan with sections where they can stay; None where the target of a change in place could not stay."""
    if made is None:
        return None
    lying = flat(layouts)
    if op.local is None or op.name in SHAPED.split():
        pairs = list(zip(bound_tensors(bound.operands), lying, strict=True))
        cuts = _cuts(bound, made, pairs[:1] if inplace else pairs)
        made = replace(
            made,
            operands=_cut_so(bound.operands, made.operands, cuts),
            results=_cut_so(bound.results, made.results, cuts),
        )
    return None if inplace and flat(made.operands)[0] is not lying[0] else made


def _cuts(
    bound: BoundRule, made: OpPlan, pairs: Sequence[tuple[Any, Layout]]
) -> dict[int, tuple[str, tuple[int, ...]]]:
    """For each axis that can keep sections its factor and their sizes: those of the first operand that has some."""
    found: dict[int, tuple[str, tuple[int, ...]]] = {}
    for tensor, layout in pairs:
        for axis, placement in layout.fused.items():
            name = made.choices[axis].factor
            if (
                name is not None
                and tensor.dims[placement.dim] == (name,)
                and _any_order(bound, made, name)
            ):
                found.setdefault(axis, (name, placement.sections))
    return found


def _any_order(bound: BoundRule, made: OpPlan, name: str) -> bool:
    """Whether the order of a factor's elements is all the same: it is a dim by itself, and cut by one axis."""
    factor = bound.factor(name)
    equal_parts = not factor.kept and bound.rule.reduce == "avg"
    dims = [
        dim
        for tensor in bound_tensors((*bound.operands, *bound.results))
        for dim in tensor.dims
        if name in dim
    ]
    alone = all(dim == (name,) for dim in dims) and len(made.orders[name]) == 1
    return alone and not (factor.looked_up or equal_parts)


def _cut_so(
    tensors: Any, layouts: Any, cuts: dict[int, tuple[str, tuple[int, ...]]]
) -> Any:
    if isinstance(layouts, tuple):
        return tuple(
            _cut_so(*pair, cuts) for pair in zip(tensors, layouts, strict=True)
        )
    if layouts is None or not cuts:
        return layouts
    placements = list(layouts.placements)
    for axis, (name, sections) in cuts.items():
        dim = tensors.find(name)
        if dim is not None:
            placements[axis] = FusedShard(dim, sections)
    return layouts.with_placements(placements)


# --- taken apart


def taken_apart(
    called: OpName, bound: BoundRule, arguments: dict[str, Any]
) -> Run | None:
    """The way for a view that leads along the borders of sections; None for any other."""
    find, tensor = _VIEWS.get(called.name), arguments.get("input")
    if find is None or not isinstance(tensor, DTensor):
        return None
    others = {
        name: value
        for name, value in arguments.items()
        if name not in ("input", "shape")
    }
    for axis, placement in tensor._layout.fused.items():
        found = find(_Cut(tensor, axis, placement), bound.result_shapes[0], **others)
        if found is not None:
            return found
    return None


class _Cut:
    """A dim of a tensor that an axis cuts section by section."""

    def __init__(self, tensor: DTensor, axis: int, placement: FusedShard) -> None:
        self.layout: Layout = tensor._layout
        self.shape = tuple(tensor._shape)
        self.axis, self.dim, self.sections = axis, placement.dim, placement.sections
        self.ranks = self.layout.mesh_shape[axis]
        place = self.layout.mesh.own_coordinate("a view of sections")
        self.own = [size for _, size in placement.spans(self.ranks, place[axis])]

    def is_along(self, dim: int) -> bool:
        return dim % len(self.shape) == self.dim

    def parts(
        self, sizes: Sequence[int]
    ) -> list[tuple[Layout, tuple[int, ...], int]] | None:
        """(layout, shape, this rank's size) of parts of these sizes; None unless they end where sections end."""
        stops, borders = (
            list(itertools.accumulate(sizes)),
            [0, *itertools.accumulate(self.sections)],
        )
        if min(sizes) < 0 or stops[-1] != borders[-1] or not set(stops) <= set(borders):
            return None
        found = []
        for start, stop in zip([0, *stops], stops, strict=False):
            within = slice(borders.index(start), borders.index(stop))
            placement = _placement(self.dim, self.sections[within])
            shape = (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :])
            found.append((self._layout_with(placement), shape, sum(self.own[within])))
        return found

    def unflattened(
        self, sizes: Sequence[int]
    ) -> tuple[Layout, tuple[int, ...]] | None:
        """(layout, shape) with the dim as these: as (sections, size of one, ...), or (heads of all, size of one)."""
        shape = (*self.shape[: self.dim], *sizes, *self.shape[self.dim + 1 :])
        sections = [size for size in self.sections if size]
        at = next((i for i, size in enumerate(sizes) if i and size != 1), 1)
        inner = math.prod(sizes[1:])
        if set(sections) == {inner} and self._is_cut_alike(
            [sizes[at]], inner // sizes[at]
        ):
            return self._layout_with(Shard(self.dim + at), len(sizes) - 1), shape
        heads = [size // inner for size in sections if size % inner == 0]
        if len(heads) == len(sections) and self._is_cut_alike(heads, inner):
            return self._layout_with(_placement(self.dim, heads), len(sizes) - 1), shape
        return None

    def _is_cut_alike(self, outer: Sequence[int], inner: int) -> bool:
        """Whether cutting merged dims is cutting the outer one."""
        cuts = (
            (chunk_sizes(size, self.ranks), chunk_sizes(size * inner, self.ranks))
            for size in outer
        )
        return all(
            [piece * inner for piece in pieces] == merged for pieces, merged in cuts
        )

    def _layout_with(self, placement: Placement, more: int = 0) -> Layout:
        """The layout with another placement of the axis, and ``more`` dims after this one."""
        placements: list[Placement] = [
            replace(p, dim=p.dim + more)
            if isinstance(p, Shard) and p.dim > self.dim
            else p
            for p in self.layout.placements
        ]
        placements[self.axis] = placement
        base = Layout.from_device_mesh(self.layout.mesh)
        return base(placements).bind(len(self.shape) + more)


def _placement(dim: int, sections: Sequence[int]) -> Shard:
    """How these sections lie: a single one is cut as any dim."""
    sizes = tuple(size for size in sections if size)
    return FusedShard(dim, sizes) if len(sizes) > 1 else Shard(dim)


def _viewed(base: DTensor, local: Any, layout: Layout, shape: Sequence[int]) -> DTensor:
    made = DTensor(local, layout, shape)
    made._copy_of = base._copy_of
    return made


def _split(cut: _Cut, shapes: Any, dim: int = 0, **_: Any) -> Run | None:
    parts = (
        cut.parts([shape[cut.dim] for shape in shapes]) if cut.is_along(dim) else None
    )
    if parts is None:
        return None
    split, sizes = platform.operator("split_with_sizes"), [size for *_, size in parts]

    def run(tensors: list[DTensor], args: Any, kwargs: Any) -> Any:  # noqa: ARG001 - as every other way
        (tensor,) = tensors
        pairs = zip(split(tensor._local, sizes, cut.dim), parts, strict=True)
        return tuple(
            _viewed(tensor, local, layout, shape) for local, (layout, shape, _) in pairs
        )

    return run


def _narrow(
    cut: _Cut,
    shape: Any,  # noqa: ARG001 - as others
    dim: int,
    start: int,
    length: int,
    **_: Any,
) -> Run | None:
    if not cut.is_along(dim):
        return None
    return _taken(cut, start + cut.shape[cut.dim] if start < 0 else start, length)


def _taken(cut: _Cut, start: int, length: int, rest: Any = None) -> Run | None:
    """From ``start`` along the dim; ``rest``: an index of the other dims."""
    parts = cut.parts([start, length, cut.shape[cut.dim] - start - length])
    if parts is None:
        return None
    (*_, begin), (layout, shape, size), _ = parts
    own = (ALL,) * cut.dim + (slice(begin, begin + size),)

    def run(tensors: list[DTensor], args: Any, kwargs: Any) -> Any:  # noqa: ARG001 - as every other way
        taken = _viewed(tensors[0], tensors[0]._local[own], layout, shape)
        return taken if rest is None else taken[rest]

    return run


def _getitem(cut: _Cut, shape: Any, index: Any, **_: Any) -> Run | None:  # noqa: ARG001 - as others
    items = spread(index, len(cut.shape))
    at = [i for i, item in enumerate(items) if item is not None][cut.dim]
    if not isinstance(items[at], slice):
        return None
    start, stop, step = items[at].indices(cut.shape[cut.dim])
    if step != 1 or (start, stop) == (0, cut.shape[cut.dim]):
        return None
    items[at] = ALL
    rest = None if all(item == ALL for item in items) else tuple(items)
    return _taken(cut, start, max(0, stop - start), rest)


def _view(cut: _Cut, shape: Any, **_: Any) -> Run | None:
    return _reshaped(cut, shape, "view")


def _reshape(cut: _Cut, shape: Any, **_: Any) -> Run | None:
    return _reshaped(cut, shape, "reshape")


def _reshaped(cut: _Cut, shape: tuple[int, ...], way: str) -> Run | None:
    """The dim becomes several and nothing else; what happens to other dims comes after."""
    sizes = _sizes_for(cut.dim, cut.shape, shape)
    found = cut.unflattened(sizes) if len(sizes) > 1 else None
    if found is None:
        return None
    layout, first = found
    local = layout.local_shape(first)[cut.dim : cut.dim + len(sizes)]

    def run(tensors: list[DTensor], args: Any, kwargs: Any) -> Any:  # noqa: ARG001 - as every other way
        made = _viewed(
            tensors[0], tensors[0]._local.unflatten(cut.dim, local), layout, first
        )
        return made if first == shape else getattr(made, way)(shape)

    return run


def _sizes_for(dim: int, old: Sequence[int], new: Sequence[int]) -> Sequence[int]:
    """The dims of a new shape that are those of one dim of the old; none where they are not by themselves."""
    if not math.prod(old) == math.prod(new) > 0:
        return ()
    before = list(itertools.accumulate(new, lambda a, b: a * b, initial=1))
    start, stop = math.prod(old[:dim]), math.prod(old[: dim + 1])
    if start not in before or stop not in before:
        return ()
    first = len(before) - 1 - before[::-1].index(start)  # dims of one are no part of it
    return new[first : before.index(stop)]


_VIEWS: dict[str, Callable[..., Run | None]] = {
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), _split),
    **dict.fromkeys(("view", "unflatten"), _view),
    "reshape": _reshape,
    "narrow": _narrow,
    "getitem": _getitem,
}

# --- cut as one first


def for_any_layout(called: OpName, run: Run) -> Run:
    """A way that knows nothing of sections, for tensors that may have some."""
    op = OPERATORS.get(called.name)
    if called.name in ANY_LAYOUT.split() or (
        op is not None and op.lists
    ):  # lists are shard by shard
        return run
    return Unfused(called, run).run


class Unfused:
    """A call on tensors with each dim cut as one; what it changes in them is brought back."""

    def __init__(self, called: OpName, run: Run) -> None:
        self._called, self._run = called, run

    def run(self, tensors: list[DTensor], args: Any, kwargs: Any) -> Any:
        """The operator on these arguments."""
        changes = (
            self._called.inplace
            or kwargs.get("inplace") is True
            or self._called.name == "setitem"
        )
        if changes:
            refuse_copy(self._called.name, tensors[0])
        given = [
            self._cut_as_one(number, tensor) for number, tensor in enumerate(tensors)
        ]
        before = [platform.version_of(tensor._local) for tensor in given]
        if not changes:
            for tensor, one in zip(tensors, given, strict=True):
                one._copy_of = (
                    one._copy_of if one is tensor else self._called.name
                )  # what a view of it would be
        following = iter(given)
        args = replaced(args, following)
        kwargs = {name: replaced(value, following) for name, value in kwargs.items()}
        result = self._run(given, args, kwargs)
        for tensor, one, version in zip(tensors, given, before, strict=True):
            changed = (
                changes
                if version is None
                else platform.version_of(one._local) != version
            )
            if one is not tensor and changed:
                refuse_copy(self._called.name, tensor)
                copied_back(tensor, one)
            result = tensor if result is one else result
        return result

    def _cut_as_one(self, number: int, tensor: DTensor) -> DTensor:
        if not tensor._layout.is_fused:
            return tensor
        layout = tensor._layout.unfused()
        if MODES.explicit:
            check_explicit(self._called.name, tensor, number, layout)
        return DTensor(local_for(tensor, layout), layout, tensor._shape)
