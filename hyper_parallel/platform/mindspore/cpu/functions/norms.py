# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A001, A002 - operands have the names that the rules give them
"""Normalizations and distances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hyper_parallel.platform.mindspore.cpu.functions.reductions import (
    FUNCTIONS as REDUCTIONS,
)
from hyper_parallel.platform.mindspore.cpu.functions.shared import (
    along,
    dims_of,
    mint,
    numbers,
    ops,
    shaped,
)

vector_norm = REDUCTIONS["vector_norm"]


def _layer_norm(
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> Any:
    return _native_layer_norm(input, normalized_shape, weight, bias, eps)[
        0
    ]  # the kernel rounds to float32


_EPSILON = {"Float64": 2.0**-52, "Float16": 2.0**-10, "BFloat16": 2.0**-7}


def _rms_norm(
    input: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    eps: float | None = None,
) -> Any:
    dims = tuple(range(-len(normalized_shape), 0))
    least = _EPSILON.get(str(input.dtype), 2.0**-23) if eps is None else eps
    found = input * mint.rsqrt(
        mint.mean(input * input, dims, keepdim=True) + numbers(input, least)
    )
    return found if weight is None else found * weight


def _standard(input: Any, dims: tuple[int, ...], eps: float) -> tuple[Any, Any, Any]:
    """The input with a mean of zero and a variance of one over these dims; the mean, and one over the deviation."""
    mean = mint.mean(input, dims, keepdim=True)
    off = input - mean
    inverse = mint.rsqrt(mint.mean(off * off, dims, keepdim=True) + numbers(input, eps))
    return off * inverse, mean, inverse


def _native_layer_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> Any:
    found, mean, inverse = _standard(
        input, tuple(range(-len(normalized_shape), 0)), eps
    )
    found = found if weight is None else found * weight
    found = found if bias is None else found + bias
    return found, ops.stop_gradient(mean), ops.stop_gradient(inverse)


def _group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    grouped = shaped(input, (input.shape[0], num_groups, -1))
    return _by_channel(
        shaped(_standard(grouped, (2,), eps)[0], input.shape), weight, bias
    )


def _native_group_norm(
    input: Any,
    weight: Any,
    bias: Any,
    N: int,  # noqa: N803
    C: int,  # noqa: ARG001, N803
    HxW: int,  # noqa: ARG001, N803
    group: int,
    eps: float,
) -> Any:
    found, mean, inverse = _standard(shaped(input, (N, group, -1)), (2,), eps)
    both = (
        shaped(one, (N, group)) for one in (mean, inverse)
    )  # which have gradients, unlike those of layers
    return _by_channel(shaped(found, input.shape), weight, bias), *both


def _by_channel(input: Any, weight: Any, bias: Any) -> Any:
    shape = (-1, *(1,) * (len(input.shape) - 2))
    input = input if weight is None else input * shaped(weight, shape)
    return input if bias is None else input + shaped(bias, shape)


def _batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    return _normed(
        input,
        running_mean,
        running_var,
        weight,
        bias,
        training,
        momentum,
        eps,
        keep=(1,),
    )


def _instance_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    return _normed(
        input,
        running_mean,
        running_var,
        weight,
        bias,
        use_input_stats,
        momentum,
        eps,
        keep=(0, 1),
    )


def _normed(
    input: Any,
    mean: Any,
    var: Any,
    weight: Any,
    bias: Any,
    own: bool,
    momentum: float,
    eps: float,
    keep: Any,
) -> Any:
    """By the statistics of the input, which the running ones follow, or by the running ones."""
    dims = tuple(d for d in range(len(input.shape)) if d not in keep)
    channels = (-1, *(1,) * (len(input.shape) - 2))
    if not own:
        mean, var = ops.stop_gradient(mean), ops.stop_gradient(var)
        inverse = mint.rsqrt(shaped(var, channels) + numbers(input, eps))
        return _by_channel((input - shaped(mean, channels)) * inverse, weight, bias)
    found, _, _ = _standard(input, dims, eps)
    if mean is not None:
        data = ops.stop_gradient(input)
        count = data.size // (
            data.shape[1] if keep == (1,) else data.shape[0] * data.shape[1]
        )
        here = mint.mean(data, dims, keepdim=True)
        spread = mint.sum((data - here) * (data - here), dims, keepdim=True) / numbers(
            data, max(count - 1, 1)
        )
        for running, now in ((mean, here), (var, spread)):
            latest = shaped(mint.mean(now, 0) if 0 in keep else now, (-1,))
            running.copy_(running + (latest - running) * numbers(running, momentum))
    return _by_channel(found, weight, bias)


def _local_response_norm(
    input: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Any:
    channels = np.arange(input.shape[1])
    apart = channels - channels[:, None]  # the neighbours before and after
    near = (apart >= -(size // 2)) & (apart <= (size - 1) // 2)
    means = along(input * input, 1, near / size)
    return input / mint.pow(
        means * numbers(input, alpha) + numbers(input, k), numbers(input, beta)
    )


def _normalize(input: Any, p: float = 2.0, dim: Any = 1, eps: float = 1e-12) -> Any:
    return input / mint.clamp(vector_norm(input, p, dim, True), min=eps)


def _cosine_similarity(input: Any, other: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    shape = np.broadcast_shapes(tuple(input.shape), tuple(other.shape))
    input, other = (
        x if tuple(x.shape) == shape else mint.broadcast_to(x, shape)
        for x in (input, other)
    )
    (dim,) = dims_of(input, dim)
    first, second = (
        x / mint.clamp(vector_norm(x, 2, dim, True), min=eps) for x in (input, other)
    )
    return mint.sum(first * second, dim)


def _pairwise_distance(
    input: Any, other: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    return vector_norm(input - other + numbers(input, eps), p, -1, keepdim)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "layer_norm": _layer_norm,
    "native_layer_norm": _native_layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "native_group_norm": _native_group_norm,
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "local_response_norm": _local_response_norm,
    "normalize": _normalize,
    "cosine_similarity": _cosine_similarity,
    "pairwise_distance": _pairwise_distance,
}
