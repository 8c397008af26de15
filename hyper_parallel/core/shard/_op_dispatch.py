# SPDX-License-Identifier: Apache-2.0
"""The one path that every operator on distributed tensors takes: key, plan, shards, local call, result.

A plan is made once for each operator, layouts and shapes of its tensors, and other arguments. A call that was seen
before builds its key, looks the plan up, takes the shards, calls, wraps.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hyper_parallel.core.dtensor.copied_views import remember_base
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.modes import MODES
from hyper_parallel.core.dtensor.spec import waits_for_value
from hyper_parallel.core.shard import ops  # noqa: F401 - fills the tables
from hyper_parallel.core.shard.arguments import (
    OperatorError,
    PlainTensorError,
    changes_plain,
    describe,
    distributed,
    flat,
    on_shards,
    one_mesh,
    with_values,
)
from hyper_parallel.core.shard.execution import (
    Back,
    Direct,
    Handled,
    Into,
    Move,
    Ordered,
    Planned,
    Reduced,
    Run,
    Whole,
    fast,
)
from hyper_parallel.core.shard.irregular import (
    accept_irregular,
    keep_irregular,
    regular_layouts,
)
from hyper_parallel.core.shard.ops.operator import (
    ON_CHANGE,
    OPERATORS,
    Operator,
    Ruled,
    Unruled,
)
from hyper_parallel.core.shard.ops.pointwise import itself
from hyper_parallel.core.shard.propagate import OpPlan, propagate
from hyper_parallel.core.shard.reshaped import SHAPE_CHANGES, Reshaped
from hyper_parallel.core.shard.rule import BoundRule, Rule
from hyper_parallel.core.shard.section_views import find_section_view
from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.caller import users_level
from hyper_parallel.platform.error_codes import coded, prefixed
from hyper_parallel.platform.platform import OpName

platform = get_platform()

MOST_PLANS = 1 << 16


class Dispatcher:
    """Runs operators by their rules and remembers the plans."""

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], Run] = {}
        self._warned: set[str] = set()  # the operators about which the user was told
        self.on_plan: Callable[[str, str], None] | None = (
            None  # told of every new plan: the operator, its way
        )

    def dispatch(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        called: OpName | None = None,
    ) -> Any:
        """``func(*args, **kwargs)``, with distributed tensors among the arguments."""
        if (
            MODES.skip is not None
            and (called or platform.op_name_of(func)).name not in MODES.skip
        ):
            return on_shards(func, args, kwargs)
        key: list[Any] = [func]
        tensors: list[DTensor] = []
        try:
            for value in args:
                if (
                    type(value) is DTensor
                    and value._spec is not None
                    and not value._unrecorded
                ):
                    key.append(value._spec)
                    tensors.append(value)
                else:
                    describe((value,), key, tensors)
            if kwargs:
                key += kwargs
                describe(kwargs.values(), key, tensors)
        except PlainTensorError:
            return self._with_plain(
                func, args, kwargs, called or platform.op_name_of(func)
            )
        try:
            run = self._plans.get(tuple(key))
        except TypeError:  # an argument that cannot be a key, such as an array
            run = self._plan(
                func, called or platform.op_name_of(func), tensors, args, kwargs
            )
        if run is None:
            run = self._plan(
                func, called or platform.op_name_of(func), tensors, args, kwargs
            )
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[tuple(key)] = run
        result = run(tensors, args, kwargs)
        if isinstance(result, (DTensor, tuple, list)):
            self._follow(result, tensors, func, args, kwargs, called)
        return result

    def _follow(
        self,
        result: Any,
        tensors: list[DTensor],
        func: Any,
        args: Any,
        kwargs: Any,
        called: Any,
    ) -> None:
        """Has the results that had to be copies follow the tensor of which they should be views."""
        several = not isinstance(result, DTensor)
        for number, one in enumerate(result if several else (result,)):
            if (
                not isinstance(one, DTensor)
                or one._copy_of is None
                or one._taken is not None
                or one is tensors[0]
            ):
                continue

            def again(number: int = number) -> Any:
                found = self.dispatch(func, args, kwargs, called)
                return found[number] if several else found

            name = (called or platform.op_name_of(func)).name
            op = OPERATORS.get(name)
            remember_base(
                one, tensors[0], name, again, is_view=op is None or op.view is True
            )

    def _with_plain(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], called: OpName
    ) -> Any:
        """The call, where plain tensors are among the arguments too."""
        op = OPERATORS.get(called.name)
        if (
            op is not None
            and op.lists
            and op.direct is not None
            and kwargs.get("out") is None
        ):
            self._planned(called, "by itself")
            return Direct(op.direct, func).run([], args, kwargs)
        if called.inplace and changes_plain(args, kwargs):
            return func(*with_values(tuple(args)), **with_values(dict(kwargs)))
        place = MODES.plain.get(called.name)
        placed = (
            {}
            if op is None or place is None
            else place(**op.arguments(called, args, platform.canonical_kwargs(kwargs)))
        )
        args, kwargs = distributed(
            called.name, args, kwargs, op is not None and op.zeros, placed
        )
        return self.dispatch(func, args, kwargs, called)

    def forget(self) -> None:
        """Drops all plans: a rule has changed."""
        self._plans.clear()

    def _plan(
        self,
        func: Any,
        called: OpName,
        tensors: Sequence[DTensor],
        args: Any,
        kwargs: Any,
    ) -> Run:
        if kwargs.get("out") is not None:
            return Into(self.dispatch, func, called).run
        op = OPERATORS.get(called.name)
        inplace = called.inplace or kwargs.get("inplace") is True
        waiting = self._before_rules(func, called, op, tensors, inplace)
        if waiting is not None:
            return waiting
        reason = "it is in no table"
        scalars = not any(
            tensor._shape for tensor in tensors
        )  # of which there is nothing to cut
        if op is not None:
            if op.direct is not None:
                self._planned(called, "by itself")
                run = Direct(op.direct, func).run
                return accept_irregular(called, run, tensors)
            if op.handler is not None:
                self._planned(called, "by other operators")
                run = Handled(op, called, op.handler).run
                return accept_irregular(called, run, tensors)
            one_mesh(called.name, tensors)
            try:
                return self._ruled(func, called, op, tensors, args, kwargs, inplace)
            except Unruled as why:
                reason = str(why)
            except ValueError:
                if not scalars:  # a dim may be named, and there is none
                    raise
        mesh = one_mesh(called.name, tensors)
        self._planned(called, "on whole tensors")
        if not scalars:
            self._tell(called.name, reason)
        return Whole(func, called, mesh, inplace, scalars).run

    def _before_rules(
        self,
        func: Any,
        called: OpName,
        op: Operator | None,
        tensors: Sequence[DTensor],
        inplace: bool,
    ) -> Run | None:
        """The way of a call that changes the shape in place, or whose pending reductions are taken first; else None."""
        if called.inplace and called.name in SHAPE_CHANGES:
            self._planned(called, "on the shard, which takes another shape")
            return Reshaped(self.dispatch, func, called.name).run
        others = tensors[1:] if inplace else tensors
        if any(map(waits_for_value, others)):
            return Reduced(self.dispatch, func, called, inplace).run
        by_itself = op is not None and (op.direct is not None or op.handler is not None)
        if inplace and not by_itself and waits_for_value(tensors[0]):
            return Back(self.dispatch, called).run
        return None

    def _ruled(
        self,
        func: Any,
        called: OpName,
        op: Operator,
        tensors: Sequence[DTensor],
        args: Any,
        kwargs: Any,
        inplace: bool,
    ) -> Run:
        arguments = op.arguments(called, args, platform.canonical_kwargs(kwargs))
        ruled = op.rule if isinstance(op.rule, Rule) else op.rule(**arguments)  # type: ignore[misc]
        if callable(ruled):
            self._planned(called, "by other operators")
            run = Handled(op, called, ruled).run
            if ruled is itself:
                return run
            return accept_irregular(called, run, tensors)
        bound, operands = bound_call(op, called, arguments, ruled)
        view = None if inplace else find_section_view(called, bound, arguments)
        if view is not None:
            self._planned(called, "section by section")
            return view
        self._planned(called, (ruled.rule if isinstance(ruled, Ruled) else ruled).text)
        layouts, itemsizes = (
            _layouts(operands),
            [platform.get_element_size(t._local) for t in flat(operands)],
        )
        # A local call of its own makes a new tensor, so it cannot change its target.
        regular = regular_layouts(layouts)
        made = (
            None
            if inplace and op.local is not None
            else propagate(bound, regular, itemsizes, inplace=inplace)
        )
        made = keep_irregular(op, bound, made, layouts, inplace)
        if made is None:
            return Back(self.dispatch, called).run
        here = None
        if op.local is not None:
            mesh = tensors[0].device_mesh
            place = mesh.own_coordinate(called.name)
            here = ShardContext(
                bound, made, mesh.mesh_shape, place, _function(func, called.name)
            )
        moves = _moves(tensors, operands, made)
        planned = Planned(func, called, op, made, here).bind(
            moves, tensors, args, kwargs, inplace
        )
        if all(choice.kind != "order" for choice in made.choices):
            return planned
        reduced = Reduced(self.dispatch, func, called, inplace, of_all=True).run
        return Ordered(
            planned,
            Back(self.dispatch, called).run if inplace else reduced,
            bound.rule.finite,
        ).run

    def _planned(self, called: OpName, way: str) -> None:
        if self.on_plan is not None:
            self.on_plan(called.name, way)

    def _tell(self, name: str, reason: str) -> None:
        if MODES.strict:
            raise coded(
                OperatorError,
                "HP303",
                f"{name}: no rule: {reason}; strict mode does not run it on whole tensors. Give it a rule: "
                f'operator("{name}", parameters, rule), or a DistributedOp',
            )
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"{name} has no rule ({reason}): its operands are gathered and it runs on whole tensors on every rank. "
                f'A rule is one line: operator("{name}", parameters, rule); see "how to add an operator"',
                stacklevel=users_level(),
            )


def bound_call(
    op: Operator, called: OpName, arguments: dict[str, Any], ruled: Any
) -> tuple[BoundRule, list[Any]]:
    """The rule, bound to this call, and its operands: a DTensor, a list of them, or None."""
    if ruled is None:
        raise Unruled("there is none for these arguments")
    if isinstance(ruled, Rule):
        ruled = Ruled(ruled)
    count = len(ruled.rule.notation.operands)
    given = (
        ruled.operands
        if ruled.operands is not None
        else [arguments.get(name) for name in op.parameters[:count]]
    )
    for value in given:
        if isinstance(value, (list, tuple)) and not all(
            isinstance(entry, DTensor) for entry in value
        ):
            raise Unruled("a list among its operands holds something that is no tensor")
    numbers = [
        i
        for i, value in enumerate(given)
        if isinstance(value, (bool, int, float, complex))
    ]
    operands = [
        value if isinstance(value, (DTensor, list, tuple)) else None for value in given
    ]
    try:
        return ruled.rule.bind(
            [_shape(v) for v in operands], {**arguments, **ruled.attrs}, numbers
        ), operands
    except ValueError as error:
        raise prefixed(called.name, error, ValueError) from None


def _function(func: Any, name: str) -> Any:
    """The operator of the framework, which changes nothing in place; else the function that was called."""
    try:
        return platform.operator(name)
    except AttributeError:
        return func


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


def _moves(
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
            raise Unruled("a tensor among its arguments is not an operand of the rule")
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


_OP_DISPATCHER = Dispatcher()
ON_CHANGE.append(_OP_DISPATCHER.forget)
if fast is not None:
    DTensor.install_fast_dispatch(
        functools.partial(fast.Dispatch, plans=_OP_DISPATCHER._plans, modes=MODES)
    )
