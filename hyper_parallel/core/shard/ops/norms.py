# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002 - operands have the names that torch gives them
"""Normalizations: whole along what they normalize over, except that a batch which is cut has common statistics.

layer_norm   "... n!, n!, n! -> ... n!"          group_norm   "b (g c!) s!, (g c!), (g c!) -> b (g c!) s!"
batch_norm   "b! c s!, c, c, c, c -> b! c s!"    in training; by the mean and variance of all ranks where b or s is cut
"""

from __future__ import annotations

import math
from typing import Any

from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.ops.staged_reductions import (
    is_cut,
    nothing,
    reduced_dims,
    reducing,
    wide,
)
from hyper_parallel.core.shard.rule import Rule
from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform

platform = get_platform()
call = platform.operator


def _spatial(input: Any, mark: str = "!") -> str:
    return " ".join(f"s{i}{mark}" for i in range(len(input.shape) - 2))


# --- over the last dims, over groups of channels


def _layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, **_: Any
) -> RuleForCall:
    last = " ".join(f"n{i}!" for i in range(len(normalized_shape)))
    return RuleForCall(
        Rule(f"... {last}, {last}, {last} -> ... {last}"),
        operands=[input, weight, bias],
    )


def _group_norm(
    input: Any, num_groups: int, weight: Any, bias: Any, **_: Any
) -> RuleForCall:
    spatial = _spatial(input)
    # One value a group: torch refuses a batch of one, which a shard may be though the whole is not.
    batch = "b!" if math.prod(input.shape[1:]) == num_groups else "b"
    text = f"{batch} (g c!) {spatial}, (g c!), (g c!) -> {batch} (g c!) {spatial}"
    return RuleForCall(Rule(text), {"g": num_groups}, [input, weight, bias])


def _groups_of_shard(
    here: ShardContext, input: Any, num_groups: int, weight: Any, bias: Any, **more: Any
) -> Any:
    if here.is_cut("g"):
        num_groups = here.size("g")
    if num_groups == 0:  # torch 2.15 refuses an input without channels
        return nothing(here, input, weight, bias)
    return here.function(input, num_groups, weight=weight, bias=bias, **more)


operator(
    "layer_norm",
    "input, normalized_shape, weight=None, bias=None, eps=1e-05",
    _layer_norm,
)
operator("rms_norm", "input, normalized_shape, weight=None, eps=None", _layer_norm)
operator(
    "group_norm",
    "input, num_groups, weight=None, bias=None, eps=1e-05",
    _group_norm,
    local=_groups_of_shard,
)
operator(
    "local_response_norm",
    "input, size, alpha=0.0001, beta=0.75, k=1.0",
    Rule("b c! ... -> b c! ..."),
)

# --- over the batch


def _of_channels(
    input: Any, statistics: Any, weight: Any, bias: Any, batch: str, mark: str
) -> RuleForCall:
    """Statistics, weight and bias are one number a channel."""
    tensors = [input, *statistics, weight, bias]
    dims = f"{batch} c {_spatial(input, mark)}"
    return RuleForCall(
        Rule(f"{dims}{', c' * (len(tensors) - 1)} -> {dims}"), operands=tensors
    )


def _batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any,
    bias: Any,
    training: bool,
    **_: Any,
) -> Any:
    if len(input.shape) < 2:
        return None  # nothing but a batch
    if not training:
        return _of_channels(input, (running_mean, running_var), weight, bias, "b", "")
    if (
        running_mean is not None
        or running_var is not None
        or is_cut(input, _over_batch(input))
    ):
        return _batch_norm_of_all
    return _of_channels(input, (), weight, bias, "b!", "!")


def _over_batch(input: Any) -> tuple[int, ...]:
    return tuple(dim for dim in range(len(input.shape)) if dim != 1)


def _batch_norm_of_all(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any,
    bias: Any,
    momentum: float,
    eps: float,
    **_: Any,
) -> Any:
    """With the mean and the variance of the whole batch, which the running ones follow."""
    dims, count = (
        _over_batch(input),
        math.prod(input.shape[dim] for dim in _over_batch(input)),
    )
    if count == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {tuple(input.shape)}"
        )
    values = input.reduce_partial().to(wide(input.dtype))
    var, mean = call("var_mean")(values, dims, correction=0, keepdim=True)
    with platform.no_grad():
        _follow(running_mean, mean, momentum)
        _follow(running_var, var * (count / (count - 1)), momentum)
    if not is_cut(input, dims):
        return call("batch_norm")(input, None, None, weight, bias, True, momentum, eps)
    normal = (values - mean) * call("rsqrt")(var + eps)
    return _affine(normal, weight, bias).to(input.dtype)


def _follow(running: Any, value: Any, momentum: float) -> None:
    """Changes a running statistic in place, as it lies."""
    if running is not None:
        running.copy_(
            running * (1 - momentum)
            + value.reshape(tuple(running.shape)).to(running.dtype) * momentum
        )


def _affine(normal: Any, weight: Any, bias: Any) -> Any:
    shape = [normal.shape[1]] + [1] * (len(normal.shape) - 2)
    normal = normal if weight is None else normal * weight.reshape(shape)
    return normal if bias is None else normal + bias.reshape(shape)


def _instance_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any,
    bias: Any,
    use_input_stats: bool,
    **_: Any,
) -> Any:
    if not use_input_stats:
        return _of_channels(input, (running_mean, running_var), weight, bias, "b", "")
    if running_mean is not None or running_var is not None:
        return _instance_norm_of_all
    return _of_channels(input, (), weight, bias, "b", "!")


def _instance_norm_of_all(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any,
    bias: Any,
    momentum: float,
    eps: float,
    **_: Any,
) -> Any:
    with platform.no_grad():
        dims = tuple(range(2, len(input.shape)))
        var, mean = call("var_mean")(input.to(wide(input.dtype)), dims)
        _follow(running_mean, call("mean")(mean, 0).reduce_partial(), momentum)
        _follow(running_var, call("mean")(var, 0).reduce_partial(), momentum)
    return call("instance_norm")(
        input, weight=weight, bias=bias, momentum=momentum, eps=eps
    )


def _channels_of_shard(
    here: ShardContext, input: Any, weight: Any, bias: Any, **more: Any
) -> Any:
    if 0 in here.shape():
        return nothing(here, input, weight, bias)
    return here.function(input, weight=weight, bias=bias, **more)


STATISTICS = "input, running_mean=None, running_var=None, *, weight=None, bias=None"
operator(
    "batch_norm",
    f"{STATISTICS}, training=False, momentum=0.1, eps=1e-05",
    _batch_norm,
    local=_channels_of_shard,
)
operator(
    "instance_norm",
    f"{STATISTICS}, use_input_stats=True, momentum=0.1, eps=1e-05",
    _instance_norm,
    local=_channels_of_shard,
)

# --- of vectors


def _normalize(input: Any, dim: Any, **_: Any) -> Any:
    return (
        _normalize_in_stages
        if is_cut(input, reduced_dims(input, dim))
        else Rule("... {dim}! -> ... {dim}!")
    )


def _normalize_in_stages(input: Any, p: float, dim: Any, eps: float) -> Any:
    return input / call("clamp_min")(call("vector_norm")(input, p, dim, True), eps)


def _of_two(
    input: Any, other: Any, dim: int, keepdim: bool = False
) -> RuleForCall | None:
    """Two tensors that broadcast but along dim; counted from the end, it is the same in both."""
    ndim = max(len(input.shape), len(other.shape))
    at = (
        reduced_dims(input if len(input.shape) == ndim else other, dim)[0] - ndim
        if ndim
        else 0
    )
    if (
        min(len(input.shape), len(other.shape)) < -at
        or not ndim
        or input.shape[at] != other.shape[at]
    ):
        return None
    return RuleForCall(Rule(reducing(keepdim, "!", operands=2)), {"dim": at})


def _cosine_similarity(
    input: Any, other: Any, dim: int, **_: Any
) -> RuleForCall | None:
    return _of_two(input, other, dim)


def _pairwise_distance(
    input: Any, other: Any, keepdim: bool, **_: Any
) -> RuleForCall | None:
    return _of_two(input, other, -1, keepdim)


operator("normalize", "input, p=2.0, dim=1, eps=1e-12", _normalize)
operator("cosine_similarity", "input, other, dim=1, eps=1e-08", _cosine_similarity)
operator(
    "pairwise_distance",
    "input, other, p=2.0, eps=1e-06, keepdim=False",
    _pairwise_distance,
)
