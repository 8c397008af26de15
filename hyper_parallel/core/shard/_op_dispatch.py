# SPDX-License-Identifier: Apache-2.0
"""The one path that every operator on distributed tensors takes: key, plan, shards, local call, result.

A plan is made once for each operator, layouts and shapes of its tensors, and other arguments. A call that was seen
before builds its key, looks the plan up, takes the shards, calls, wraps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.modes import MODES
from hyper_parallel.core.dtensor.placement_types import Replicate
from hyper_parallel.core.dtensor.redistribution import plan as plan_redistribution
from hyper_parallel.core.dtensor.routes import local_for
from hyper_parallel.core.shard.here import Here
from hyper_parallel.core.shard.ops.operator import OPERATORS, Operator, Ruled, Unruled
from hyper_parallel.core.shard.propagate import OpPlan, propagate
from hyper_parallel.core.shard.rule import BoundRule, Rule
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Called

platform = get_platform()
Tensor = platform.Tensor

MOST_PLANS = 1 << 16
INFINITE = (float("inf"), float("-inf"))


class OperatorError(TypeError):
    """An operator that cannot be run on these distributed tensors."""


class _Plain(Exception):
    """A plain tensor is among the arguments."""


class Dispatcher:
    """Runs operators by their rules and remembers the plans."""

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._warned: set[str] = set()

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], called: Called | None = None) -> Any:
        """``func(*args, **kwargs)``, with distributed tensors among the arguments."""
        if MODES.skip is not None and (called or platform.called(func)).name not in MODES.skip:
            return _on_shards(func, args, kwargs)
        key: list[Any] = [func]
        tensors: list[DTensor] = []
        try:
            _describe(args, key, tensors)
            if kwargs:
                for name, value in kwargs.items():
                    key.append(name)
                    _describe((value,), key, tensors)
            run = self._plans.get(tuple(key))
        except _Plain:
            args, kwargs = _distributed(called or platform.called(func), args, kwargs)
            return self.dispatch(func, args, kwargs, called)
        except TypeError as error:
            if "unhashable" not in str(error):
                raise
            return self._plan(func, called or platform.called(func), tensors, args, kwargs)(tensors, args, kwargs)
        if run is None:
            run = self._plan(func, called or platform.called(func), tensors, args, kwargs)
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[tuple(key)] = run
        return run(tensors, args, kwargs)

    def forget(self) -> None:
        """Drops all plans; needed when a rule is changed."""
        self._plans.clear()

    # --- making a plan

    def _plan(
        self, func: Any, called: Called, tensors: Sequence[DTensor], args: Any, kwargs: Any
    ) -> Callable[..., Any]:
        inplace = called.inplace or kwargs.get("inplace") is True
        if kwargs.get("out") is not None:
            return _Into(self, func, called).run
        op = OPERATORS.get(called.name)
        try:
            if op is None:
                raise Unruled("it is in no table")
            if op.handler is not None:
                return _Handled(op, called, op.handler).run
            return self._ruled(func, called, op, tensors, args, kwargs, inplace)
        except Unruled as reason:
            self._tell(called.name, str(reason))
            return _Whole(func, called, _one_mesh(called, tensors), inplace).run

    def _ruled(
        self, func: Any, called: Called, op: Operator, tensors: Any, args: Any, kwargs: Any, inplace: bool
    ) -> Callable[..., Any]:
        mesh = _one_mesh(called, tensors)
        arguments = op.arguments(called, args, platform.named(kwargs))
        ruled = op.rule if isinstance(op.rule, Rule) else op.rule(**arguments)  # type: ignore[misc]
        if callable(ruled):
            return _Handled(op, called, ruled).run
        bound, operands = _bound(op, called, arguments, ruled)
        layouts, itemsizes = _layouts(operands), [platform.get_element_size(t._local) for t in _flat(operands)]
        made = None if inplace and op.local is not None else propagate(bound, layouts, itemsizes, inplace=inplace)
        if made is None:
            return _Back(self, func, called).run
        moves = _moves(tensors, operands, made)
        here = None
        if op.local is not None:
            place = mesh.own_coordinate(called.name)
            here = Here(bound, made, mesh.mesh_shape, place, platform.operator(called.name))
        return _Planned(func, called, op, made, moves, here, tensors, inplace).run

    def _tell(self, name: str, reason: str) -> None:
        if MODES.strict:
            raise OperatorError(
                f"{name}: no rule: {reason}; strict mode does not run it on whole tensors. Give it a rule: "
                f'operator("{name}", parameters, rule), or a DistributedOp'
            )
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"{name} has no rule ({reason}): its operands are gathered and it runs on whole tensors on every rank. "
                f'A rule is one line: operator("{name}", parameters, rule); see "how to add an operator"',
                stacklevel=6,
            )


# --- the arguments


def _describe(values: Any, key: list[Any], tensors: list[DTensor]) -> None:
    """Adds to the key what a plan may depend on, and finds the distributed tensors."""
    for value in values:
        kind = type(value)
        if kind is DTensor:
            tensors.append(value)
            local = value._local
            key += (value._layout, value._shape, local.dtype)
        elif kind is float:
            # A number that changes at every step must not make a plan at every step.
            key += (kind, value if value == 0.0 or value in INFINITE else None)
        elif kind is tuple or kind is list:
            key.append(len(value))
            _describe(value, key, tensors)
        elif kind is slice:
            key += (kind, value.start, value.stop, value.step)
        elif isinstance(value, Tensor):
            if not isinstance(value, DTensor):
                raise _Plain
            tensors.append(value)
            key += (value._layout, value._shape, value._local.dtype)
        else:
            key += (kind, value)


def _distributed(called: Called, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments with plain tensors made distributed, where that is allowed."""
    found = list(_tensors((args, kwargs)))
    mesh = next(t for t in found if isinstance(t, DTensor)).device_mesh
    number = iter(range(len(found)))

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        position = next(number)
        if isinstance(value, DTensor):
            return value
        if len(value.shape) and not MODES.replicate_plain:
            raise OperatorError(
                f"{called.name}: tensor {position} among its arguments, of shape {tuple(value.shape)}, is a plain tensor "
                f"among distributed ones on {mesh}. Say how it lies: distribute_tensor(tensor, mesh, placements) or "
                "DTensor.from_local(...); or call it within implicit_replication() if it is the same on every rank"
            )
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim)

    return platform.tree_map(one, tuple(args)), platform.tree_map(one, dict(kwargs))


def _tensors(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


def _on_shards(func: Any, args: Any, kwargs: Any) -> Any:
    def shard(value: Any) -> Any:
        return value._local if isinstance(value, DTensor) else value

    result = func(*platform.tree_map(shard, tuple(args)), **platform.tree_map(shard, dict(kwargs)))
    first = args[0] if args else None
    return first if isinstance(first, DTensor) and result is first._local else result


def _one_mesh(called: Called, tensors: Sequence[DTensor]) -> Any:
    meshes = list(dict.fromkeys(t.device_mesh for t in tensors))
    if len(meshes) != 1:
        raise OperatorError(
            f"{called.name}: its tensors lie on different meshes, {' and '.join(map(str, meshes))}; "
            "from_local(tensor.to_local(), mesh, placements) puts one on another mesh"
        )
    return meshes[0]


# --- from arguments to a plan


def _bound(op: Operator, called: Called, arguments: dict[str, Any], ruled: Any) -> tuple[BoundRule, list[Any]]:
    """The rule, bound to this call, and its operands: a DTensor, a list of them, or None."""
    if ruled is None:
        raise Unruled("there is none for these arguments")
    if isinstance(ruled, Rule):
        ruled = Ruled(ruled)
    count = len(ruled.rule.notation.operands)
    given = ruled.operands if ruled.operands is not None else [arguments.get(name) for name in op.parameters[:count]]
    numbers = [i for i, value in enumerate(given) if isinstance(value, (bool, int, float, complex))]
    operands = [value if isinstance(value, (DTensor, list, tuple)) else None for value in given]
    try:
        bound = ruled.rule.bind([_shape(value) for value in operands], {**arguments, **ruled.attrs}, numbers)
    except ValueError as error:
        raise ValueError(f"{called.name}: {error}") from None
    return bound, operands


def _shape(operand: Any) -> Any:
    if operand is None:
        return None
    return [tuple(t._shape) for t in operand] if isinstance(operand, (list, tuple)) else tuple(operand._shape)


def _layouts(operands: Sequence[Any]) -> list[Any]:
    return [
        None
        if value is None
        else tuple(t._layout for t in value)
        if isinstance(value, (list, tuple))
        else value._layout
        for value in operands
    ]


def _flat(items: Sequence[Any]) -> list[Any]:
    return [x for item in items if item is not None for x in (item if isinstance(item, (list, tuple)) else (item,))]


Move = tuple[Layout, tuple[int, ...]] | None  # the layout asked for, the axes on which the gradient comes in parts


def _moves(tensors: Sequence[DTensor], operands: Sequence[Any], made: OpPlan) -> list[Move]:
    """What each tensor must become, in the order of the arguments; None where its shard is taken as it is."""
    layouts = _flat(made.operands)
    routes = [axes for axes in _flat_routes(operands, made.routes)]
    waiting = list(zip(_flat(operands), layouts, routes, strict=True))
    moves: list[Move] = []
    for tensor in tensors:
        index = next((i for i, (operand, _, _) in enumerate(waiting) if operand is tensor), None)
        if index is None:
            raise Unruled("a tensor among its arguments is not an operand of the rule")
        _, layout, summed = waiting.pop(index)
        moves.append(None if layout is tensor._layout and not summed else (layout, tuple(summed)))
    return moves


def _flat_routes(operands: Sequence[Any], routes: Sequence[Any]) -> Iterator[Any]:
    for operand, axes in zip(operands, routes, strict=True):
        if isinstance(operand, (list, tuple)):
            yield from axes
        elif operand is not None:
            yield axes


def _replaced(tree: Any, shards: Iterator[Any]) -> Any:
    """The arguments with the next shard for every distributed tensor."""
    if isinstance(tree, DTensor):
        return next(shards)
    if isinstance(tree, (list, tuple)):
        items = [_replaced(item, shards) for item in tree]
        return items if isinstance(tree, list) else tuple(items)
    return tree


def _check_explicit(name: str, tensor: DTensor, number: int, target: Layout) -> None:
    if target is not tensor._layout:
        steps = plan_redistribution(
            tensor._layout, target, tuple(tensor._shape), platform.get_element_size(tensor._local)
        )
        raise OperatorError(
            f"{name}: explicit mode: tensor {number} of its arguments must go from {tensor._layout} to {target}; call "
            f"redistribute() on it. That would be:\n{steps.explain()}"
        )


class _Planned:
    """A call whose plan is known."""

    __slots__ = (
        "_arguments", "_called", "_copies", "_expected", "_func", "_here", "_inplace", "_layouts", "_local", "_moves",
        "_nested", "_op", "_plain", "_positions", "_shapes", "_single",
    )  # fmt: skip

    def __init__(
        self,
        func: Any,
        called: Called,
        op: Operator,
        made: OpPlan,
        moves: list[Move],
        here: Here | None,
        tensors: Sequence[DTensor],
        inplace: bool,
    ) -> None:
        self._func, self._called, self._op, self._here, self._inplace = func, called, op, here, inplace
        self._moves = moves
        self._plain = not any(moves)
        self._single = len(made.results) == 1 and not isinstance(made.results[0], tuple)
        self._layouts = _flat(made.results)
        nested = [s for s, layout in zip(made.shapes, made.results, strict=True) if not isinstance(layout, tuple)]
        listed = [
            s for ss, layout in zip(made.shapes, made.results, strict=True) if isinstance(layout, tuple) for s in ss
        ]
        self._shapes = [platform.list_to_size(list(shape)) for shape in (*nested, *listed)]
        self._expected = [layout.local_shape(shape) for layout, shape in zip(self._layouts, self._shapes, strict=True)]
        moved = bool(moves) and moves[0] is not None and moves[0][0] is not tensors[0]._layout
        self._copies = called.name if op.view and moved else None

    def run(self, tensors: list[DTensor], args: Any, kwargs: Any) -> Any:
        """The operator on these arguments, whose description is that of the plan."""
        if self._plain:
            shards = [t._local for t in tensors]
        else:
            if MODES.explicit:
                for number, (tensor, move) in enumerate(zip(tensors, self._moves, strict=True)):
                    if move is not None:
                        _check_explicit(self._called.name, tensor, number, move[0])
            shards = [
                t._local if move is None else local_for(t, move[0], move[1])
                for t, move in zip(tensors, self._moves, strict=True)
            ]
        if self._inplace:
            _refuse_copy(self._called.name, tensors[0])
        following = iter(shards)
        args = _replaced(args, following)
        if kwargs:
            kwargs = {name: _replaced(value, following) for name, value in kwargs.items()}
        if self._here is None:
            result = self._func(*args, **kwargs)
        else:
            arguments = self._op.arguments(self._called, args, platform.named(kwargs))
            result = self._op.local(self._here, **arguments)  # type: ignore[misc]
        if self._inplace:
            return tensors[0]
        if self._single:
            made = self._wrapped(result, 0)
            if self._op.view:
                made._copy_of = self._copies or tensors[0]._copy_of
            return made
        made_all = [self._wrapped(one, i) for i, one in enumerate(result)]
        if self._op.view:
            for one in made_all:
                one._copy_of = self._copies or tensors[0]._copy_of
        kind = type(result)
        return made_all if kind is list else tuple(made_all) if kind is tuple else kind(made_all)

    def _wrapped(self, local: Any, number: int) -> DTensor:
        if local.shape != self._expected[number]:
            layout, shape = self._layouts[number], tuple(self._shapes[number])
            raise OperatorError(
                f"{self._called.name}: rank {layout.mesh.rank} got a result of shape {tuple(local.shape)}, but by the "
                f"rule it is {self._expected[number]} of {shape} in {layout}; the rule or the function is wrong"
            )
        return DTensor(local, self._layouts[number], self._shapes[number])


def _refuse_copy(name: str, target: DTensor) -> None:
    if target._copy_of is not None:
        raise OperatorError(
            f"{name}: the target is the result of {target._copy_of} along a sharded dim, for which data was moved: it is a "
            "copy, and the tensor it was taken from would not change. Assign by index (x[...] = value), or redistribute "
            "first"
        )


class _Handled:
    """A call that a function of the table does by itself, by other operators."""

    def __init__(self, op: Operator, called: Called, handler: Callable[..., Any]) -> None:
        self._op, self._called, self._handler = op, called, handler

    def run(self, tensors: list[DTensor], args: Any, kwargs: Any) -> Any:
        arguments = self._op.arguments(self._called, args, platform.named(kwargs))
        if not self._called.inplace:
            return self._handler(**arguments)
        _refuse_copy(self._called.name, tensors[0])
        result = self._handler(**arguments)
        return result if result is tensors[0] else _copied_back(tensors[0], result)


class _Whole:
    """A call without a rule: on whole tensors, on every rank."""

    def __init__(self, func: Any, called: Called, mesh: Any, inplace: bool) -> None:
        self._func, self._called, self._mesh, self._inplace = func, called, mesh, inplace

    def run(self, tensors: list[DTensor], args: Any, kwargs: Any) -> Any:
        if MODES.strict:
            raise OperatorError(f"{self._called.name}: no rule, and strict mode does not run it on whole tensors")
        wholes = []
        for number, tensor in enumerate(tensors):
            target = tensor._layout.with_placements([Replicate()] * self._mesh.ndim)
            if MODES.explicit:
                _check_explicit(self._called.name, tensor, number, target)
            wholes.append(local_for(tensor, target))
        if self._inplace:
            return self._back(tensors[0], wholes, args, kwargs)
        following = iter(wholes)
        args = _replaced(args, following)
        kwargs = {name: _replaced(value, following) for name, value in kwargs.items()}
        return platform.apply_to_tensors(self._wrapped, self._func(*args, **kwargs))

    def _back(self, target: DTensor, wholes: list[Any], args: Any, kwargs: Any) -> DTensor:
        """The target is changed as a whole and cut again."""
        _refuse_copy(self._called.name, target)
        following = iter([platform.clone(wholes[0]), *wholes[1:]])
        args = _replaced(args, following)
        kwargs = {name: _replaced(value, following) for name, value in kwargs.items()}
        return _copied_back(target, self._wrapped(self._func(*args, **kwargs)))

    def _wrapped(self, local: Any) -> DTensor:
        layout = Layout.from_device_mesh(self._mesh)([Replicate()] * self._mesh.ndim).bind(len(local.shape))
        return DTensor(local, layout, local.shape)


def _copied_back(target: DTensor, result: DTensor) -> DTensor:
    if result._shape != target._shape:
        raise RuntimeError(f"the result's shape {tuple(result._shape)} is not the target's {tuple(target._shape)}")
    target._local.copy_(local_for(result, target._layout))
    return target


class _Back:
    """An in-place call that must move its target: computed beside it, and copied back into its layout."""

    def __init__(self, dispatcher: Dispatcher, func: Any, called: Called) -> None:
        self._dispatcher, self._func, self._called = dispatcher, func, called

    def run(self, tensors: list[DTensor], args: Any, kwargs: Any) -> Any:
        target = tensors[0]
        _refuse_copy(self._called.name, target)
        func = platform.operator(self._called.name)
        kwargs = {name: value for name, value in kwargs.items() if name != "inplace"}
        if platform.called(func).inplace:
            raise OperatorError(f"{self._called.name}: there is no operator that leaves its target alone")
        return _copied_back(target, self._dispatcher.dispatch(func, args, kwargs))


class _Into:
    """A call with ``out=``: the result goes into that tensor, in its layout."""

    def __init__(self, dispatcher: Dispatcher, func: Any, called: Called) -> None:
        self._dispatcher, self._func, self._called = dispatcher, func, called

    def run(self, tensors: list[DTensor], args: Any, kwargs: Any) -> Any:
        kwargs = dict(kwargs)
        out = kwargs.pop("out")
        results = self._dispatcher.dispatch(self._func, args, kwargs, self._called)
        for target, result in zip(*(x if isinstance(x, (list, tuple)) else (x,) for x in (out, results)), strict=True):
            if not isinstance(target, DTensor):
                raise OperatorError(f"{self._called.name}: out= must be a DTensor as the operands are")
            _refuse_copy(self._called.name, target)
            _copied_back(target, result)
        return out


_OP_DISPATCHER = Dispatcher()
