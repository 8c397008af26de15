# SPDX-License-Identifier: Apache-2.0
"""Gradients as a whole: what backward does with leaves, and clipping by the total norm.

Where the tape runs backward, a leaf's gradient is its ``_grad``; ``value_and_grad`` returns gradients instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mindspore
from mindspore import Tensor, mint, nn

from hyper_parallel.platform.mindspore import private
from hyper_parallel.platform.mindspore.dtensor_base import DTensorBase
from hyper_parallel.platform.platform import Platform


class Gradients(Platform):
    """The part of the contract that is about gradients as a whole."""

    def no_grad(self) -> Any:
        return private.no_grad()()

    def gradients(self, function: Callable[..., Any], inputs: Sequence[Any]) -> list[Any]:
        executor = private.executor()
        was_on = executor.grad_flag()
        leaves = [self.detach(x) for x in inputs]  # which the framework marks, as those that got a gradient
        try:
            found = mindspore.grad(function, grad_position=tuple(range(len(inputs))))(*leaves)
        finally:
            executor.set_grad_flag(was_on)  # which grad() turns off
        return list(found) if isinstance(found, (list, tuple)) else [found]

    def is_recorded(self, tensor: Any) -> bool:
        return private.requires_grad(tensor) and bool(private.executor().requires_grad())

    def accumulates_gradient(self, leaf: Any) -> bool:  # noqa: ARG002 - the framework does not tell who asks
        return False

    def accumulate_gradient(self, leaf: Any, gradient: Any) -> None:
        leaf._grad = gradient if leaf._grad is None else leaf._grad + gradient

    def backward_number(self) -> int:
        return 0

    def after_backward(self, call: Callable[[], None]) -> None:
        private.executor().queue_backward_final_callback(call)

    def clip_grad_norm_(
        self,
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,  # noqa: ARG002 - there is one way
    ) -> Any:
        max_norm, norm_type = float(max_norm), float(norm_type)
        if math.isnan(max_norm) or max_norm < 0:
            raise ValueError(f"clip_grad_norm_: max_norm must be a number of at least 0, got {max_norm}")
        if math.isnan(norm_type) or norm_type <= 0:
            raise ValueError(f"clip_grad_norm_: norm_type must be positive or inf, got {norm_type}")
        # A parameter without a gradient takes part as well: another rank may have one for its shard.
        spread: dict[tuple[int, ...], list[Any]] = {}
        for parameter in _parameters(parameters):
            if parameter._grad is not None or private.requires_grad(parameter):
                spread.setdefault(_ranks(parameter), []).append(parameter)
        norms = {
            ranks: _norm([p._grad for p in held if p._grad is not None], norm_type) for ranks, held in spread.items()
        }
        # Sorted by ranks, so that groups with common members never wait for each other.
        for ranks in sorted(ranks for ranks in norms if ranks):
            gathered = self.all_gather_into_tensor(norms[ranks].reshape(1), self.create_group(ranks))
            norms[ranks] = _norm([gathered], norm_type)
        total = _norm([norm.reshape(1) for norm in norms.values()], norm_type)
        if error_if_nonfinite and not math.isfinite(total.item()):
            raise RuntimeError(
                f"clip_grad_norm_: the norm of order {norm_type} is non-finite ({total.item()}), so the gradients "
                "cannot be clipped by it; with error_if_nonfinite=False they are scaled nevertheless"
            )
        factor = mint.clamp(max_norm / (total + 1e-6), max=1.0)
        for parameter in (p for held in spread.values() for p in held if p._grad is not None):
            self.copy_into(parameter._grad, parameter._grad * factor.astype(parameter._grad.dtype))
        return total


def _parameters(parameters: Any) -> list[Any]:
    """The tensors meant by a module, a tensor or an iterable, each once."""
    if isinstance(parameters, nn.Cell):
        found: Iterable[Any] = parameters.get_parameters()
    else:
        found = [parameters] if isinstance(parameters, Tensor) else parameters
    unique = {id(p): p for p in found}
    wrong = [type(p).__name__ for p in unique.values() if not isinstance(p, Tensor)]
    if wrong:
        raise TypeError(
            f"clip_grad_norm_: expected a module, a tensor or an iterable of tensors, found {wrong[0]} in it"
        )
    return list(unique.values())


def _ranks(parameter: Any) -> tuple[int, ...]:
    """The ranks that together have all of a parameter's gradient; none if each has all of it."""
    if not isinstance(parameter, DTensorBase):
        return ()
    layout = parameter.layout
    ranks = layout.mesh.ranks_along(axis for axes in layout.dim_axes for axis in axes)
    return tuple(ranks) if len(ranks) > 1 else ()


def _norm(gradients: Sequence[Any], norm_type: float) -> Any:
    """The norm of all elements, added up in float32 or wider."""
    wide = mindspore.float64 if any(g.dtype == mindspore.float64 for g in gradients) else mindspore.float32
    parts = [mint.abs(g.astype(wide)) for g in gradients if 0 not in g.shape]
    if not parts:
        return Tensor(0.0, mindspore.float32)
    if math.isinf(norm_type):
        return mint.max(mint.cat([mint.max(part).reshape(1) for part in parts]))
    powers = [mint.sum(mint.pow(part, norm_type)).reshape(1) for part in parts]
    return mint.pow(mint.sum(mint.cat(powers)), 1 / norm_type)
