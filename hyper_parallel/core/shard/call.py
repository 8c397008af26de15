# SPDX-License-Identifier: Apache-2.0
"""Runs one operator on distributed tensors by its rule: redistribute, compute on the shards, wrap.

    y = call(torch.nn.functional.linear, einsum("... k, n k, +n -> ... n"), [x, weight, bias])

Autograd records the local computation. Where the shards' gradients are parts of an operand's gradient, the operand's
redistribution adds them up in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hyper_parallel.core.dtensor.collectives import redistribute
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.notation import LOOKED_UP
from hyper_parallel.core.shard.propagate import OpPlan, propagate
from hyper_parallel.core.shard.rule import Rule
from hyper_parallel.platform import get_platform


def call(
    function: Callable[..., Any],
    rule: Rule,
    operands: Sequence[Any],
    attrs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """``function(*operands, **kwargs)`` on distributed tensors; ``attrs`` are what the rule's text refers to.

    An operand is a DTensor, a sequence of them where the rule has a list, or None. The function must do the same on
    shards as on the whole, as its rule says.
    """
    plan = plan_call(rule, operands, attrs)
    _refuse_lookups(rule, plan)
    locals_ = [_local(operand, plan.operands[i], plan.routes[i]) for i, operand in enumerate(operands)]
    return _wrap(function(*locals_, **kwargs), plan)


def _refuse_lookups(rule: Rule, plan: OpPlan) -> None:
    """A shard of a table knows only its own rows: a plain function would read the wrong ones."""
    for axis, choice in enumerate(plan.choices):
        rule.require(
            rule.notation.marks.get(choice.factor or "") != LOOKED_UP,
            f"factor {choice.factor} is looked up and cut along axis {axis}; redistribute that operand first",
        )


def plan_call(rule: Rule, operands: Sequence[Any], attrs: Mapping[str, Any] | None = None) -> OpPlan:
    """What ``call`` would do; made once for each rule, layouts, shapes and attributes."""
    platform = get_platform()
    described = tuple(_described(rule, number, operand) for number, operand in enumerate(operands))
    sizes = tuple(platform.get_element_size(tensor) for operand in operands for tensor in _each(operand))
    given = tuple(sorted((name, _frozen(value)) for name, value in (attrs or {}).items()))
    return _plan(rule, described, sizes, given)


@functools.lru_cache(maxsize=8192)
def _plan(rule: Rule, described: tuple[Any, ...], sizes: tuple[int, ...], given: tuple[tuple[str, Any], ...]) -> OpPlan:
    def part(operand: Any, index: int) -> Any:
        if operand is None:
            return None
        return tuple(one[index] for one in operand[1]) if operand[0] == "list" else operand[1][index]

    shapes, layouts = ([part(operand, index) for operand in described] for index in (0, 1))
    return propagate(rule.bind(shapes, dict(given)), layouts, sizes)


def _described(rule: Rule, number: int, operand: Any) -> Any:
    if operand is None:
        return None
    if isinstance(operand, (list, tuple)):
        return ("list", tuple(_described(rule, number, one)[1] for one in operand))
    rule.require(
        isinstance(operand, DTensor),
        f"operand {number} is a {type(operand).__name__}, not a DTensor; distribute_tensor() makes it one",
    )
    return ("one", (tuple(operand.shape), operand.layout))


def _each(operand: Any) -> Sequence[Any]:
    return operand if isinstance(operand, (list, tuple)) else () if operand is None else (operand,)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _local(operand: Any, layout: Any, summed: Any) -> Any:
    if operand is None:
        return None
    if isinstance(operand, (list, tuple)):
        return [_local(one, layout[i], summed[i]) for i, one in enumerate(operand)]
    return redistribute(operand.to_local(), operand.layout, layout, tuple(operand.shape), summed)


def _wrap(output: Any, plan: OpPlan) -> Any:
    if len(plan.results) == 1 and not isinstance(plan.results[0], tuple):
        return _wrapped(output, plan.results[0], plan.shapes[0])
    layouts, shapes = (plan.results[0], plan.shapes[0]) if len(plan.results) == 1 else (plan.results, plan.shapes)
    return tuple(_wrapped(one, layout, shape) for one, layout, shape in zip(output, layouts, shapes, strict=True))


def _wrapped(local: Any, layout: Any, shape: Any) -> DTensor:
    expected = layout.local_shape(shape)
    if tuple(local.shape) != expected:
        raise ValueError(
            f"the function gave rank {layout.mesh.rank} a result of shape {tuple(local.shape)}, but by its rule it is "
            f"{expected} of {tuple(shape)} in {layout}; the rule or the function is wrong"
        )
    return DTensor(local, layout, shape)
