# SPDX-License-Identifier: Apache-2.0
"""Joins a result to operands that it does not depend on, in gradients of every order.

A rank whose shard is empty computes without some operands that other ranks use. Their backward communicates for
these operands, so this rank must reach them as well, and in the gradient of the gradient again: the gradient of each
operand is joined to all of them. Everything that is added is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function


def keep_in_graph(
    result: torch.Tensor, operands: Sequence[torch.Tensor]
) -> torch.Tensor:
    """A copy of the result that autograd takes to be computed from all of these operands."""
    if not operands:
        return result
    # Tokens without elements stand for the operands, which may be changed in place before backward.
    tokens = [_Zeros.apply((0,), operand.dtype, operand) for operand in operands]
    return _Joined.apply(result, *tokens)


class _Joined(Function):
    """The identity of the first tensor; the others, without elements, get gradients that depend on all of them."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *tokens: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tokens)
        return result.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        tokens = ctx.saved_tensors
        return (
            grad,
            *(_Zeros.apply((0,), token.dtype, grad, *tokens) for token in tokens),
        )


class _Zeros(Function):
    """Zeros that autograd takes to be computed from some tensors."""

    @staticmethod
    def forward(
        ctx: Any, shape: tuple[int, ...], dtype: torch.dtype, *sources: torch.Tensor
    ) -> torch.Tensor:
        ctx.sources = [(source.shape, source.dtype) for source in sources]
        return torch.zeros(shape, dtype=dtype, device=sources[0].device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (
            None,
            None,
            *(_Zeros.apply(shape, dtype, grad) for shape, dtype in ctx.sources),
        )
