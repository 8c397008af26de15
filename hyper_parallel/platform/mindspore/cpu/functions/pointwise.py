# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A001, A002, A006 - operands have the names that the rules give them
"""Operators that look at each element by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor

from hyper_parallel.platform.mindspore.cpu.functions.shared import (
    mint,
    numbers,
    ops,
    refuse,
    shaped,
)


def _to(input: Any, *args: Any, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    device = next((arg for arg in args if isinstance(arg, str)), device)
    if device is not None and _kind(device) != _kind(input.device):
        input = input.to(device)
    wanted = (
        dtype
        if dtype is not None
        else next((arg for arg in args if isinstance(arg, mindspore.Type)), None)
    )
    if wanted is None and args and isinstance(args[0], Tensor):
        wanted = args[0].dtype
    return input if wanted is None or input.dtype == wanted else input.astype(wanted)


def _kind(device: str) -> str:
    return device.partition(":")[0].upper()


def _lerp(input: Any, end: Any, weight: Any) -> Any:
    return input + (end - input) * number(input, weight)


def _prelu(input: Any, weight: Any) -> Any:
    if (
        len(weight.shape) == 1 and len(input.shape) > 1
    ):  # one for each channel, or for all
        weight = shaped(weight, (-1, *(1,) * (len(input.shape) - 2)))
    return mint.where(input > 0, input, input * weight)


def _logit(input: Any, eps: float | None = None) -> Any:
    """Backward of ops.logit ends the process."""
    if eps is not None:
        input = ops.clamp(input, numbers(input, eps), numbers(input, 1 - eps))
    return mint.log(input / (numbers(input, 1) - input))


def _masked_fill(input: Any, mask: Any, value: Any) -> Any:
    return mint.where(mask, number(input, value).astype(input.dtype), input)


def _round(input: Any, *, decimals: int = 0) -> Any:
    if not decimals:
        return mint.round(input)
    scale = numbers(input, 10.0 ** abs(decimals))
    return (
        mint.round(input * scale) / scale
        if decimals > 0
        else mint.round(input / scale) * scale
    )


def _polygamma(n: Any, input: Any) -> Any:
    if isinstance(n, Tensor) and not isinstance(
        input, Tensor
    ):  # as a method it has the tensor first
        n, input = input, n
    return ops.polygamma(n if isinstance(n, Tensor) else Tensor(n), input)


def _polar(abs: Any, angle: Any) -> Any:
    shape = np.broadcast_shapes(tuple(abs.shape), tuple(angle.shape))
    return ops.polar(
        *(
            x if tuple(x.shape) == shape else mint.broadcast_to(x, shape)
            for x in (abs, angle)
        )
    )


def _dropout(
    input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    refuse("dropout", inplace=inplace)
    return ops.dropout(input, p, training) if training and p else input


def _scaled(input: Any, value: Any) -> Any:
    return (
        input
        if isinstance(value, (int, float)) and value == 1
        else input * number(input, value)
    )


def number(like: Any, value: Any) -> Any:
    """A number as a tensor of the dtype of another; a tensor as it is."""
    return value if isinstance(value, Tensor) else numbers(like, value)


# --- activations whose functions of mint have no CPU kernel


def _plus(input: Any) -> Any:
    """The logarithm of one more than its exponential."""
    return mint.log1p(mint.exp(-mint.abs(input))) + mint.maximum(
        input, ops.zeros_like(input)
    )


def _softplus(input: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    scaled = _scaled(input, beta)
    return mint.where(
        scaled > numbers(input, threshold), input, _plus(scaled) / numbers(input, beta)
    )


def _elu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Any:
    refuse("elu", inplace=inplace)
    below = mint.minimum(
        input, ops.zeros_like(input)
    )  # of the others the exponential may be too large
    return mint.where(input > 0, input, _scaled(mint.expm1(below), alpha))


def _selu(input: Any, inplace: bool = False) -> Any:
    refuse("selu", inplace=inplace)
    return _scaled(_elu(input, 1.6732632423543772), 1.0507009873554805)


def _leaky_relu(input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    refuse("leaky_relu", inplace=inplace)
    return mint.where(input > 0, input, _scaled(input, negative_slope))


def _mish(input: Any, inplace: bool = False) -> Any:
    refuse("mish", inplace=inplace)
    return input * mint.tanh(_plus(input))


def _hardtanh(
    input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Any:
    refuse("hardtanh", inplace=inplace)
    return ops.clamp(input, numbers(input, min_val), numbers(input, max_val))


def _threshold(
    input: Any, threshold: float, value: float, inplace: bool = False
) -> Any:
    refuse("threshold", inplace=inplace)
    return mint.where(input > numbers(input, threshold), input, numbers(input, value))


def _logaddexp(input: Any, other: Any) -> Any:
    return mint.maximum(input, other) + mint.log1p(mint.exp(-mint.abs(input - other)))


def _logaddexp2(input: Any, other: Any) -> Any:
    two = numbers(input, math.log(2))
    return _logaddexp(input * two, other * two) / two


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "softplus": _softplus,
    "log_sigmoid": lambda input: -_plus(-input),
    "elu": _elu,
    "selu": _selu,
    "leaky_relu": _leaky_relu,
    "mish": _mish,
    "hardtanh": _hardtanh,
    "relu6": lambda input, inplace=False: _hardtanh(input, 0.0, 6.0, inplace),
    "threshold": _threshold,
    "logaddexp": _logaddexp,
    "logaddexp2": _logaddexp2,
    "acos": ops.acos,
    "acosh": ops.acosh,
    "asin": ops.asin,
    "asinh": ops.asinh,
    "atan": ops.atan,
    "atan2": ops.atan2,
    "exp2": lambda input: mint.exp(input * numbers(input, math.log(2))),
    "frac": lambda input: input - mint.trunc(input),
    "log2": lambda input: mint.log(input) / numbers(input, math.log(2)),
    "log10": lambda input: mint.log(input) / numbers(input, math.log(10)),
    "isneginf": lambda input: input == numbers(input, -math.inf),
    "bitwise_or": ops.bitwise_or,
    "bitwise_xor": ops.bitwise_xor,
    "bitwise_not": lambda input: (
        mint.logical_not(input) if input.dtype == mindspore.bool_ else -input - 1
    ),
    "to": _to,
    "detach": ops.stop_gradient,
    "clone": lambda input, *, memory_format=None: input.copy(),  # noqa: ARG005 - it has one format
    "gelu": lambda input, approximate="none": ops.gelu(input, approximate=approximate),
    "addcmul": lambda input, tensor1, tensor2, *, value=1: (
        input + _scaled(tensor1 * tensor2, value)
    ),
    "addcdiv": lambda input, tensor1, tensor2, *, value=1: (
        input + _scaled(tensor1 / tensor2, value)
    ),
    "lerp": _lerp,
    "round": _round,
    "polygamma": _polygamma,
    "polar": _polar,
    "prelu": _prelu,
    "logit": _logit,
    "masked_fill": _masked_fill,
    "real": lambda input: mint.real(input) if input.is_complex() else input,
    "clamp_min": lambda input, min: ops.clamp(input, min, None),
    "clamp_max": lambda input, max: ops.clamp(input, None, max),
    "floor_divide": lambda input, other: input // other,
    "rsub": lambda input, other, alpha=1: other - _scaled(input, alpha),
    "dropout": _dropout,
    "zeros_like": ops.zeros_like,
    "ones_like": ops.ones_like,
    "full_like": ops.full_like,
}
