# SPDX-License-Identifier: Apache-2.0
"""The one path that every operator on distributed tensors takes: key, plan, shards, local call, result.

A plan is made once for each operator, layouts and shapes of its tensors, and other arguments. A call that was seen
before builds its key, looks the plan up, takes the shards, calls, wraps.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hyper_parallel.core.dtensor.copied_views import remember_base
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.modes import MODES
from hyper_parallel.core.shard import ops  # noqa: F401 - fills the tables
from hyper_parallel.core.shard.arguments import (
    OperatorError,
    PlainTensorError,
    changes_plain,
    describe,
    distributed,
    on_shards,
    one_mesh,
    with_values,
)
from hyper_parallel.core.shard.decision import Decision, Way, decide_call
from hyper_parallel.core.shard.execution import (
    Composite,
    CopyBack,
    OnWholeTensors,
    Ordered,
    OutArgument,
    Overridable,
    Planned,
    RawHandler,
    Reduced,
    Run,
    fast,
)
from hyper_parallel.core.shard.irregular import (
    accept_irregular,
)
from hyper_parallel.core.shard.ops.operator import (
    ON_CHANGE,
    OPERATORS,
)
from hyper_parallel.core.shard.ops.pointwise import itself
from hyper_parallel.core.shard.reshaped import Reshaped
from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.caller import users_level
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import OpName

platform = get_platform()

MOST_PLANS = 1 << 16


class Dispatcher:
    """Runs operators by their rules and remembers the plans."""

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], Run] = {}
        self._warned: set[str] = set()  # the operators about which the user was told
        self.on_decision: Callable[[Decision], None] | None = None  # gets every new one

    def dispatch(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        called: OpName | None = None,
    ) -> Any:
        """``func(*args, **kwargs)``, with distributed tensors among the arguments."""
        if MODES.skip is not None:
            name = (called or platform.op_name_of(func)).name
            if name not in MODES.skip:
                return on_shards(func, args, kwargs)
        tensors: list[DTensor] = []
        try:
            key = _make_key(func, args, kwargs, tensors)
        except PlainTensorError:
            called = called or platform.op_name_of(func)
            return self._with_plain(func, args, kwargs, called)
        try:
            run = self._plans.get(key)
        except TypeError:  # an argument that cannot be a key, such as an array
            called = called or platform.op_name_of(func)
            run = self._plan(func, called, tensors, args, kwargs)
        if run is None:
            called = called or platform.op_name_of(func)
            run = self._plan(func, called, tensors, args, kwargs)
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[key] = run
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
                or one._lost_view_of is None
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
            if self.on_decision is not None:
                self.on_decision(Decision(called, Way.DIRECT, op=op))
            return RawHandler(op.direct, func).run([], args, kwargs)
        if called.inplace and changes_plain(args, kwargs):
            return func(*with_values(tuple(args)), **with_values(dict(kwargs)))
        how = MODES.overrides.get(called.name)
        place = how.place_plain if how is not None else None
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
        decision = decide_call(called, tensors, args, kwargs)
        if self.on_decision is not None:
            self.on_decision(decision)
        return self._compile(decision, func, tensors, args, kwargs)

    def _compile(
        self,
        decision: Decision,
        func: Any,
        tensors: Sequence[DTensor],
        args: Any,
        kwargs: Any,
    ) -> Run:
        """The function that does what was decided, for calls with arguments like these."""
        called, way, inplace = decision.name, decision.way, decision.inplace
        if way is Way.RULE:
            run = self._compile_rule(decision, func, tensors, args, kwargs)
            op = decision.op
            if op is not None and op.overridable:
                return Overridable(run, called, op).run
            return run
        if way is Way.WHOLE:
            return self._compile_whole(decision, func, tensors)
        if way in (Way.DIRECT, Way.COMPOSITE):
            return self._compile_function(decision, func, tensors)
        if way is Way.SECTIONS:
            assert decision.view is not None
            return decision.view
        others: dict[Way, Any] = {
            Way.OUT: OutArgument(self.dispatch, func, called),
            Way.REDUCE_FIRST: Reduced(self.dispatch, func, called, inplace),
            Way.COPY_BACK: CopyBack(self.dispatch, called),
            Way.RESHAPE: Reshaped(self.dispatch, func, called.name),
        }
        run_other: Run = others[way].run
        return run_other

    def _compile_rule(
        self,
        decision: Decision,
        func: Any,
        tensors: Sequence[DTensor],
        args: Any,
        kwargs: Any,
    ) -> Run:
        called, op, plan = decision.name, decision.op, decision.plan
        bound, inplace = decision.bound, decision.inplace
        assert op is not None
        assert plan is not None
        assert bound is not None
        here = None
        if op.local is not None:
            mesh = tensors[0].device_mesh
            place = mesh.own_coordinate(called.name)
            function = _function(func, called.name)
            here = ShardContext(bound, plan, mesh.mesh_shape, place, function)
        planned = Planned(func, called, op, plan, here).bind(
            decision.moves, tensors, args, kwargs, inplace
        )
        if all(choice.kind != "order" for choice in plan.choices):
            return planned
        if inplace:
            otherwise = CopyBack(self.dispatch, called).run
        else:
            otherwise = Reduced(self.dispatch, func, called, inplace, of_all=True).run
        return Ordered(planned, otherwise, bound.rule.finite).run

    def _compile_function(
        self, decision: Decision, func: Any, tensors: Sequence[DTensor]
    ) -> Run:
        """The call by a function of the table."""
        op = decision.op
        assert op is not None
        if decision.handler is None:
            assert op.direct is not None
            run = RawHandler(op.direct, func).run
        else:
            run = Composite(op, decision.name, decision.handler).run
        if decision.handler is itself:
            return run
        return accept_irregular(decision.name, run, tensors)

    def _compile_whole(
        self, decision: Decision, func: Any, tensors: Sequence[DTensor]
    ) -> Run:
        name = decision.name.name
        mesh = one_mesh(name, tensors)
        # There is nothing to shard in tensors without dims.
        scalars = not any(tensor._shape for tensor in tensors)
        if not scalars:
            self._tell(name, decision.reason)
        return OnWholeTensors(func, decision.name, mesh, decision.inplace, scalars).run

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


def _make_key(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: list[DTensor]
) -> tuple[Any, ...]:
    """What a plan depends on; adds the distributed tensors among the arguments to ``tensors``."""
    key: list[Any] = [func]
    for value in args:
        is_known = type(value) is DTensor and value._spec is not None
        if is_known and not value._unrecorded:
            key.append(value._spec)
            tensors.append(value)
        else:
            describe((value,), key, tensors)
    if kwargs:
        key += kwargs
        describe(kwargs.values(), key, tensors)
    return tuple(key)


def _function(func: Any, name: str) -> Any:
    """The operator of the framework, which changes nothing in place; else the function that was called."""
    try:
        return platform.operator(name)
    except AttributeError:
        return func


_OP_DISPATCHER = Dispatcher()
ON_CHANGE.append(_OP_DISPATCHER.forget)
if fast is not None:
    DTensor.install_fast_dispatch(
        functools.partial(fast.Dispatch, plans=_OP_DISPATCHER._plans, modes=MODES)
    )
