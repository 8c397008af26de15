# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002 - operands have the names that the rules give them
"""Operators that draw random numbers: on a CPU from the generator of the platform, whose state can be put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Tensor

from hyper_parallel.platform.mindspore.cpu import randomness
from hyper_parallel.platform.mindspore.cpu.functions.pointwise import number
from hyper_parallel.platform.mindspore.cpu.functions.reductions import (
    FUNCTIONS as REDUCTIONS,
)
from hyper_parallel.platform.mindspore.cpu.functions.shared import (
    Array,
    mint,
    numbers,
    ops,
    refuse,
)

Draw = Callable[..., Array]  # numbers of a shape, by the arguments of the operator


def _filling(draw: Draw) -> Callable[..., Any]:
    """An operator that puts the numbers into its target."""

    def fill(input: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
        refuse("a random operator", generator=generator)
        return input.copy_(
            Tensor(draw(tuple(input.shape), *args, **kwargs)).astype(input.dtype)
        )

    return fill


def _uniform(shape: Any, low: float = 0.0, high: float = 1.0) -> Array:
    return randomness.draw().uniform(low, high, shape)


def _normal(shape: Any, mean: float = 0.0, std: float = 1.0) -> Array:
    return randomness.draw().normal(mean, std, shape)


def _exponential(shape: Any, lambd: float = 1.0) -> Array:
    return randomness.draw().exponential(1 / lambd, shape)


def _integers(shape: Any, low: int = 0, high: int | None = None) -> Array:
    return randomness.draw().integers(
        low, 2**24 if high is None else high, shape
    )  # which every float32 has


def _truths(shape: Any, p: float = 0.5) -> Array:
    return _uniform(shape) < p


def _like(draw: Draw) -> Callable[..., Any]:
    def make(input: Any, *, dtype: Any = None, **_: Any) -> Any:
        return Tensor(np.asarray(draw(tuple(input.shape)))).astype(dtype or input.dtype)

    return make


def _normal_of(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Any:
    """Numbers around means, with deviations; they have no gradient."""
    refuse("normal", generator=generator)
    like = mean if isinstance(mean, Tensor) else std
    mean, std = (ops.stop_gradient(number(like, one)) for one in (mean, std))
    shape = np.broadcast_shapes(tuple(mean.shape), tuple(std.shape))
    return mean + std * numbers(like, _normal(shape))


def _bernoulli(input: Any, p: float | None = None, *, generator: Any = None) -> Any:
    refuse("bernoulli", generator=generator)
    chance = number(input, _uniform(tuple(input.shape)))
    return (chance < (input if p is None else numbers(input, p))).astype(input.dtype)


def _poisson(input: Any, generator: Any = None) -> Any:
    refuse("poisson", generator=generator)
    return numbers(input, randomness.draw().poisson(input.asnumpy()))


def _rrelu(
    input: Any,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    refuse("rrelu", inplace=inplace)
    slope = (
        _uniform(tuple(input.shape), lower, upper) if training else (lower + upper) / 2
    )
    return mint.where(input > 0, input, input * numbers(input, slope))


def _gumbel_softmax(
    logits: Any,
    tau: float = 1,
    hard: bool = False,
    eps: float = 1e-10,  # noqa: ARG001 - of former times
    dim: int = -1,
) -> Any:
    noise = -mint.log(numbers(logits, _exponential(tuple(logits.shape))))
    soft = REDUCTIONS["softmax"]((logits + noise) / numbers(logits, tau), dim)
    if not hard:
        return soft
    best = mint.unsqueeze(REDUCTIONS["argmax"](soft, dim), dim)
    shape = [1] * len(soft.shape)
    shape[dim] = -1
    chosen = mint.reshape(Tensor(np.arange(soft.shape[dim])), tuple(shape)) == best
    return chosen.astype(soft.dtype) - ops.stop_gradient(soft) + soft


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "uniform_": _filling(_uniform),
    "normal_": _filling(_normal),
    "exponential_": _filling(_exponential),
    "random_": _filling(_integers),
    "bernoulli_": _filling(_truths),
    "rand_like": _like(_uniform),
    "randn_like": _like(_normal),
    "normal": _normal_of,
    "bernoulli": _bernoulli,
    "poisson": _poisson,
    "rrelu": _rrelu,
    "gumbel_softmax": _gumbel_softmax,
}
