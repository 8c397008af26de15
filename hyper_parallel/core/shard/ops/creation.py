# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002 - operands have the names that torch gives them
"""Tensors like others: they lie as the other does, and without a pending reduction, so that nothing is communicated.

What has a shape of its own is Replicate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.arguments import replicated
from hyper_parallel.core.shard.ops.operator import operator
from hyper_parallel.core.shard.ops.views import ints
from hyper_parallel.platform import get_platform

platform = get_platform()

OPTIONS = "*, dtype=None, layout=None, device=None, pin_memory=False, requires_grad=False, memory_format=None"


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in options.items()
        if value is not None and value is not False
    }


def _like(name: str) -> Callable[..., Any]:
    def handler(input: Any, *, fill_value: Any = None, **options: Any) -> DTensor:
        values = () if fill_value is None else (fill_value,)
        made = platform.operator(name)(input._local, *values, **_given(options))
        return DTensor(made, input._layout.reset_partial(), input._shape)

    return handler


def _new(name: str) -> Callable[..., Any]:
    def handler(
        input: Any, size: Any, *, fill_value: Any = None, **options: Any
    ) -> DTensor:
        values = () if fill_value is None else (fill_value,)
        shape, layout = ints(size), input._layout.reset_partial()
        make = getattr(input._local, name)
        if shape != tuple(input.shape):
            return replicated(make(shape, *values, **_given(options)), input)
        return DTensor(
            make(layout.local_shape(shape), *values, **_given(options)), layout, shape
        )

    return handler


def _new_tensor(input: Any, data: Any, **options: Any) -> DTensor:
    data = platform.detach(data.full_tensor()) if isinstance(data, DTensor) else data
    return replicated(input._local.new_tensor(data, **_given(options)), input)


for _name in ("zeros_like", "ones_like", "empty_like"):
    operator(_name, f"input, {OPTIONS}", handler=_like(_name), any_layout=True)
for _name in ("new_zeros", "new_ones", "new_empty"):
    operator(
        _name, f"input, *size, {OPTIONS[3:]}", handler=_new(_name), any_layout=True
    )
operator(
    "full_like",
    f"input, fill_value, {OPTIONS}",
    handler=_like("full_like"),
    any_layout=True,
)
operator(
    "new_full",
    f"input, size, fill_value, {OPTIONS}",
    handler=_new("new_full"),
    any_layout=True,
)
operator("new_tensor", f"input, data, {OPTIONS}", handler=_new_tensor, any_layout=True)
