# SPDX-License-Identifier: Apache-2.0
"""Catches the operator that a call runs on distributed tensors, and evaluates it for one rank after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.modes import SkipDTensorDispatch
from hyper_parallel.core.dtensor.placement_types import Replicate
from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER
from hyper_parallel.core.shard.arguments import flat, replaced, tensors_in
from hyper_parallel.core.shard.decision import bind_call
from hyper_parallel.core.shard.ops.operator import OPERATORS, Operator
from hyper_parallel.core.shard.propagate import plan_for
from hyper_parallel.core.shard.rule import BoundRule, Choice, Rule
from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import OpName
from hyper_parallel.testing.rules.pieces import Mesh


def in_form_of(structure: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """The leaves in lists as long as those of the structure."""
    following = iter(leaves)
    return [
        [next(following) for _ in s]
        if isinstance(s, (list, tuple))
        else next(following)
        for s in structure
    ]


def _index_of(tensor: Any, tensors: Sequence[Any]) -> int:
    return next(i for i, other in enumerate(tensors) if other is tensor)


class _CaughtError(Exception):
    """The call was dispatched."""


@contextmanager
def _catching(calls: list[Any]) -> Iterator[None]:
    def catch(func: Any, args: Any, kwargs: Any, called: OpName | None = None) -> Any:
        calls.append(
            (func, args, kwargs or {}, called or get_platform().op_name_of(func))
        )
        raise _CaughtError

    usual, DTensor.dispatch = DTensor.dispatch, catch  # type: ignore[method-assign]
    _OP_DISPATCHER.dispatch = catch  # type: ignore[method-assign]
    try:
        with SkipDTensorDispatch():  # so that no plan is taken without asking
            yield
    except _CaughtError:
        pass
    finally:
        DTensor.dispatch = usual  # type: ignore[method-assign]
        del _OP_DISPATCHER.dispatch


class CaughtCall:
    """The operator that a call runs, bound to a mesh on which everything is replicated."""

    func: Any
    args: Any
    kwargs: Any
    called: OpName
    op: Operator
    bound: BoundRule

    def __init__(
        self, call: Callable[..., Any], operands: Sequence[Any], mesh_shape: Mesh
    ) -> None:
        platform = get_platform()
        names = tuple(f"axis{i}" for i in range(len(mesh_shape)))
        whole = Layout(mesh_shape, names)([Replicate()] * len(mesh_shape))
        self.mesh = whole.mesh
        tensors = [
            DTensor(platform.tensor(a), whole.bind(a.ndim), a.shape)
            for a in flat(operands)
        ]
        calls: list[Any] = []
        with _catching(calls):
            call(*in_form_of(operands, tensors))
        if not calls:
            raise coded(
                ValueError,
                "HP603",
                "check_rule: the call runs no operator on its operands",
            )
        self.func, self.args, self.kwargs, self.called = calls[0]
        given = self._bind()
        self._match_operands(tensors, flat(given))

    def _bind(self) -> Any:
        """Binds the operator's rule to the call; returns the rule's operands."""
        if self.called.name not in OPERATORS:
            raise coded(
                ValueError, "HP603", f"check_rule: {self.called.name} has no rule"
            )
        self.op = OPERATORS[self.called.name]
        keywords = get_platform().canonical_kwargs(self.kwargs)
        arguments = self.op.arguments(self.called, self.args, keywords)
        ruled: Any = self.op.rule
        if ruled is not None and not isinstance(ruled, Rule):
            ruled = ruled(**arguments)
        if ruled is None or callable(ruled):
            raise coded(
                ValueError,
                "HP603",
                f"check_rule: {self.called.name} has no rule for these arguments",
            )
        self.bound, given = bind_call(self.op, self.called, arguments, ruled)
        return given

    def _match_operands(self, tensors: Sequence[Any], of_rule: Sequence[Any]) -> None:
        """Finds, for each tensor among the arguments, which of our operands and which of the rule's it is."""
        found = list(tensors_in((self.args, self.kwargs)))
        if not all(any(t is one for t in tensors) for one in found):
            raise coded(
                ValueError,
                "HP603",
                f"check_rule: {self.called.name} is given a tensor that is not an operand of the call",
            )
        self.ours = [_index_of(tensor, tensors) for tensor in found]
        self.rules = [_index_of(tensor, of_rule) for tensor in found]
        if len(set(self.ours)) != len(self.ours):
            raise coded(
                ValueError, "HP603", "check_rule: the call must use each operand once"
            )

    def evaluate(
        self, combination: Sequence[Choice], place: Sequence[int], shards: Sequence[Any]
    ) -> list[Any]:
        """The results of the local call on the rank at this place of the mesh."""
        platform = get_platform()
        following = iter(shards)
        args = replaced(self.args, following)
        kwargs = {
            name: replaced(value, following) for name, value in self.kwargs.items()
        }
        func, given = self.func, args
        if self.op.local is not None:
            factors = {
                choice.factor for choice in combination if choice.factor is not None
            }
            orders = {
                name: [a for a, c in enumerate(combination) if c.factor == name]
                for name in factors
            }
            plan = plan_for(self.bound, combination, self.mesh, orders)
            function = platform.operator(self.called.name)
            here = ShardContext(self.bound, plan, self.mesh.mesh_shape, place, function)
            kwargs = self.op.arguments(
                self.called, args, platform.canonical_kwargs(kwargs)
            )
            func, given = self.op.local, (here,)
        is_empty = any(0 in shard.shape for shard in shards)
        found = (
            platform.call_where_empty(func, given, kwargs)
            if is_empty
            else func(*given, **kwargs)
        )
        return flat(found if isinstance(found, (list, tuple)) else [found])
