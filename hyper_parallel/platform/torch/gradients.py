# SPDX-License-Identifier: Apache-2.0
"""Clipping gradients by their total norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hyper_parallel.platform.platform import Platform


class Gradients(Platform):
    """The part of the contract that is about gradients as a whole."""

    def clip_grad_norm_(
        self,
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        max_norm, norm_type = float(max_norm), float(norm_type)
        if math.isnan(max_norm) or max_norm < 0:
            raise ValueError(f"clip_grad_norm_: max_norm must be a number of at least 0, got {max_norm}")
        if math.isnan(norm_type) or norm_type <= 0:
            raise ValueError(f"clip_grad_norm_: norm_type must be positive or inf, got {norm_type}")
        params = _parameters(parameters)
        grads = [p.grad for p in params if p.grad is not None]
        total = nn.utils.get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
        nn.utils.clip_grads_with_norm_(params, max_norm, total, foreach)
        return total


def _parameters(parameters: Any) -> list[torch.Tensor]:
    """The tensors meant by a module, a tensor or an iterable, each once."""
    if isinstance(parameters, nn.Module):
        found: Iterable[Any] = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        found = [parameters]
    else:
        found = parameters
    unique = {id(p): p for p in found}
    wrong = [type(p).__name__ for p in unique.values() if not isinstance(p, torch.Tensor)]
    if wrong:
        raise TypeError(
            f"clip_grad_norm_: expected a module, a tensor or an iterable of tensors, found {wrong[0]} in it"
        )
    return list(unique.values())
