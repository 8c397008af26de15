# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in a training: their bias after each step, and what is told of their load."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.expert_parallel import ExpertLoad, MoE, update_expert_bias
from hyper_parallel.platform import get_platform
from hyper_parallel.recipe.schema import Recipe

platform = get_platform()


def has_experts(recipe: Recipe) -> bool:
    """Whether a recipe says anything of experts; the same on every rank."""
    styles = {style.style for style in recipe.plan.styles.values()}
    is_shared = "ep" in recipe.axes or bool(styles & {"experts", "parts_of_experts"})
    return is_shared or bool(recipe.experts.bias_rate)


def update_biases(model: Any, mesh: DeviceMesh | None, rate: float) -> None:
    """Moves the bias of all experts by what all ranks counted; a collective call of the ranks of a stage."""
    if mesh is not None:
        names = tuple(name for name in mesh.mesh_dim_names or () if name != "pp")
        mesh = mesh[names] if names else None
    for _, module in platform.get_cells_and_names(model):
        if isinstance(module, MoE):
            update_expert_bias(module, rate, mesh=mesh)


def describe_load(load: ExpertLoad, mesh: DeviceMesh | None) -> dict[str, Any]:
    """What the log has of a step's experts; a collective call of all ranks.

    ``expert_tokens``: for every rank, how many rows of its tokens each expert got, over all layers. ``expert_dropped``
    and ``expert_bytes``: by rank. ``expert_imbalance``: the rows of the busiest expert over the average.
    """
    own = (_count_tokens(load), load.dropped, load.nbytes)
    ranks = [own] if mesh is None else [own] * mesh.size()
    if mesh is not None:
        platform.all_gather_object(ranks, own)
    tokens, dropped, nbytes = (list(numbers) for numbers in zip(*ranks, strict=True))
    totals = _add(tokens)
    return {
        "expert_imbalance": max(totals) * len(totals) / max(1, sum(totals))
        if totals
        else 1.0,
        "expert_tokens": tokens,
        "expert_dropped": dropped,
        "expert_bytes": nbytes,
    }


def _count_tokens(load: ExpertLoad) -> list[int]:
    """By expert; layers may have different numbers of them."""
    return _add([call.counts for call in load.calls])


def _add(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in itertools.zip_longest(*rows, fillvalue=0)]
