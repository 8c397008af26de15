# SPDX-License-Identifier: Apache-2.0
"""Attention in parts on torch: the CPU's flash attention kernel, which is exact in every dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from hyper_parallel.platform.contract.attention import Attention as AttentionContract
from hyper_parallel.platform.torch.dtensor_base import DTensorBase

_FORWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD: Any = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
)


class Attention(AttentionContract):
    """Kernels of attention, calls of it that are caught, and tensors that hold a part of a sequence meanwhile."""

    def fused_attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        is_causal: bool,
        scale: float,
    ) -> tuple[Any, Any] | None:
        if not _has_kernel(query, key, value):
            return None
        output, logsumexp = _FORWARD(
            query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return output, logsumexp

    def fused_attention_gradients(
        self,
        grad: Any,
        query: Any,
        key: Any,
        value: Any,
        output: Any,
        logsumexp: Any,
        mask: Any,
        is_causal: bool,
        scale: float,
    ) -> tuple[Any, Any, Any] | None:
        if not _has_kernel(query, key, value):
            return None
        saved = (query, key, value, output, logsumexp, 0.0, is_causal)
        of_query, of_key, of_value = _BACKWARD(
            grad, *saved, attn_mask=mask, scale=scale
        )
        return of_query, of_key, of_value

    @contextmanager
    def intercept_attention(self, function: Callable[..., Any]) -> Iterator[None]:
        with _Intercepted(function):
            yield

    def owns_memory(self, tensor: Any) -> bool:
        is_dense = tensor.layout is torch.strided and tensor.is_contiguous()
        if tensor._is_view() or not is_dense:
            return False
        return bool(tensor.untyped_storage().nbytes() == tensor.nbytes)

    def replace_contents(self, tensor: Any, contents: Any) -> None:
        with torch.no_grad():
            tensor.resize_(contents.shape)
            tensor.copy_(contents)


def _has_kernel(query: Any, key: Any, value: Any) -> bool:
    """Whether the kernel takes these tensors: on the CPU, with one head dim, and not empty."""
    sizes = query.shape[-1], key.shape[-1], value.shape[-1]
    on_cpu = query.device.type == "cpu" and query.dtype.is_floating_point
    return on_cpu and len(set(sizes)) == 1 and query.numel() > 0 and key.numel() > 0


class _Intercepted(TorchFunctionMode):
    """Catches the function wherever it was imported from, and only on this thread."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_plain = not any(issubclass(kind, DTensorBase) for kind in types)
        if func is scaled_dot_product_attention and is_plain:
            return self._function(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
