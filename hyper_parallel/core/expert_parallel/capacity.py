# SPDX-License-Identifier: Apache-2.0
"""A limit to the tokens that an expert takes, for those who want one: by default no token is dropped.

MoE(dim, hidden_dim, 8, top_k=2, capacity=Capacity(1.25, policy="probs"))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


@dataclass(frozen=True)
class Capacity:
    """An expert takes ceil(factor * tokens * top_k / experts) of a rank's tokens.

    ``policy``: of more tokens it keeps those with the highest weights ("probs"), or the first ones ("position"). What
    an expert does not take adds nothing to the token's output. ``pads``: every expert gets exactly as many rows,
    with zeros where there are fewer, so that shapes do not depend on the routing.
    """

    factor: float
    policy: str = "probs"
    pads: bool = False

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise coded(
                ValueError,
                "HP453",
                f"Capacity: factor must be positive, got {self.factor!r}",
            )
        if self.policy not in ("probs", "position"):
            raise coded(
                ValueError,
                "HP453",
                f"Capacity: policy must be 'probs' or 'position', got {self.policy!r}",
            )

    def limit(self, tokens: int, choices: int, experts: int) -> int:
        """How many of so many tokens an expert takes."""
        return math.ceil(self.factor * tokens * choices / experts)


@dataclass(frozen=True)
class Kept:
    """Tokens with their choices, of which ``left_out`` have no expert: their index is the number of experts.

    ``dropped``: how many of these exceeded a capacity; others only fill up the last token that pads.
    """

    tokens: Any
    index: Any
    weights: Any
    left_out: int = 0
    dropped: int = 0


def keep_within(
    capacity: Capacity | None, tokens: Any, index: Any, weights: Any, experts: int
) -> Kept:
    """What is left of the choices of this rank's tokens; with padding, tokens of zeros come last."""
    if capacity is None:
        return Kept(tokens, index, weights)
    tokens_here, choices = (int(size) for size in index.shape)
    limit = capacity.limit(tokens_here, choices, experts)
    chosen = platform.tensor_to_numpy(platform.detach(index)).reshape(-1)
    priority = -platform.tensor_to_numpy(platform.detach(weights)).reshape(-1)
    kept = _limit(chosen, priority * (capacity.policy == "probs"), limit, experts)
    left_out = dropped = int((kept == experts).sum())
    pads = 0
    if capacity.pads:
        pads = math.ceil(experts * limit / choices)
        kept = _fill(kept, pads * choices, limit, experts)
        left_out = len(kept) - experts * limit
    tokens, weights = (_pad(one, pads) if pads else one for one in (tokens, weights))
    return Kept(tokens, _index(kept, choices, index), weights, left_out, dropped)


def _limit(chosen: Any, priority: Any, limit: int, experts: int) -> Any:
    """The choices without those beyond the limit of their expert, which have none then; low numbers are kept first."""
    positions = np.arange(len(chosen))
    order = np.lexsort([positions, priority, chosen])
    counts = np.bincount(chosen, minlength=experts)
    starts = np.cumsum(counts) - counts
    places = positions - starts[chosen[order]]
    inside = order[places < limit]
    kept = np.full_like(chosen, experts)
    kept[inside] = chosen[inside]
    return kept


def _fill(kept: Any, more: int, limit: int, experts: int) -> Any:
    """The choices, and more of them, so that every expert has as many as it takes."""
    counts = np.bincount(kept, minlength=experts + 1)[:experts]
    filling = np.full(more, experts, dtype=kept.dtype)
    missing = np.repeat(np.arange(experts), limit - counts)
    filling[: len(missing)] = missing
    return np.concatenate([kept, filling])


def _index(values: Any, choices: int, like: Any) -> Any:
    shape = (len(values) // choices, choices)
    raw = np.ascontiguousarray(values.astype(np.int64)).view(np.uint8).reshape(-1)
    return platform.tensor_from_bytes(raw, "int64", shape).to(like.device)


def _pad(values: Any, count: int) -> Any:
    shape = (count, values.shape[1])
    zeros = platform.zeros(shape, dtype=values.dtype, device=values.device)
    return platform.cat([values, zeros], 0)
