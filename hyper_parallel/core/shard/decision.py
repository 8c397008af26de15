# SPDX-License-Identifier: Apache-2.0
"""Decides what a call on distributed tensors will do: a value that can be printed, without running the call.

    print(decide(torch.matmul, x, w))

    matmul: '... m k, k n -> ... n'
      operand 0: (8, 16) [S(1)]
      operand 1: (16, 4) [R] -> [S(0)], 0 bytes
      result 0:  (8, 4) [P]

Nothing here communicates, computes or warns; ``_op_dispatch`` compiles a decision into a function and runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.redistribution import plan as plan_redistribution
from hyper_parallel.core.dtensor.spec import waits_for_value
from hyper_parallel.core.shard.arguments import flat, one_mesh, tensors_in
from hyper_parallel.core.shard.execution import Move, Run
from hyper_parallel.core.shard.irregular import keep_irregular, regular_layouts
from hyper_parallel.core.shard.ops.operator import (
    OPERATORS,
    Operator,
    RuleForCall,
    UnruledCall,
)
from hyper_parallel.core.shard.propagate import OpPlan, propagate
from hyper_parallel.core.shard.reshaped import SHAPE_CHANGES
from hyper_parallel.core.shard.rule import BoundRule, Rule
from hyper_parallel.core.shard.section_views import find_section_view
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import prefixed
from hyper_parallel.platform.platform import OpName

platform = get_platform()


class Way(Enum):
    """How a call is run."""

    RULE = "by its rule"
    COMPOSITE = "by other operators"
    DIRECT = "by itself"
    SECTIONS = "section by section"
    WHOLE = "on whole tensors"
    OUT = "by the same operator, then copied into out="
    REDUCE_FIRST = "on the values of operands whose reductions are pending"
    COPY_BACK = "beside its target, then copied back into it"
    RESHAPE = "on the shard, which takes another shape"


@dataclass(frozen=True)
class Decision:
    """What one call will do."""

    name: OpName
    way: Way
    inplace: bool = False
    op: Operator | None = None
    handler: Callable[..., Any] | None = None  # of a composite
    view: Run | None = None  # of a view along the borders of sections
    reason: str = ""  # why there is no rule
    rule: str = ""
    bound: BoundRule | None = None
    plan: OpPlan | None = None
    moves: tuple[Move, ...] = ()  # what each tensor must become
    tensors: tuple[tuple[Layout, tuple[int, ...], int], ...] = ()  # with their itemsize

    @property
    def text(self) -> str:
        """Its rule, if it has one, else how it is run."""
        return self.rule or self.way.value

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        reason = f" ({self.reason})" if self.reason else ""
        yield f"{self.name.name}: {repr(self.rule) if self.rule else self.text}{reason}"
        if self.way is not Way.RULE or self.plan is None:
            return
        for number, move in enumerate(self.moves):
            layout, shape, itemsize = self.tensors[number]
            yield f"  operand {number}: {shape} {_placed(layout)}{_moved(layout, shape, itemsize, move)}"
        pairs = zip(flat(self.plan.results), _flat_shapes(self.plan), strict=True)
        for number, (layout, shape) in enumerate(pairs):
            yield f"  result {number}:  {tuple(shape)} {_placed(layout)}"


def _placed(layout: Layout) -> str:
    return f"[{', '.join(map(str, layout.placements))}]"


def _moved(layout: Layout, shape: Any, itemsize: int, move: Move) -> str:
    if move is None:
        return ""
    target, summed = move
    parts = []
    if target is not layout:
        steps = plan_redistribution(layout, target, shape, itemsize)
        parts.append(f" -> {_placed(target)}, {steps.nbytes} bytes")
    if summed:
        names = ", ".join(layout.alias_name[axis] for axis in summed)
        parts.append(f", gradient summed over {names}")
    return "".join(parts)


def _flat_shapes(plan: OpPlan) -> list[Any]:
    shapes: list[Any] = []
    for shape, layout in zip(plan.shapes, plan.results, strict=True):
        shapes += shape if isinstance(layout, tuple) else [shape]
    return shapes


def decide_call(
    name: OpName, tensors: Sequence[DTensor], args: Any, kwargs: Mapping[str, Any]
) -> Decision:
    """What an operator will do with these arguments, among which are these distributed tensors."""
    if kwargs.get("out") is not None:
        return Decision(name, Way.OUT)
    op = OPERATORS.get(name.name)
    inplace = name.inplace or kwargs.get("inplace") is True
    way = _way_before_rules(name, op, tensors, inplace)
    if way is not None:
        return Decision(name, way, inplace, op)
    if op is None:
        one_mesh(name.name, tensors)
        return Decision(name, Way.WHOLE, inplace, reason="it is in no table")
    if op.direct is not None or op.handler is not None:
        way = Way.DIRECT if op.direct is not None else Way.COMPOSITE
        return Decision(name, way, inplace, op, op.handler)
    return _decide_by_row(name, op, tensors, args, kwargs, inplace)


def _decide_by_row(
    name: OpName,
    op: Operator,
    tensors: Sequence[DTensor],
    args: Any,
    kwargs: Mapping[str, Any],
    inplace: bool,
) -> Decision:
    """By the rule in the operator's row, or on whole tensors if it has none for this call."""
    one_mesh(name.name, tensors)
    reason = ""
    try:
        return _decide_by_rule(name, op, tensors, args, kwargs, inplace)
    except UnruledCall as why:
        reason = str(why)
    except ValueError:
        # A rule may name a dim of a tensor that has none.
        if any(tensor._shape for tensor in tensors):
            raise
    return Decision(name, Way.WHOLE, inplace, op, reason=reason)


def _way_before_rules(
    name: OpName, op: Operator | None, tensors: Sequence[DTensor], inplace: bool
) -> Way | None:
    """The way of a call that changes a shape in place, or whose pending reductions are taken first."""
    if name.inplace and name.name in SHAPE_CHANGES:
        return Way.RESHAPE
    others = tensors[1:] if inplace else tensors
    if any(map(waits_for_value, others)):
        return Way.REDUCE_FIRST
    has_function = op is not None and (op.direct or op.handler) is not None
    if inplace and not has_function and waits_for_value(tensors[0]):
        return Way.COPY_BACK
    return None


def _decide_by_rule(
    name: OpName,
    op: Operator,
    tensors: Sequence[DTensor],
    args: Any,
    kwargs: Mapping[str, Any],
    inplace: bool,
) -> Decision:
    arguments = op.arguments(name, args, platform.canonical_kwargs(kwargs))
    ruled = op.rule if isinstance(op.rule, Rule) else op.rule(**arguments)  # type: ignore[misc]
    if callable(ruled):
        return Decision(name, Way.COMPOSITE, inplace, op, ruled)
    bound, operands = bind_call(op, name, arguments, ruled)
    view = None if inplace else find_section_view(name, bound, arguments)
    if view is not None:
        return Decision(name, Way.SECTIONS, inplace, op, view=view)
    text = (ruled.rule if isinstance(ruled, RuleForCall) else ruled).text
    plan = _find_plan(op, bound, operands, inplace)
    if plan is None:
        return Decision(name, Way.COPY_BACK, inplace, op, rule=text)
    moves = find_moves(tensors, operands, plan)
    facts = tuple(
        (t._layout, tuple(t._shape), platform.get_element_size(t._local))
        for t in tensors
    )
    return Decision(
        name,
        Way.RULE,
        inplace,
        op,
        rule=text,
        bound=bound,
        plan=plan,
        moves=tuple(moves),
        tensors=facts,
    )


def _find_plan(
    op: Operator, bound: BoundRule, operands: Sequence[Any], inplace: bool
) -> OpPlan | None:
    """The plan for these operands; None if the target of a change in place would have to move."""
    if inplace and op.local is not None:
        return None  # a local call of its own makes a new tensor
    layouts = _layouts(operands)
    itemsizes = [platform.get_element_size(t._local) for t in flat(operands)]
    plan = propagate(bound, regular_layouts(layouts), itemsizes, inplace=inplace)
    return keep_irregular(op, bound, plan, layouts, inplace)


def bind_call(
    op: Operator, name: OpName, arguments: dict[str, Any], ruled: Any
) -> tuple[BoundRule, list[Any]]:
    """The rule, bound to this call, and its operands: a DTensor, a list of them, or None."""
    if ruled is None:
        raise UnruledCall("there is none for these arguments")
    if isinstance(ruled, Rule):
        ruled = RuleForCall(ruled)
    count = len(ruled.rule.notation.operands)
    given = (
        ruled.operands
        if ruled.operands is not None
        else [arguments.get(parameter) for parameter in op.parameters[:count]]
    )
    for value in given:
        _check_list(value)
    numbers = [i for i, value in enumerate(given) if isinstance(value, _NUMBERS)]
    operands = [
        value if isinstance(value, (DTensor, list, tuple)) else None for value in given
    ]
    try:
        return ruled.rule.bind(
            [_shape(v) for v in operands], {**arguments, **ruled.attrs}, numbers
        ), operands
    except ValueError as error:
        raise prefixed(name.name, error, ValueError) from None


_NUMBERS = (bool, int, float, complex)


def _check_list(value: Any) -> None:
    if isinstance(value, (list, tuple)):
        for entry in value:
            if not isinstance(entry, DTensor):
                raise UnruledCall(
                    "a list among its operands holds something that is no tensor"
                )


def _shape(operand: Any) -> Any:
    if operand is None:
        return None
    return (
        [tuple(t._shape) for t in operand]
        if isinstance(operand, (list, tuple))
        else tuple(operand._shape)
    )


def _layouts(operands: Sequence[Any]) -> list[Any]:
    return [
        None
        if value is None
        else tuple(t._layout for t in value)
        if isinstance(value, (list, tuple))
        else value._layout
        for value in operands
    ]


def find_moves(
    tensors: Sequence[DTensor], operands: Sequence[Any], made: OpPlan
) -> list[Move]:
    """What each tensor must become, in the order of the arguments; None where its shard is taken as it is."""
    waiting = list(
        zip(flat(operands), flat(made.operands), _routes(operands, made), strict=True)
    )
    moves: list[Move] = []
    for tensor in tensors:
        index = next(
            (i for i, (operand, _, _) in enumerate(waiting) if operand is tensor), None
        )
        if index is None:
            raise UnruledCall(
                "a tensor among its arguments is not an operand of the rule"
            )
        _, layout, summed = waiting.pop(index)
        moves.append(
            None if layout is tensor._layout and not summed else (layout, tuple(summed))
        )
    return moves


def _routes(operands: Sequence[Any], made: OpPlan) -> Iterator[Any]:
    for operand, axes in zip(operands, made.routes, strict=True):
        if isinstance(operand, (list, tuple)):
            yield from axes
        elif operand is not None:
            yield axes


def decide(func: Any, *args: Any, **kwargs: Any) -> Decision:
    """What ``func(*args, **kwargs)`` will do, with distributed tensors among the arguments; nothing is run."""
    tensors = [one for one in tensors_in((args, kwargs)) if isinstance(one, DTensor)]
    return decide_call(platform.op_name_of(func), tensors, args, kwargs)
