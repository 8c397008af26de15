# SPDX-License-Identifier: Apache-2.0
"""What operators do to a tensor with an irregular placement: keep it, or redistribute to chunks first.

qkv = linear(x, weight)               weight is FusedShard(0, (16, 8, 8)), so qkv is FusedShard(-1, (16, 8, 8))
qkv.softmax(-1)                       needs Shard(-1), so qkv is redistributed

A call is decided as if every dim were chunked. An operator for which the order of a dim's
elements does not matter then runs on the spans as they are, and all tensors of the call
that have the dim get the same placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.modes import MODES
from hyper_parallel.core.dtensor.placement_types import Shard
from hyper_parallel.core.dtensor.routes import local_for
from hyper_parallel.core.shard.arguments import (
    check_explicit,
    flat,
    refuse_copy,
    replaced,
)
from hyper_parallel.core.shard.binding import flat as bound_tensors
from hyper_parallel.core.shard.execution import Run, copied_back
from hyper_parallel.core.shard.ops.operator import OPERATORS, Operator
from hyper_parallel.core.shard.propagate import OpPlan
from hyper_parallel.core.shard.rule import BoundRule
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import OpName

platform = get_platform()


def regular_layouts(layouts: Sequence[Any]) -> list[Any]:
    """The layouts of operands with every sharded dim chunked."""
    regular: list[Any] = []
    for layout in layouts:
        if isinstance(layout, tuple):
            regular.append(tuple(one.regular() for one in layout))
        else:
            regular.append(layout and layout.regular())
    return regular


# --- placements that stay


def keep_irregular(
    op: Operator,
    bound: BoundRule,
    plan: OpPlan | None,
    layouts: Sequence[Any],
    inplace: bool,
) -> OpPlan | None:
    """The plan with irregular placements where they can stay.

    None if the call changes its first operand in place and that would have to move.
    """
    given = flat(layouts)
    if plan is None or all(layout.is_regular for layout in given):
        return plan
    if op.local is None or op.order_free:
        pairs = list(zip(bound_tensors(bound.operands), given, strict=True))
        kept = _find_kept(bound, plan, pairs[:1] if inplace else pairs)
        plan = replace(
            plan,
            operands=_place(bound.operands, plan.operands, plan, kept),
            results=_place(bound.results, plan.results, plan, kept),
            irregular=kept,
        )
    if inplace and flat(plan.operands)[0] is not given[0]:
        return None
    return plan


def _find_kept(
    bound: BoundRule, plan: OpPlan, pairs: Sequence[tuple[Any, Layout]]
) -> dict[str, Shard]:
    """For each factor that can keep one, the irregular placement of the first operand that has one."""
    kept: dict[str, Shard] = {}
    for tensor, layout in pairs:
        for axis, placement in layout.irregular.items():
            name = plan.choices[axis].factor
            if name is None or tensor.dims[placement.dim] != (name,):
                continue
            if name not in kept and _is_order_free(bound, plan, name):
                kept[name] = placement
    return kept


def _is_order_free(bound: BoundRule, plan: OpPlan, name: str) -> bool:
    """Whether the order of a factor's elements is irrelevant: it is a dim by itself, sharded by one axis."""
    factor = bound.factor(name)
    if factor.looked_up or len(plan.orders[name]) != 1:
        return False
    if not factor.kept and bound.rule.reduce == "avg":
        return False  # ranks would have to hold equally many elements
    tensors = bound_tensors((*bound.operands, *bound.results))
    dims = [dim for tensor in tensors for dim in tensor.dims if name in dim]
    return all(dim == (name,) for dim in dims)


def _place(tensors: Any, layouts: Any, plan: OpPlan, kept: dict[str, Shard]) -> Any:
    """The layouts with the kept placements on the dims of their factors."""
    if isinstance(layouts, tuple):
        pairs = zip(tensors, layouts, strict=True)
        return tuple(_place(tensor, layout, plan, kept) for tensor, layout in pairs)
    if layouts is None or not kept:
        return layouts
    placements = list(layouts.placements)
    for name, placement in kept.items():
        dim = tensors.find(name)
        if dim is not None:
            [axis] = plan.orders[name]
            placements[axis] = replace(placement, dim=dim)
    return layouts.with_placements(placements)


# --- redistributed first


def accept_irregular(called: OpName, run: Run, tensors: Sequence[DTensor]) -> Run:
    """A way to run a call that may only know chunked dims, for these tensors."""
    if all(tensor._layout.is_regular for tensor in tensors):
        return run
    op = OPERATORS.get(called.name)
    if op is not None and (op.any_layout or op.lists):  # lists go shard by shard
        return run
    return OnRegular(called, run).run


class OnRegular:
    """A call on tensors redistributed to chunks; what it changes in them is brought back."""

    def __init__(self, called: OpName, run: Run) -> None:
        self._called, self._run = called, run

    def run(self, tensors: list[DTensor], args: Any, kwargs: Any) -> Any:
        """The operator on these arguments."""
        changes = self._changes_first(kwargs)
        if changes:
            refuse_copy(self._called.name, tensors[0])
        given = [self._as_regular(i, tensor) for i, tensor in enumerate(tensors)]
        before = [platform.version_of(tensor._local) for tensor in given]
        if not changes:
            self._mark_copies(tensors, given)
        following = iter(given)
        args = replaced(args, following)
        kwargs = {name: replaced(value, following) for name, value in kwargs.items()}
        result = self._run(given, args, kwargs)
        for tensor, regular, version in zip(tensors, given, before, strict=True):
            now = platform.version_of(regular._local)
            changed = changes if version is None else now != version
            if regular is not tensor and changed:
                refuse_copy(self._called.name, tensor)
                copied_back(tensor, regular)
            result = tensor if result is regular else result
        return result

    def _changes_first(self, kwargs: Any) -> bool:
        """Whether the call changes its first operand in place."""
        is_inplace = self._called.inplace or kwargs.get("inplace") is True
        return is_inplace or self._called.name == "setitem"

    def _mark_copies(self, tensors: list[DTensor], regular: list[DTensor]) -> None:
        """Says of each copy in a regular layout that a view of it would not be one of the tensor."""
        for tensor, copy in zip(tensors, regular, strict=True):
            if copy is not tensor:
                copy._lost_view_of = self._called.name

    def _as_regular(self, number: int, tensor: DTensor) -> DTensor:
        if tensor._layout.is_regular:
            return tensor
        layout = tensor._layout.regular()
        if MODES.explicit:
            check_explicit(self._called.name, tensor, number, layout)
        return DTensor(local_for(tensor, layout), layout, tensor._shape)
