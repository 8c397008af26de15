# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A001, A002 - operands have the names that torch gives them
"""Convolutions: products summed over channels and windows. What a window moves along is whole.

conv2d             "n (g i) s0! s1!, (g o) i k0! k1!, +(g o) -> n (g o) t0! t1!"
conv_transpose2d   "n (g i) s0! s1!, (g i) o k0! k1!, +(g o) -> n (g o) t0! t1!"

Where all channels are one group, those of the input may be cut, whose parts are then summed, or those of the result;
else the groups may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.ops.windows import of_some, piece, shapes_of, some
from hyper_parallel.core.shard.rule import einsum
from hyper_parallel.core.shard.shard_context import ShardContext


def _convolution(name: str) -> Callable[..., RuleForCall]:
    def rule(**arguments: Any) -> RuleForCall:
        input, weight, bias = (
            arguments[operand] for operand in ("input", "weight", "bias")
        )
        (shape,) = shapes_of(name, arguments)
        count = len(weight.shape) - 2
        batch = "n " * (len(input.shape) > count + 1)
        moving, kernel, moved = (
            " ".join(f"{letter}{i}!" for i in range(count)) for letter in "skt"
        )
        taps = "(g i) o" if _is_transposed(name, arguments) else "(g o) i"
        text = f"{batch}(g i) {moving}, {taps} {kernel}, +(g o) -> {batch}(g o) {moved}"
        sizes = {f"t{i}": size for i, size in enumerate(shape[-count:])}
        return RuleForCall(
            einsum(text, broadcast="none"),
            {"g": arguments["groups"], **sizes},
            [input, weight, bias],
        )

    return rule


def _is_transposed(name: str, arguments: dict[str, Any]) -> bool:
    return bool(arguments.get("transposed", "transpose" in name))


def _of_shard(name: str) -> Callable[..., Any]:
    def local(
        here: ShardContext, input: Any, weight: Any, bias: Any, groups: int, **more: Any
    ) -> Any:
        if groups > 1:
            groups = here.size("g") or 1
        if 0 not in (*input.shape, *weight.shape):
            return here.function(
                input=input, weight=weight, bias=bias, groups=groups, **more
            )
        # The second dim of the weight is that of one group: of input channels, or of output channels if transposed.
        channels, transposed = weight.shape[1] or 1, _is_transposed(name, more)
        input = some(input, 1 if transposed else channels)
        bias = None if bias is None else some(bias, channels if transposed else 1)
        return piece(
            here,
            here.function(
                input=input, weight=some(weight), bias=bias, groups=groups, **more
            ),
        )

    return local


FORWARD = "input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1"
TRANSPOSED = "input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1"
EITHER = (
    "input, weight, bias, stride, padding, dilation, transposed, output_padding, groups"
)
CONVOLUTIONS = {
    **{f"conv{n}d": FORWARD for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": TRANSPOSED for n in (1, 2, 3)},
    "convolution": EITHER,
    "_convolution": f"{EITHER}, benchmark, deterministic, cudnn_enabled, allow_tf32=True",
}
for _name, _parameters in CONVOLUTIONS.items():
    operator(_name, _parameters, _convolution(_name), local=_of_shard(_name))


def _over_time(**arguments: Any) -> RuleForCall:
    ((time, *_),) = shapes_of("conv_tbc", arguments)
    return RuleForCall(
        einsum("t! n i, k! i o, +o -> u! n o", broadcast="none"), {"u": time}
    )


operator("conv_tbc", "input, weight, bias, pad=0", _over_time, local=of_some)
