# SPDX-License-Identifier: Apache-2.0
"""How modules with the weights of all experts lie: whole experts on ep, parts of each expert on tp.

plan_experts(model, {"tp": 2})       {"model.layers.0.mlp.experts": (ExpertTensorParallel(), "derived: ..."), ...}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.expert_parallel import (
    ExpertParallel,
    ExpertTensorParallel,
    TensorParallel,
)
from hyper_parallel.core.modules.style import ParallelStyle
from hyper_parallel.planning.trace import find_experts
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import without_hint

platform = get_platform()


def plan_experts(
    model: Any, axes: Mapping[str, int]
) -> dict[str, tuple[ParallelStyle | None, str]]:
    """Styles and sources of the modules with experts; call it within ``platform.simulate_ranks()``."""
    ep, tp = axes.get("ep", 1), axes.get("tp", 1)
    found: dict[str, tuple[ParallelStyle | None, str]] = {}
    for name, module in find_experts(model).items():
        if ep > 1:
            _require(ExpertParallel(), module, "ep", ep)
        obstacle = _find_obstacle(module, tp) if tp > 1 else ""
        if tp > 1 and not obstacle:
            found[name] = ExpertTensorParallel(), "derived: a part of each expert"
        elif ep > 1:
            found[name] = ExpertParallel(), "derived: whole experts"
        elif tp > 1:
            found[name] = None, f"replicated: {obstacle}"
    return found


def _require(style: ParallelStyle, module: Any, axis: str, ranks: int) -> None:
    """Raises what the style raises, before any rank starts."""
    mesh = DeviceMesh("cpu", list(range(ranks)), mesh_dim_names=(axis,))
    style.apply(platform.copy_without_data(module), mesh)


def _find_obstacle(module: Any, ranks: int) -> str:
    """Why parts of each expert cannot be on ranks; empty if they can."""
    try:
        _require(TensorParallel(), module, "tp", ranks)
    except (TypeError, ValueError) as error:
        return without_hint(error)
    return ""
