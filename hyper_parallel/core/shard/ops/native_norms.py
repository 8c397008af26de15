# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A001, A002 - operands have the names that torch gives them
"""Normalizations that give their statistics too, as they stand in torch's traced graphs.

native_layer_norm   "... n!, n!, n! -> ... n!, ... m!, ... m!"
native_group_norm   "b (g c) s!, (g c), (g c) -> b (g c) s!, b g, b g"
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.shard.arguments import replicated
from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.ops.windows import piece, some
from hyper_parallel.core.shard.rule import Rule
from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform

platform = get_platform()
call = platform.operator

# --- over the last dims, over groups of channels


def _layer_norm(
    input: Any, normalized_shape: Any, weight: Any, bias: Any, **_: Any
) -> RuleForCall:
    count = len(normalized_shape)
    last, ones = (" ".join(f"{letter}{i}!" for i in range(count)) for letter in "nm")
    text = f"... {last}, {last}, {last} -> ... {last}, ... {ones}, ... {ones}"
    return RuleForCall(
        Rule(text), {f"m{i}": 1 for i in range(count)}, [input, weight, bias]
    )


def _group_norm(
    input: Any, weight: Any, bias: Any, group: int, **_: Any
) -> RuleForCall:
    spatial = " ".join(f"s{i}!" for i in range(len(input.shape) - 2))
    text = f"b (g c) {spatial}, (g c), (g c) -> b (g c) {spatial}, b g, b g"
    return RuleForCall(
        Rule(text, broadcast="none"), {"g": group}, [input, weight, bias]
    )


def _groups_of_shard(
    here: ShardContext,
    input: Any,
    weight: Any,
    bias: Any,
    group: int,
    eps: float,
    **sizes: int,
) -> Any:
    """Of no images or no groups: of one of them, of which nothing is kept."""
    if here.is_cut("g"):
        least, group = sizes["C"] // group, here.size("g") or 1
        input, weight, bias = (
            None if x is None else some(x, least) for x in (input, weight, bias)
        )
    input = some(input)
    return piece(
        here,
        here.function(input, weight, bias, *input.shape[:2], sizes["HxW"], group, eps),
    )


operator("native_layer_norm", "input, normalized_shape, weight, bias, eps", _layer_norm)
operator(
    "native_group_norm",
    "input, weight, bias, N, C, HxW, group, eps",
    _group_norm,
    local=_groups_of_shard,
)

# --- over the batch


def _batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """batch_norm, and in training the mean of the batch and the inverse of its deviation; else nothing."""
    how = {
        "weight": weight,
        "bias": bias,
        "training": training,
        "momentum": momentum,
        "eps": eps,
    }
    normal = call("batch_norm")(input, running_mean, running_var, **how)
    if not training:
        return normal, _nothing(input, input.dtype), _nothing(input, input.dtype)
    with platform.no_grad():  # backward takes them for constants
        var, mean = call("var_mean")(
            input, [dim for dim in range(len(input.shape)) if dim != 1], correction=0
        )
        return normal, mean, call("rsqrt")(var + eps)


def _batch_norm_or_without(
    running_mean: Any, running_var: Any, training: Any, **more: Any
) -> Any:
    """Where there are no running statistics, what follows them may come in their place."""
    if not isinstance(running_mean, bool):
        return _batch_norm(
            running_mean=running_mean,
            running_var=running_var,
            training=training,
            **more,
        )
    how = {"training": running_mean, "momentum": running_var, "eps": training}
    return _batch_norm(running_mean=None, running_var=None, **{**more, **how})


def _batch_norm_with_update(input: Any, **more: Any) -> Any:
    space = _nothing(
        input, platform.str_to_dtype("uint8")
    )  # for what other kernels keep until backward
    return *_batch_norm(input, training=True, **more), space


def _nothing(like: Any, dtype: Any) -> Any:
    return replicated(platform.zeros((0,), dtype=dtype, device=like.device), like)


BATCH = "input, weight, bias, running_mean, running_var"
operator("native_batch_norm", f"{BATCH}, training, momentum, eps", handler=_batch_norm)
operator(
    "_native_batch_norm_legit",
    f"{BATCH}, training, momentum=None, eps=None",
    handler=_batch_norm_or_without,
)
operator(
    "_batch_norm_with_update",
    f"{BATCH}, momentum, eps",
    handler=_batch_norm_with_update,
)
