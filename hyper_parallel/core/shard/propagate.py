# SPDX-License-Identifier: Apache-2.0
"""From a rule and the layouts of the operands to a plan: how operands must lie, how results will, what gradients need.

    plan = propagate(einsum("m k, k n -> m n").bind([(4, 8), (8, 6)]), [layout("None", "tp"), layout("tp", "None")])
    plan.results[0].placements == (Partial(),)

Each axis is decided on its own: what moves the fewest bytes, then what changes the fewest operands, then what leaves
dims alone that other axes cut, then the order of the rule's choices, which is the same on every rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.layout import Layout, placements_of
from hyper_parallel.core.dtensor.placement_types import Shard, commute
from hyper_parallel.core.shard.binding import BoundTensor
from hyper_parallel.core.shard.rule import AxisUse, BoundRule, Choice


@dataclass(frozen=True)
class OpPlan:
    """What one call does. Operands and results in the order of the rule; a tuple for a list, None for an absent one."""

    operands: tuple[Any, ...]  # the layout that each operand must have
    results: tuple[Any, ...]  # the layout that each result has
    shapes: tuple[Any, ...]  # the global shape of each result
    routes: tuple[
        Any, ...
    ]  # for each operand the axes on which its gradient must be summed
    choices: tuple[Choice, ...]  # what each axis does
    orders: dict[str, list[int]]  # for each sharded factor its axes, outermost first
    irregular: Mapping[str, Shard] = field(default_factory=dict)  # by factor

    def __str__(self) -> str:
        return "; ".join(str(choice) for choice in self.choices)


_KNOWN: dict[
    Any, Any
] = {}  # the choices, which stay alive with it, and the layouts that they lead to
_MOST_KNOWN = 1 << 14


def propagate(
    bound: BoundRule,
    layouts: Sequence[Any],
    itemsizes: Sequence[int] | None = None,
    *,
    inplace: bool = False,
) -> OpPlan | None:
    """The plan for operands of these layouts: one a tensor, a tuple for a list, None for an absent operand.

    ``inplace``: the first operand stays as it lies and the first result lies there too; None where that cannot be.
    """
    call = _Call(bound, _checked(bound, layouts), itemsizes)
    chosen = call.choose(inplace)
    if chosen is None:
        return None
    made = plan_for(bound, chosen, call.mesh, call.orders(chosen))
    first = bound.operands[0]
    stays = not inplace or (
        made.operands[0] is made.results[0] is call.first
        and isinstance(first, BoundTensor)
        and tuple(made.shapes[0]) == tuple(first.shape)
    )
    return made if stays else None


def plan_for(
    bound: BoundRule,
    chosen: Sequence[Choice],
    mesh: DeviceMesh,
    orders: dict[str, list[int]],
) -> OpPlan:
    """The plan when each axis does what was chosen for it; ``orders``: for each factor its axes, outermost first."""
    # The choices of calls that differ in sizes only are the same objects.
    key = (
        mesh,
        *(
            (id(choice), tuple(orders.get(choice.factor or "", ())))
            for choice in chosen
        ),
    )
    known = _KNOWN.get(key)
    if known is None:
        sides = _Sides(mesh, orders)
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        known = _KNOWN[key] = (
            tuple(chosen),
            sides.layouts_for(bound.operands, [choice.operands for choice in chosen]),
            sides.layouts_for(bound.results, [choice.results for choice in chosen]),
            _summed_axes(bound.operands, [choice.grads_out for choice in chosen]),
        )
    choices, operands, results, routes = known
    return OpPlan(operands, results, bound.result_shapes, routes, choices, orders)


@dataclass(frozen=True)
class _Sides:
    """The layouts of operands and results from the places that the axes give them."""

    mesh: DeviceMesh
    orders: dict[str, list[int]]

    def layouts_for(self, tensors: Any, places: Sequence[Any]) -> tuple[Any, ...]:
        """The layouts of operands or results when each axis puts them in these places."""
        return tuple(
            None
            if item is None
            else tuple(
                self._layout(t, [axis[i][j] for axis in places])
                for j, t in enumerate(item)
            )
            if isinstance(item, tuple)
            else self._layout(item, [axis[i] for axis in places])
            for i, item in enumerate(tensors)
        )

    def _layout(self, tensor: BoundTensor, places: Sequence[AxisUse]) -> Layout:
        dim_axes: list[list[int]] = [[] for _ in tensor.dims]
        for dim, factors in enumerate(tensor.dims):
            cutting = [axis for axis, place in enumerate(places) if place.dim == dim]
            for factor in factors:
                dim_axes[dim] += [
                    axis for axis in self.orders.get(factor, []) if axis in cutting
                ]
        placements = placements_of(
            dim_axes, [place.op for place in places], self.mesh.mesh_shape
        )
        return Layout.from_device_mesh(self.mesh)(list(placements)).bind(
            len(tensor.dims)
        )


class _Call:
    """One call while its axes are decided."""

    def __init__(
        self, bound: BoundRule, layouts: Sequence[Any], itemsizes: Sequence[int] | None
    ) -> None:
        self._bound = bound
        self._tensors = _pairs(bound.operands, layouts)
        self._sizes = (
            list(itemsizes) if itemsizes is not None else [4] * len(self._tensors)
        )
        self.mesh = _one_mesh(bound, [layout for _, layout in self._tensors])
        self._places = [_places(layout) for _, layout in self._tensors]
        start = (0,) * self.mesh.ndim
        shards = (
            layout.local_shape(tensor.shape, start) for tensor, layout in self._tensors
        )
        self._nbytes = [
            math.prod(shape) * size
            for shape, size in zip(shards, self._sizes, strict=True)
        ]

    @property
    def first(self) -> Layout:
        """How the first operand lies."""
        return self._tensors[0][1]

    def choose(self, inplace: bool) -> list[Choice] | None:
        """What each axis does. Axes that cut one factor together must cut it alike in every tensor."""
        chosen: list[Choice] = []
        choices = self._bound.choices()
        for axis in range(self.mesh.ndim):
            allowed = [c for c in choices if not inplace or self._stays(axis, c)]
            ranked = sorted(allowed, key=lambda choice: self._cost(axis, choice))
            found = next(
                (choice for choice in ranked if self._fits([*chosen, choice])), None
            )
            if found is None:
                return None
            chosen.append(found)
        return chosen

    def _stays(self, axis: int, choice: Choice) -> bool:
        return choice.operands[0] == choice.results[0] == self._places[0][axis]

    def orders(self, chosen: Sequence[Choice]) -> dict[str, list[int]]:
        """For each factor the axes that cut it, outermost first: as an operand has it already, else as the mesh has."""
        factors = {choice.factor for choice in chosen if choice.factor is not None}
        return {
            name: self._order(
                name, [a for a, c in enumerate(chosen) if c.factor == name]
            )
            for name in factors
        }

    def _order(self, factor: str, axes: list[int]) -> list[int]:
        for tensor, layout in self._tensors:
            dim = tensor.find(factor)
            if dim is not None and sorted(layout.dim_axes[dim]) == axes:
                return list(layout.dim_axes[dim])
        return axes

    def _fits(self, chosen: Sequence[Choice]) -> bool:
        if not all(
            commute(p.op for p in places)
            for places in zip(*(_flat(c.results) for c in chosen), strict=True)
        ):
            return False  # reductions that do not commute
        shape = self.mesh.mesh_shape
        return all(
            self._bound.fits(f, *(shape[a] for a in axes))
            for f, axes in self.orders(chosen).items()
        )

    def _cost(self, axis: int, choice: Choice) -> tuple[int, int, int]:
        """(bytes moved, operands changed, dims cut again) to put every operand where the choice wants it on an axis."""
        nbytes = changed = nested = 0
        ranks = self.mesh.mesh_shape[axis]
        for number, place in enumerate(_flat(choice.operands)):
            have = self._places[number][axis]
            if have is not place and have != place:
                nbytes += _moved(have, place, self._nbytes[number], ranks)
                changed += 1
                nested += place.dim is not None and bool(
                    self._tensors[number][1].dim_axes[place.dim]
                )
        return nbytes, changed, nested


def _moved(have: AxisUse, want: AxisUse, local: int, ranks: int) -> int:
    """The bytes that a rank receives to go from one placement to another along an axis.

    A reduction counts the same whether its result is cut or not: what one operator cuts the next mostly gathers again,
    and a chain of operators that each take the cheapest step for themselves would move weights for it.
    """
    share = -(-local // ranks) * (ranks - 1)
    if have.op is not None:
        return 2 * share
    if have.dim is not None:
        return share if want.dim is not None else local * (ranks - 1)
    return 0


@functools.lru_cache(maxsize=4096)
def _places(layout: Layout) -> tuple[AxisUse, ...]:
    """A layout's placement on every axis, in the rule's words."""
    dims = {axis: dim for dim, axes in enumerate(layout.dim_axes) for axis in axes}
    return tuple(AxisUse(dims.get(axis), op) for axis, op in enumerate(layout.partial))


def _flat(places: Any) -> list[Any]:
    return [
        p
        for item in places
        if item is not None
        for p in (item if isinstance(item, tuple) else (item,))
    ]


def _pairs(tensors: Any, layouts: Sequence[Any]) -> list[tuple[BoundTensor, Layout]]:
    return [
        pair
        for item, given in zip(tensors, layouts, strict=True)
        if item is not None
        for pair in (
            zip(item, given, strict=True)
            if isinstance(item, tuple)
            else [(item, given)]
        )
    ]


def _checked(bound: BoundRule, layouts: Sequence[Any]) -> list[Any]:
    """The layouts, bound to the operands' numbers of dims."""
    found: list[Any] = []
    for item, given in zip(bound.operands, layouts, strict=True):
        if isinstance(item, tuple):
            found.append(
                tuple(one.bind(len(t.dims)) for t, one in zip(item, given, strict=True))
            )
        else:
            found.append(None if item is None else given.bind(len(item.dims)))
    return found


def _one_mesh(bound: BoundRule, layouts: Sequence[Layout]) -> Any:
    meshes = {layout.mesh for layout in layouts}
    if len(meshes) != 1:
        bound.rule.require(
            False,
            f"the operands must lie on one mesh, they lie on {sorted(map(str, meshes))}",
        )
    return next(iter(meshes))


def _summed_axes(operands: Any, places: Sequence[Any]) -> tuple[Any, ...]:
    """For each operand the axes on which every rank gets a part of the gradient."""

    def axes_of(at: Any) -> tuple[int, ...]:
        return tuple(
            axis for axis, choice in enumerate(places) if at(choice).op == "sum"
        )

    return tuple(
        None
        if item is None
        else tuple(
            axes_of(lambda choice, i=i, j=j: choice[i][j]) for j in range(len(item))
        )
        if isinstance(item, tuple)
        else axes_of(lambda choice, i=i: choice[i])
        for i, item in enumerate(operands)
    )
