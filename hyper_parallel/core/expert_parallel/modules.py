# SPDX-License-Identifier: Apache-2.0
"""Experts as modules: one, and several whose weights are tensors of all of them.

experts = GroupedExperts(dim, hidden_dim, num_experts=8)
y = experts(rows, tokens_per_expert)                        rows are sorted by expert
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.expert_parallel.capacity import Capacity
from hyper_parallel.core.expert_parallel.grouped import grouped_linear, run_each
from hyper_parallel.core.expert_parallel.placed import (
    Choices,
    run_on_rows,
    run_on_tokens,
)
from hyper_parallel.platform import get_platform

platform = get_platform()


class FeedForward(platform.Module):  # type: ignore[name-defined, misc]
    """``w2(silu(w1(x)) * w3(x))``."""

    def __init__(self, dim: int, hidden_dim: int, bias: bool = False) -> None:
        super().__init__()
        self.w1 = platform.new_linear(dim, hidden_dim, bias)
        self.w2 = platform.new_linear(hidden_dim, dim, bias)
        self.w3 = platform.new_linear(dim, hidden_dim, bias)

    def forward(self, x: Any) -> Any:
        """The outputs for tensors [..., dim]."""
        return self.w2(platform.operator("silu")(self.w1(x)) * self.w3(x))

    construct = forward  # what MindSpore calls it


class GroupedExperts(platform.Module):  # type: ignore[name-defined, misc]
    """Experts like ``FeedForward`` without biases, whose weights ``w1``, ``w2``, ``w3`` are [experts, out, in].

    ``use_grouped_mm``: multiplies all experts at once where the framework can, else one after the other.
    """

    runs_where_experts_are = True

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        use_grouped_mm: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts, self.use_grouped_mm = num_experts, use_grouped_mm
        self.w1 = _draw_weights(num_experts, hidden_dim, dim)
        self.w2 = _draw_weights(num_experts, dim, hidden_dim)
        self.w3 = _draw_weights(num_experts, hidden_dim, dim)

    def forward(
        self,
        routed_input: Any,
        num_tokens_per_expert: Any = None,
        *,
        top_k_index: Any = None,
        top_k_weights: Any = None,
        weighs_inputs: bool = False,
        capacity: Capacity | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Any:
        """The outputs for rows that are sorted by expert; or, for tokens with ``top_k_index``, their weighted sums.

        ``meanwhile``: called once with tokens, while they travel to ranks that have their experts.
        """
        if top_k_index is None:
            rows, counts = routed_input, num_tokens_per_expert
            return run_on_rows(self, self._compute, rows, counts)
        choices = Choices(
            top_k_index, top_k_weights, weighs_inputs, capacity, meanwhile
        )
        return run_on_tokens(self, self._compute, routed_input, choices)

    construct = forward

    def _compute(
        self, rows: Any, sizes: Sequence[int], parameters: dict[str, Any]
    ) -> Any:
        def project(values: Any, name: str) -> Any:
            weight = parameters[name].to(values.dtype)
            return grouped_linear(
                values, weight, sizes, use_grouped_mm=self.use_grouped_mm
            )

        if not self.use_grouped_mm and 0 < sum(sizes) == rows.shape[0]:
            # Expert by expert: what it computes is still in the processor's cache.
            own = [parameters[name].to(rows.dtype) for name in ("w1", "w2", "w3")]
            return run_each(_run_expert, rows, own, sizes)
        gate, up = project(rows, "w1"), project(rows, "w3")
        if not rows.shape[0]:  # not every framework computes on empty tensors
            return project(gate + up, "w2")
        return project(platform.operator("silu")(gate) * up, "w2")


def _run_expert(rows: Any, w1: Any, w2: Any, w3: Any) -> Any:
    linear = platform.operator("linear")
    hidden = platform.operator("silu")(linear(rows, w1)) * linear(rows, w3)
    return linear(hidden, w2)


def _draw_weights(num_experts: int, outputs: int, inputs: int) -> Any:
    """Uniform within 1 / sqrt(inputs), as linear layers are by default."""
    bound = 1 / math.sqrt(inputs)
    drawn = platform.rand((num_experts, outputs, inputs))
    return platform.Parameter((drawn * 2 - 1) * bound)
