# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002, A006 - operands have the names that the rules give them
"""Operators that look at each element by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore
from mindspore import Tensor

from hyper_parallel.platform.mindspore.functions.shared import numbers, ops, refuse


def _to(input: Any, *args: Any, dtype: Any = None, **_: Any) -> Any:
    wanted = dtype if dtype is not None else next((arg for arg in args if isinstance(arg, mindspore.Type)), None)
    if wanted is None and args and isinstance(args[0], Tensor):
        wanted = args[0].dtype
    return input if wanted is None or input.dtype == wanted else input.astype(wanted)


def _lerp(input: Any, end: Any, weight: Any) -> Any:
    return input + (end - input) * (weight if isinstance(weight, Tensor) else numbers(input, weight))


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    refuse("dropout", inplace=inplace)
    return ops.dropout(input, p, training) if training and p else input


def _scaled(input: Any, value: Any) -> Any:
    return input if isinstance(value, (int, float)) and value == 1 else input * _number(input, value)


def _number(like: Any, value: Any) -> Any:
    return value if isinstance(value, Tensor) else numbers(like, value)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "to": _to,
    "detach": ops.stop_gradient,
    "clone": lambda input, *, memory_format=None: input.copy(),  # noqa: ARG005 - it has one format
    "gelu": lambda input, approximate="none": ops.gelu(input, approximate=approximate),
    "addcmul": lambda input, tensor1, tensor2, *, value=1: input + _scaled(tensor1 * tensor2, value),
    "addcdiv": lambda input, tensor1, tensor2, *, value=1: input + _scaled(tensor1 / tensor2, value),
    "lerp": _lerp,
    "clamp_min": lambda input, min: ops.clamp(input, min, None),
    "clamp_max": lambda input, max: ops.clamp(input, None, max),
    "floor_divide": lambda input, other: input // other,
    "rsub": lambda input, other, alpha=1: other - _scaled(input, alpha),
    "dropout": _dropout,
    "zeros_like": ops.zeros_like,
    "ones_like": ops.ones_like,
    "full_like": ops.full_like,
}
