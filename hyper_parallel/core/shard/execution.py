# SPDX-License-Identifier: Apache-2.0
"""The ways in which a call is run once it is decided: by a plan, by other operators, on whole tensors, in place."""

from __future__ import annotations

import importlib
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.modes import MODES
from hyper_parallel.core.dtensor.placement_types import Replicate
from hyper_parallel.core.dtensor.random import as_one_device
from hyper_parallel.core.dtensor.routes import ViewOf, adopt_after_inplace, local_for
from hyper_parallel.core.dtensor.spec import (
    has_other_than_sum,
    spec_of,
    waits_for_value,
)
from hyper_parallel.core.shard.arguments import (
    OperatorError,
    check_explicit,
    flat,
    on_all_ranks,
    refuse_copy,
    replaced,
    replicated,
    tensors_in,
)
from hyper_parallel.core.shard.ops.operator import OPERATORS, Operator
from hyper_parallel.core.shard.propagate import OpPlan
from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import OpName

platform = get_platform()
HYPER_PARALLEL_PURE_PYTHON = "HYPER_PARALLEL_PURE_PYTHON"


def _compiled() -> Any:
    """The compiled dispatch, where it was built and is wanted."""
    if os.environ.get(HYPER_PARALLEL_PURE_PYTHON, "").lower() not in (
        "",
        "0",
        "false",
        "no",
    ):
        return None
    try:
        return importlib.import_module("hyper_parallel.core.shard._fast")
    except ImportError:
        return None


fast = _compiled()

Run = Callable[
    [list[DTensor], Any, Any], Any
]  # of the distributed tensors among the arguments, and the arguments
Move = (
    tuple[Layout, tuple[int, ...]] | None
)  # the layout asked for, the axes on which the gradient comes in parts


class Planned:
    """A call whose plan is known. ``moves``: what each tensor must become; None where its shard is taken as it is."""

    def __init__(
        self,
        func: Any,
        called: OpName,
        op: Operator,
        made: OpPlan,
        here: ShardContext | None,
    ) -> None:
        self._func, self._called, self._op, self._here = func, called, op, here
        self._lost_view_of: str | None = None
        self._single = len(made.results) == 1 and not isinstance(made.results[0], tuple)
        self._layouts = flat(made.results)
        shapes = [
            s
            for shape, layout in zip(made.shapes, made.results, strict=True)
            for s in _each(shape, layout)
        ]
        self._shapes = [platform.list_to_size(list(shape)) for shape in shapes]
        pairs = zip(self._layouts, self._shapes, strict=True)
        self._expected = [
            platform.list_to_size(list(layout.local_shape(shape)))
            for layout, shape in pairs
        ]

    def bind(
        self,
        moves: Sequence[Move],
        tensors: Sequence[DTensor],
        args: Any,
        kwargs: Any,
        inplace: bool,
    ) -> Run:
        """The way for arguments like these, the shortest that serves."""
        self._moves = list(moves)
        self._inplace = inplace
        changes = [
            move is not None and move[0] is not t._layout
            for move, t in zip(moves, tensors, strict=True)
        ]
        moves_first = bool(changes) and changes[0]
        is_copy = self._op.view and moves_first
        if is_copy and not _takes_elements(self._called, args):
            self._lost_view_of = self._called.name
        self._empty = any(
            layout.is_empty_somewhere(shape) for layout, shape in self._pieces(tensors)
        )
        return self._choose_run(any(changes), len(tensors), args, kwargs)

    def _choose_run(self, moves: bool, tensors: int, args: Any, kwargs: Any) -> Run:
        """``moves``: whether any tensor changes its layout; ``tensors``: how many there are."""
        at = _find_tensors(enumerate(args))
        by_name = _find_tensors(kwargs.items())
        if len(at) + len(by_name) != tensors:  # some are in lists
            return self.run
        if self._inplace:
            return self._inplace_run()
        func = self._find_fast_function(args, kwargs)
        if func is None or moves or not self._is_simple():
            return self.run
        only = len(at) == len(args) and not kwargs
        floats = [
            value for value in (*args, *kwargs.values()) if isinstance(value, float)
        ]
        return self._simple_run(func, None if only else at, by_name, not floats)

    def _find_fast_function(self, args: Any, kwargs: Any) -> Any:
        """What to call on the shards in place of the operator; None if each call must be told where it is."""
        if self._here is None:
            return self._func
        if self._op.ready is None:
            return None
        named = platform.canonical_kwargs(kwargs)
        arguments = self._op.arguments(self._called, args, named)
        return self._op.ready(self._here, **arguments)

    def _is_simple(self) -> bool:
        """Whether there is one result, which has elements on every rank and stands for itself."""
        # What stands for a pending maximum depends on whether it is recorded.
        pending = self._single and has_other_than_sum(self._layouts[0])
        return self._single and not self._empty and not pending

    def _pieces(self, tensors: Sequence[DTensor]) -> list[tuple[Layout, Any]]:
        """(layout, shape) of everything that the local call gets and gives."""
        pairs = zip(tensors, self._moves, strict=True)
        taken = [
            (t._layout if move is None else move[0], t._shape) for t, move in pairs
        ]
        return taken + list(zip(self._layouts, self._shapes, strict=True))

    def _simple_run(
        self, func: Any, at: list[int] | None, by_name: list[str], fixed: bool
    ) -> Run:
        """The short way: no tensor changes its layout, none is in a list, and there is one result.

        ``at``, ``by_name``: where the tensors are among the arguments; None where there is nothing else. ``fixed``: the
        shape of the result does not depend on a number that the plan does not know.
        """
        wrapped = self._simple_wrap(fixed)
        routed = [(i, *move) for i, move in enumerate(self._moves) if move is not None]
        tensors = len(self._moves)
        if at is None and not routed and tensors in (1, 2):
            usual = (_run_one if tensors == 1 else _run_two)(func, wrapped)
        else:
            usual = _run_many(func, wrapped, routed, at, by_name)
        is_view = self._op.view and tensors == 1
        chosen = _remembering(func, usual) if is_view else usual
        if fast is None:
            return chosen
        return cast(Run, self._compiled(func, chosen, wrapped, fixed, bool(routed)))

    def _inplace_run(self) -> Run:
        """The way of a call that changes its first tensor: compiled if it moves none."""
        moves_none = self._here is None and not any(self._moves)
        if fast is None or not (moves_none and self._called.inplace):
            return self.run
        made = fast.Plan()
        made.func, made.run, made.inplace = self._func, self.run, True
        return cast(Run, made)

    def _compiled(
        self, func: Any, run: Run, wrap: Any, fixed: bool, routed: bool
    ) -> Any:
        """The same for the compiled dispatch, which leaves to these functions what is not ordinary."""
        made = fast.Plan()
        made.func, made.run, made.wrap = func, run, wrap
        made.layout, made.shape, made.expected = (
            self._layouts[0],
            self._shapes[0],
            self._expected[0],
        )
        made.fixed, made.view, made.routed = fixed, bool(self._op.view), routed
        return made

    def _simple_wrap(self, fixed: bool) -> Callable[[Any, DTensor], Any]:
        """Makes a distributed tensor of the result, which may be a view of the first operand."""
        layout, shape, expected = self._layouts[0], self._shapes[0], self._expected[0]
        view, wrap = self._op.view, DTensor.wrapped
        tells = view and not platform.counts_changes
        dtype = spec = None  # of the last result: mostly that of the next

        def wrapped(result: Any, first: DTensor) -> Any:
            nonlocal dtype, spec
            known = result.dtype is dtype
            if not (known and fixed) and result.shape != expected:
                return self._wrapped(result, 0)  # says what is wrong
            if not known:
                dtype = result.dtype
                spec = spec_of(wrap(result, dtype, layout, shape, None))
            made = wrap(result, dtype, layout, shape, spec)
            if tells:
                platform.mark_alias(result, first._local)
            if view and first._lost_view_of is not None:
                made._lost_view_of = first._lost_view_of
            return made

        return wrapped

    def run(self, tensors: list[DTensor], args: Any, kwargs: Any) -> Any:
        """The operator on these arguments."""
        if self._inplace:
            refuse_copy(self._called.name, tensors[0])
        shards = self._shards(tensors)
        result = self._call_on(shards, args, kwargs)
        if self._inplace:
            return tensors[0]
        # A view is in the graph already, and a sum with others would be no view.
        joins_graph = self._empty and not self._op.view
        # An operator may return an empty operand as it is, where others compute: that counts as a result of its own.
        stays = self._layouts[0] is tensors[0]._layout and not joins_graph
        if stays and result is tensors[0]._local:
            return tensors[0]
        results = [result] if self._single else list(result)
        if joins_graph:
            results = [_tied(one, shards) for one in results]
        made = self._wrap_all(results, tensors[0])
        return made[0] if self._single else type(result)(made)

    def _wrap_all(self, results: list[Any], first: DTensor) -> list[DTensor]:
        made = [self._wrapped(one, i) for i, one in enumerate(results)]
        if self._op.view:
            self._mark_views(made, first)
        return made

    def _call_on(self, shards: list[Any], args: Any, kwargs: Any) -> Any:
        """What the local call gives for these shards in place of the tensors."""
        following = iter(shards)
        args = replaced(args, following)
        if kwargs:
            pairs = kwargs.items()
            kwargs = {name: replaced(value, following) for name, value in pairs}
        func = self._func
        if self._here is not None:
            named = platform.canonical_kwargs(kwargs)
            kwargs = self._op.arguments(self._called, args, named)
            func, args = cast(Any, self._op.local), (self._here,)
        if self._empty:
            return self._call_where_empty(func, args, kwargs)
        return func(*args, **kwargs)

    def _mark_views(self, made: list[DTensor], base: DTensor) -> None:
        for one in made:
            platform.mark_alias(one._local, base._local)
            one._lost_view_of = self._lost_view_of or base._lost_view_of

    def _call_where_empty(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The local call where some rank has a shard without elements."""
        if self._inplace:
            return func(*args, **kwargs)
        if not self._op.view:
            return platform.call_where_empty(func, args, kwargs)
        with platform.replayed_views():
            return platform.call_where_empty(func, args, kwargs)

    def _shards(self, tensors: list[DTensor]) -> list[Any]:
        """What the local call gets for each tensor."""
        pairs = list(zip(tensors, self._moves, strict=True))
        if MODES.explicit:
            for number, (tensor, move) in enumerate(pairs):
                check_explicit(
                    self._called.name,
                    tensor,
                    number,
                    move[0] if move is not None else tensor._layout,
                )
        return [
            t._local if move is None else local_for(t, move[0], move[1])
            for t, move in pairs
        ]

    def _wrapped(self, local: Any, number: int) -> DTensor:
        if local.shape != self._expected[number]:
            layout, shape = self._layouts[number], tuple(self._shapes[number])
            raise coded(
                OperatorError,
                "HP308",
                f"{self._called.name}: rank {layout.mesh.rank} got a result of shape {tuple(local.shape)}, but by "
                f"the rule it is {tuple(self._expected[number])} of {shape} in {layout}; the rule or the function "
                "is wrong",
            )
        return DTensor(local, self._layouts[number], self._shapes[number])


def _find_tensors(pairs: Iterable[tuple[Any, Any]]) -> list[Any]:
    """Where the distributed tensors are among arguments."""
    return [where for where, value in pairs if isinstance(value, DTensor)]


def _run_one(func: Any, wrapped: Any) -> Run:
    """The way of a call on one tensor, whose shard is all that it gets."""

    def run(tensors: list[DTensor], args: Any, kwargs: Any) -> Any:  # noqa: ARG001
        first = tensors[0]
        shard = first._local
        result = func(shard)
        return first if result is shard else wrapped(result, first)

    return run


def _run_two(func: Any, wrapped: Any) -> Run:
    """The way of a call on two tensors, whose shards are all that it gets."""

    def run(tensors: list[DTensor], args: Any, kwargs: Any) -> Any:  # noqa: ARG001
        first, second = tensors
        shard = first._local
        result = func(shard, second._local)
        return first if result is shard else wrapped(result, first)

    return run


def _run_many(
    func: Any,
    wrapped: Any,
    routed: list[Any],
    at: list[int] | None,
    by_name: list[str],
) -> Run:
    """The way of a call whose tensors are at these positions and names among its arguments."""
    count = len(at) if at is not None else 0

    def run(tensors: list[DTensor], args: Any, kwargs: Any) -> Any:
        first = tensors[0]._local
        shards = [tensor._local for tensor in tensors]
        for i, target, summed in routed:
            shards[i] = local_for(tensors[i], target, summed)
        if at is None:
            result = func(*shards)
        else:
            args = list(args)
            for position, shard in zip(at, shards):  # noqa: B905 - quick; the rest are by name
                args[position] = shard
            if by_name:
                kwargs = {**kwargs, **dict(zip(by_name, shards[count:]))}  # noqa: B905
            result = func(*args, **kwargs)
        return tensors[0] if result is first else wrapped(result, tensors[0])

    return run


def _takes_elements(called: OpName, args: Any) -> bool:
    """Whether an index picks elements one by one, which gives a copy on one device too."""
    if called.name != "getitem" or len(args) < 2:
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(
        not (item is None or item is Ellipsis or type(item) in (int, slice))
        for item in index
    )


def _remembering(func: Any, run: Run) -> Run:
    """The way of a view, whose result remembers of what gathered tensor it is one."""

    def run_view(tensors: list[DTensor], args: Any, kwargs: Any) -> Any:
        (first,), made = tensors, run(tensors, args, kwargs)
        if first._gathered_from is not None and made is not first:

            def again(shard: Any) -> Any:
                shards = iter([shard])
                return func(
                    *replaced(args, shards),
                    **{k: replaced(value, shards) for k, value in kwargs.items()},
                )

            made._gathered_from = ViewOf(
                first, again, platform.version_of(first._local)
            )
        return made

    return run_view


def _tied(result: Any, operands: Sequence[Any]) -> Any:
    """The result with all operands in its graph.

    An operator may leave out operands of which nothing is there; the ranks that have something would then wait in
    backward for a sum in which this one takes no part. So where any rank has nothing, all ranks do this.
    """
    return (
        platform.keep_in_graph(result, operands)
        if platform.is_floating_point(result)
        else result
    )


def _each(shape: Any, layout: Any) -> Any:
    return shape if isinstance(layout, tuple) else (shape,)


class Composite:
    """A call that a function of the table does by itself, by other operators."""

    def __init__(
        self, op: Operator, called: OpName, handler: Callable[..., Any]
    ) -> None:
        self._op, self._called, self._handler = op, called, handler

    def run(self, tensors: list[DTensor], args: Any, kwargs: Any) -> Any:
        """The operator on these arguments."""
        arguments = self._op.arguments(
            self._called, args, platform.canonical_kwargs(kwargs)
        )
        if not self._called.inplace and kwargs.get("inplace") is not True:
            return self._handler(**arguments)
        refuse_copy(self._called.name, tensors[0])
        result = self._handler(**arguments)
        return result if result is tensors[0] else copied_back(tensors[0], result)


class RawHandler:
    """A call that a function of the table does by itself, with the arguments as they came."""

    def __init__(self, direct: Callable[..., Any], func: Any) -> None:
        self._direct, self._func = direct, func

    def run(self, tensors: list[DTensor], args: Any, kwargs: Any) -> Any:  # noqa: ARG002 - as every other way
        """The operator on these arguments."""
        return self._direct(self._func, args, kwargs)


class OnWholeTensors:
    """A call without a rule: on whole tensors, on every rank."""

    def __init__(
        self, func: Any, called: OpName, mesh: Any, inplace: bool, scalars: bool
    ) -> None:
        self._func, self._called, self._mesh, self._inplace, self._scalars = (
            func,
            called,
            mesh,
            inplace,
            scalars,
        )

    def run(self, tensors: list[DTensor], args: Any, kwargs: Any) -> Any:
        """The operator on these arguments."""
        if MODES.strict and not self._scalars:
            raise coded(
                OperatorError,
                "HP303",
                f"{self._called.name}: no rule, and strict mode does not run it on whole tensors",
            )
        wholes = []
        for number, tensor in enumerate(tensors):
            target = tensor._layout.with_placements([Replicate()] * self._mesh.ndim)
            if MODES.explicit:
                check_explicit(self._called.name, tensor, number, target)
            wholes.append(local_for(tensor, target))
        if self._inplace:
            refuse_copy(self._called.name, tensors[0])
        before = [_fingerprint(whole) for whole in wholes]
        result = as_one_device(
            self._mesh,
            lambda: self._called_on(wholes, args, kwargs),
            always_draws=False,
        )
        for tensor, whole, version in list(zip(tensors, wholes, before, strict=True))[
            self._inplace :
        ]:
            if (
                whole is not tensor._local and _fingerprint(whole) != version
            ):  # such as running statistics
                refuse_copy(self._called.name, tensor)
                copied_back(tensor, self._wrapped(whole))
        result = platform.apply_to_tensors(self._wrapped, result)
        return copied_back(tensors[0], result) if self._inplace else result

    def _called_on(self, wholes: list[Any], args: Any, kwargs: Any) -> Any:
        given = list(wholes)
        if self._inplace:
            given[0] = platform.operator("clone")(given[0])  # in the graph
        following = iter(given)
        args = replaced(args, following)
        return self._func(
            *args,
            **{name: replaced(value, following) for name, value in kwargs.items()},
        )

    def _wrapped(self, local: Any) -> DTensor:
        return on_all_ranks(local, self._mesh)


def _fingerprint(whole: Any) -> int | None:
    """What is another after the tensor has been changed in place."""
    version = platform.version_of(whole)
    if version is not None or platform.is_meta(whole):
        return version
    return zlib.crc32(np.ascontiguousarray(platform.tensor_to_numpy(whole)).data)


class Overridable:
    """A call that a context may do in another way; the usual way where it does not, or leaves the call alone."""

    def __init__(self, usual: Run, called: OpName, op: Operator) -> None:
        self._usual, self._called, self._op = usual, called, op

    def run(self, tensors: list[DTensor], args: Any, kwargs: Any) -> Any:
        """The operator on these arguments."""
        how = MODES.overrides.get(self._op.name)
        if how is not None and how.call is not None:
            named = platform.canonical_kwargs(kwargs)
            result = how.call(**self._op.arguments(self._called, args, named))
            if result is not NotImplemented:
                return result
        return self._usual(tensors, args, kwargs)


class CopyBack:
    """An in-place call that must move its target: computed beside it, and copied back into its layout."""

    def __init__(self, dispatch: Callable[..., Any], called: OpName) -> None:
        self._dispatch, self._called = dispatch, called

    def run(self, tensors: list[DTensor], args: Any, kwargs: Any) -> Any:
        """The operator on these arguments."""
        refuse_copy(self._called.name, tensors[0])
        func = platform.operator(self._called.name)
        if platform.op_name_of(func).inplace:
            raise coded(
                OperatorError,
                "HP310",
                f"{self._called.name}: there is no operator that leaves its target alone",
            )
        kwargs = {name: value for name, value in kwargs.items() if name != "inplace"}
        return copied_back(tensors[0], self._dispatch(func, args, kwargs))


class Reduced:
    """A call on the values of tensors in which more than a sum is pending: of those that gradients flow through, or
    ``of_all``."""

    def __init__(
        self,
        dispatch: Callable[..., Any],
        func: Any,
        called: OpName,
        inplace: bool,
        *,
        of_all: bool = False,
    ) -> None:
        self._dispatch, self._func, self._called, self._inplace = (
            dispatch,
            func,
            called,
            inplace,
        )
        self._of_all = of_all

    def run(self, tensors: list[DTensor], args: Any, kwargs: Any) -> Any:
        """The operator on these arguments; the target of a change in place stays as it lies."""
        if MODES.explicit:
            for number, tensor in enumerate(tensors):
                if self._is_reduced(tensor):
                    check_explicit(
                        self._called.name,
                        tensor,
                        number,
                        tensor._layout.reset_partial(),
                    )
        given = [self._value(tensor) for tensor in tensors]
        if self._inplace:
            given[0] = tensors[0]
        values = iter(given)
        args, kwargs = (
            replaced(args, values),
            {name: replaced(value, values) for name, value in kwargs.items()},
        )
        result = self._dispatch(self._func, args, kwargs, self._called)
        if given[0] is not tensors[0] and _is_view(self._called):
            for one in result if isinstance(result, (list, tuple)) else (result,):
                one._lost_view_of = self._called.name
        return result

    def _is_reduced(self, tensor: DTensor) -> bool:
        return (
            has_other_than_sum(tensor._layout)
            if self._of_all
            else waits_for_value(tensor)
        )

    def _value(self, tensor: DTensor) -> DTensor:
        if waits_for_value(tensor) or not self._is_reduced(tensor):
            return tensor.gradient_source()
        layout = tensor._layout.reset_partial()
        return DTensor(local_for(tensor, layout), layout, tensor._shape)


class Ordered:
    """A call that may leave a maximum or minimum pending, decided when it runs.

    It is taken first where gradients are recorded: they are those of the value. And where another operand, which
    every rank has, holds an infinity: what is added to that on a rank that does not have the maximum may be a nan.
    """

    def __init__(self, kept: Run, reduced: Run, finite: bool) -> None:
        self._kept, self._reduced, self._finite = kept, reduced, finite

    def run(self, tensors: list[DTensor], args: Any, kwargs: Any) -> Any:
        """The operator on these arguments."""
        recorded = any(platform.is_recorded(tensor._local) for tensor in tensors)
        is_taken = recorded or (
            self._finite and _may_meet_infinity(tensors, (*args, *kwargs.values()))
        )
        run = self._reduced if is_taken else self._kept
        return run(tensors, args, kwargs)


LARGE = 65504.0  # the largest number of the smallest floating-point dtype


def _may_meet_infinity(tensors: Sequence[DTensor], arguments: Sequence[Any]) -> bool:
    """Whether a number or a tensor without a pending reduction is, or becomes in the dtype of the others, infinite."""
    if any(
        isinstance(value, (int, float)) and not abs(value) <= LARGE
        for value in arguments
    ):
        return True
    pending = [tensor for tensor in tensors if has_other_than_sum(tensor._layout)]
    others = [
        tensor._local.to(pending[0]._local.dtype)
        for tensor in tensors
        if not has_other_than_sum(tensor._layout)
    ]
    return any(bool(platform.operator("isinf")(shard).any()) for shard in others)


def _is_view(called: OpName) -> bool:
    op = OPERATORS.get(called.name)
    return op is not None and bool(op.view)


class OutArgument:
    """A call with ``out=``: the result goes into that tensor, in its layout."""

    def __init__(self, dispatch: Callable[..., Any], func: Any, called: OpName) -> None:
        self._dispatch, self._func, self._called = dispatch, func, called

    def run(self, tensors: list[DTensor], args: Any, kwargs: Any) -> Any:  # noqa: ARG002 - as every other way
        """The operator on these arguments."""
        kwargs = dict(kwargs)
        out = kwargs.pop("out")
        targets = out if isinstance(out, (list, tuple)) else (out,)
        if any(isinstance(t, DTensor) for t in tensors_in((args, kwargs))):
            results = self._dispatch(self._func, args, kwargs, self._called)
        else:  # such as eye(3, out=x): the same on every rank
            results = platform.apply_to_tensors(
                lambda t: replicated(t, targets[0]), self._func(*args, **kwargs)
            )
        found = results if isinstance(results, (list, tuple)) else (results,)
        for target, result in zip(targets, found, strict=True):
            refuse_copy(self._called.name, target)
            if platform.is_floating_point(result) and not platform.is_floating_point(
                target
            ):
                raise coded(
                    OperatorError,
                    "HP310",
                    f"{self._called.name}: a result of {result.dtype} does not go into {target.dtype}",
                )
            copied_back(target, result)
        return out


def copied_back(target: DTensor, result: DTensor) -> DTensor:
    """The target with the result's values, in its own layout."""
    if result._shape != target._shape:
        raise coded(
            ValueError,
            "HP310",
            f"the result has the shape {tuple(result._shape)}, but its target {tuple(target._shape)}",
        )
    adopt_after_inplace(
        target, platform.changed(target._local, local_for(result, target._layout))
    )
    return target
