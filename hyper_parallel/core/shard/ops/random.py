# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002 - operands have the names that torch gives them
"""Operators that draw random numbers.

Dropout and its like draw the same on copies of a piece and differ from piece to piece. What fills a tensor draws what
one device would: the whole, on every rank, of which each keeps its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.random import as_one_device, seed_of_piece
from hyper_parallel.core.dtensor.routes import adopt_after_inplace, local_for
from hyper_parallel.core.shard.arguments import refuse_copy, replicated
from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.ops.pointwise import ONE, SCALED, itself
from hyper_parallel.core.shard.rule import Rule, pointwise
from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform

platform = get_platform()

# --- other numbers on every piece


def _drawn(here: ShardContext, call: Callable[[], Any]) -> Any:
    with platform.seeded(seed_of_piece(here.plan.results[0], here.piece)):
        return call()


def _drop_shard(here: ShardContext, input: Any, p: float, **_: Any) -> Any:
    return _drawn(here, lambda: here.function(input, p, True))


def _unless_off(rule: Callable[..., Any]) -> Callable[..., Any]:
    """The rule while training; else the tensor itself, and nothing is drawn."""
    return lambda p, training, **more: rule(**more) if training and p != 0 else itself


def _of_channels(batched: int | None) -> Callable[..., Rule]:
    """A channel is dropped as a whole: of ``batched`` dims the first two tell channels apart, else the first."""

    def rule(input: Any, **_: Any) -> Rule:
        free = 2 if batched is None or len(input.shape) == batched else 1
        dims = " ".join(
            f"d{i}{'' if i < free else '!'}" for i in range(len(input.shape))
        )
        return Rule(f"{dims} -> {dims}", linear=((0,),))

    return rule


def _channels_moved(**arguments: Any) -> Rule:
    return Rule(
        _of_channels(None)(**arguments).text
    )  # what is dropped becomes a number, and so nothing is linear


DROPOUT = "input, p=0.5, training=True, inplace=False"
for _names, _rule in {
    "dropout": lambda **_: SCALED,
    "alpha_dropout": lambda **_: ONE,
    "dropout1d": _of_channels(3),
    "dropout2d feature_dropout": _of_channels(None),
    "dropout3d": _of_channels(5),
    "feature_alpha_dropout": _channels_moved,
}.items():
    operator(_names, DROPOUT, _unless_off(_rule), local=_drop_shard)


def _rrelu_shard(
    here: ShardContext, input: Any, lower: float, upper: float, training: bool, **_: Any
) -> Any:
    def call() -> Any:
        return here.function(input, lower, upper, training)

    return _drawn(here, call) if training else call()


def _without_generator(generator: Any, **_: Any) -> Any:
    return None if generator is not None else ONE


def _draw_shard(
    here: ShardContext, input: Any, p: float | None = None, **_: Any
) -> Any:
    return _drawn(
        here, lambda: here.function(input) if p is None else here.function(input, p)
    )


operator(
    "rrelu",
    "input, lower=0.125, upper=0.3333333333333333, training=False, inplace=False",
    ONE,
    local=_rrelu_shard,
)
operator(
    "bernoulli",
    "input, p=None, *, generator=None",
    _without_generator,
    local=_draw_shard,
)
operator("poisson", "input, generator=None", _without_generator, local=_draw_shard)


def _multinomial(input: Any, num_samples: int, generator: Any, **_: Any) -> Any:
    if generator is not None:
        return None
    batch = "b " * (len(input.shape) - 1)
    return RuleForCall(Rule(f"{batch}c! -> {batch}s!"), {"s": num_samples})


def _choose_of_shard(
    here: ShardContext, input: Any, num_samples: int, replacement: bool, **_: Any
) -> Any:
    return _drawn(here, lambda: here.function(input, num_samples, replacement))


operator(
    "multinomial",
    "input, num_samples, replacement=False, *, generator=None",
    _multinomial,
    local=_choose_of_shard,
)
operator("native_dropout_backward", "grad_output, mask, scale", pointwise(2, linear=0))

# --- the numbers of one device


def _fill(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Draws the whole and writes this rank's part of it into the target."""
    target = args[0] if args else kwargs["tensor"]
    refuse_copy(getattr(func, "__name__", str(func)), target)
    whole = platform.empty(
        tuple(target.shape), dtype=target.dtype, device=target.device
    )
    as_one_device(
        target.device_mesh, lambda: _called(func, args, kwargs, target, whole)
    )
    adopt_after_inplace(
        target,
        platform.changed(
            target._local, local_for(replicated(whole, target), target._layout)
        ),
    )
    return target


def _called(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], target: Any, whole: Any
) -> Any:
    """The function on plain tensors, with the whole in place of the target."""

    def plain(value: Any) -> Any:
        return (
            whole
            if value is target
            else value.full_tensor()
            if isinstance(value, DTensor)
            else value
        )

    return func(
        *map(plain, args), **{name: plain(value) for name, value in kwargs.items()}
    )


def _initialise(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with platform.no_grad():
        return _fill(func, args, kwargs)


operator(
    "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_",
    "*args",
    direct=_fill,
    any_layout=True,
)
operator("init", "*args", direct=_initialise, any_layout=True)


def _draw_like(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The whole, cut as the operand is."""
    like = next(
        value for value in (*args, *kwargs.values()) if isinstance(value, DTensor)
    )
    options = {name: value for name, value in kwargs.items() if name != "requires_grad"}
    empty = platform.empty(tuple(like.shape), dtype=like.dtype, device=like.device)
    whole = as_one_device(
        like.device_mesh, lambda: _called(func, args, options, like, empty)
    )
    layout = like._layout.reset_partial()
    shard = platform.clone(layout.part_of(whole))
    return DTensor(
        platform.set_requires_grad(shard, bool(kwargs.get("requires_grad"))),
        layout,
        like._shape,
    )


operator(
    "rand_like randn_like randint_like", "*args", direct=_draw_like, any_layout=True
)


def _normal(generator: Any, **_: Any) -> Any:
    return None if generator is not None else _shifted


def _shifted(mean: Any, std: Any, **_: Any) -> Any:
    """Standard normal numbers of the shape of both, with this mean and deviation; as in torch, with no gradient."""
    both = mean + std
    with platform.no_grad():
        drawn = mean + std * platform.operator("randn_like")(both)
        everywhere = platform.operator("ones_like")(
            drawn, dtype=platform.str_to_dtype("bool")
        )
    return drawn + both.masked_fill(everywhere, 0)


operator("normal", "mean, std=1.0, *, generator=None", _normal)
