# SPDX-License-Identifier: Apache-2.0
"""Which experts a token goes to, and with which weights."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.expert_parallel.order import count_tokens
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


class TokenChoiceTopKRouter(platform.Module):  # type: ignore[name-defined, misc]
    """Every token chooses its ``top_k`` experts: (weights [tokens, k], experts [tokens, k], tokens per expert).

    Scores are computed in float32 or wider, by "sigmoid" or "softmax"; ``softmax_after_top_k`` takes the softmax of the
    chosen logits only. A bias changes the choice and not the weights. ``num_expert_groups``, ``num_limited_groups``:
    only experts of the best groups are chosen, by the sum of a group's two best ("top2") or its best ("max"), as
    ``group_score`` says. ``route_norm`` divides weights by their sum, ``route_scale`` multiplies them. Of equal scores
    the first expert's counts more.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int = 1,
        score_func: str = "sigmoid",
        num_expert_groups: int | None = None,
        num_limited_groups: int | None = None,
        route_scale: float = 1.0,
        *,
        route_norm: bool = False,
        group_score: str = "top2",
        softmax_after_top_k: bool = False,
    ) -> None:
        super().__init__()
        _check(num_experts, top_k, score_func, group_score)
        _check_groups(num_experts, top_k, num_expert_groups, num_limited_groups)
        self.gate = platform.new_linear(dim, num_experts, False)
        self.num_experts, self.top_k = num_experts, top_k
        self.score_func, self.softmax_after_top_k = score_func, softmax_after_top_k
        self.num_expert_groups = num_expert_groups
        self.num_limited_groups = num_limited_groups
        self.group_score = group_score
        self.route_norm, self.route_scale = route_norm, route_scale

    def forward(self, x: Any, expert_bias: Any = None) -> tuple[Any, Any, Any]:
        """Chooses experts for tokens [tokens, dim]."""
        _, weights, index = self.choose(x, expert_bias)
        local = index.to_local() if isinstance(index, DTensor) else index
        return weights, index, count_tokens(local, self.num_experts)

    construct = forward

    def choose(self, x: Any, expert_bias: Any = None) -> tuple[Any, Any, Any]:
        """(logits [tokens, experts], weights, experts)."""
        with platform.without_autocast(x):
            return self._choose(x, expert_bias)

    def _choose(self, x: Any, expert_bias: Any) -> tuple[Any, Any, Any]:
        logits = self._multiply(widen(x))
        if self.score_func == "softmax" and not self.softmax_after_top_k:
            scores = platform.operator("softmax")(logits, -1)
        elif self.score_func == "softmax":
            scores = logits
        else:
            scores = platform.operator("sigmoid")(logits)
        index = self._select(detach(scores), expert_bias)
        weights = platform.operator("gather")(scores, 1, index)
        if self.softmax_after_top_k and self.score_func == "softmax":
            weights = platform.operator("softmax")(weights, -1)
        if self.route_norm:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * self.route_scale, index

    def _multiply(self, x: Any) -> Any:
        """The logits of tokens that are wide enough, whatever dtype the weight has."""
        weight = self.gate.weight
        if weight.dtype == x.dtype:
            return self.gate(x)
        return platform.operator("linear")(x, weight.to(x.dtype))

    def probabilities(self, logits: Any) -> Any:
        """The scores of all experts, which add up to one: what losses of balance are about."""
        if self.score_func == "softmax":
            return platform.operator("softmax")(logits, -1)
        scores = platform.operator("sigmoid")(logits)
        return scores / (scores.sum(-1, keepdim=True) + 1e-20)

    def _select(self, scores: Any, expert_bias: Any) -> Any:
        if expert_bias is not None:
            scores = scores + expert_bias.to(scores.dtype)
        if self.num_expert_groups is not None:
            scores = self._limit_to_groups(scores)
        return _best(scores, self.top_k)

    def _limit_to_groups(self, scores: Any) -> Any:
        """Scores without those of the groups that are not among the best."""
        groups = self.num_expert_groups
        assert groups is not None
        tokens, size = scores.shape[0], self.num_experts // groups
        by_group = scores.reshape((tokens, groups, size))
        counted = 1 if self.group_score == "max" else min(2, size)
        descending, _ = platform.operator("sort")(by_group, dim=-1, descending=True)
        of_groups = descending[:, :, :counted].sum(-1)
        chosen = _best(of_groups, self.num_limited_groups or groups)
        zeros = platform.full_like(of_groups, 0)
        mask = platform.operator("scatter")(zeros, 1, chosen, 1)
        is_out = platform.operator("eq")(mask, 0).reshape((tokens, groups, 1))
        masked = platform.operator("masked_fill")(by_group, is_out, float("-inf"))
        return masked.reshape((tokens, self.num_experts))


def _best(scores: Any, count: int) -> Any:
    """The indices of the highest scores of each row; of equal ones the first."""
    order = platform.operator("sort")(-scores, dim=-1, stable=True)
    return order[1][:, :count].to(platform.str_to_dtype("int64"))


def _is_wide(x: Any) -> bool:
    names = ("float32", "float64")
    return x.dtype in [platform.str_to_dtype(name) for name in names]


def widen(x: Any) -> Any:
    """In float32, or in float64 as it is."""
    return x if _is_wide(x) else x.to(platform.str_to_dtype("float32"))


def detach(x: Any) -> Any:
    """A plain or distributed tensor outside the graph."""
    if isinstance(x, DTensor):
        return DTensor(platform.detach(x.to_local()), x.layout, x.shape)
    return platform.detach(x)


def _check(num_experts: int, top_k: int, score_func: str, group_score: str) -> None:
    if not 1 <= top_k <= num_experts:
        raise coded(
            ValueError,
            "HP453",
            f"TokenChoiceTopKRouter: top_k must be from 1 to {num_experts}, got {top_k}",
        )
    if score_func not in ("sigmoid", "softmax"):
        raise coded(
            ValueError,
            "HP453",
            f"TokenChoiceTopKRouter: score_func must be 'sigmoid' or 'softmax', got {score_func!r}",
        )
    if group_score not in ("top2", "max"):
        raise coded(
            ValueError,
            "HP453",
            f"TokenChoiceTopKRouter: group_score must be 'top2' or 'max', got {group_score!r}",
        )


def _check_groups(
    num_experts: int, top_k: int, groups: int | None, limited: int | None
) -> None:
    if groups is None and limited is None:
        return
    if not groups or num_experts % groups or not 1 <= (limited or groups) <= groups:
        raise coded(
            ValueError,
            "HP453",
            f"TokenChoiceTopKRouter: {num_experts} experts cannot be chosen from {limited} of {groups} groups",
        )
    if top_k > num_experts // groups * (limited or groups):
        raise coded(
            ValueError,
            "HP453",
            f"TokenChoiceTopKRouter: {limited} of {groups} groups have fewer than top_k={top_k} experts",
        )
