# SPDX-License-Identifier: Apache-2.0
"""The plan that a model of `transformers` carries, in our words, and what of it does not fit the model.

own = read_own_plan(model)
own.kinds                    {"model.layers.0.self_attn.q_proj": Kind.COLUMNS, ...}
own.notes                    ("the model's plan names layers.*.mlp.up, which it does not have",)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hyper_parallel.core.shard.sharding_plan import matching
from hyper_parallel.platform import get_platform

platform = get_platform()


class Kind(Enum):
    """How a projection may lie along an axis."""

    COLUMNS = "columns"
    SECTIONS = "columns of each section"
    GATHERED = "columns, and its output is gathered"
    ROWS = "rows"
    WHOLE = "replicated"


# A module that is not named is replicated, with exact gradients whatever its consumers are, so that the styles with
# which transformers asks for a sum of such gradients need no counterpart.
_KINDS = {
    "colwise": Kind.COLUMNS,
    "colwise_rep": Kind.GATHERED,
    "colwise_gather_output": Kind.GATHERED,
    "packed_colwise": Kind.SECTIONS,
    "rowwise": Kind.ROWS,
    "rowwise_rep": Kind.ROWS,
    "rowwise_split_input": Kind.ROWS,
    "embedding_rowwise": Kind.ROWS,
    "embedding_colwise": Kind.COLUMNS,
    "all_reduce": Kind.WHOLE,
    "mla_kv_a_proj": Kind.WHOLE,
    "replicate": Kind.WHOLE,
    "replicated_with_grad_allreduce": Kind.WHOLE,
    "sequence_parallel": Kind.WHOLE,
}
# Of modules and tensors with experts, which are planned by the weights that they hold.
_OF_EXPERTS = frozenset(
    {"moe_tp_experts", "moe_identity_expert", "ep_router", "ep_dispatch_experts"}
)


@dataclass(frozen=True)
class OwnPlan:
    """How the model's own plan places each module that it names."""

    kinds: dict[str, Kind] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_own_plan(model: Any) -> OwnPlan:
    """The model's plan for tensor parallelism; without one, or without a usable one, it names nothing."""
    given = getattr(model, "_tp_plan", None) or {}
    modules = dict(platform.get_cells_and_names(model))
    parameters = platform.parameters_dict(model)
    kinds: dict[str, Kind] = {}
    notes: list[str] = []
    for pattern, word in given.items():
        names = matching(pattern, modules)
        if not names and not matching(pattern, parameters):
            notes.append(f"{pattern} is in the model's plan, but not in the model")
        if word in _OF_EXPERTS or not names:
            continue
        if word not in _KINDS:
            notes.append(f"{pattern}: {word!r} of the model's plan is unknown; derived")
            continue
        linear = [name for name in names if platform.projection(modules[name])]
        kinds |= dict.fromkeys(linear, _KINDS[word])
    return OwnPlan(kinds, tuple(notes))
