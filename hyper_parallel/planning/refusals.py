# SPDX-License-Identifier: Apache-2.0
"""What a model and a mesh cannot do together, said before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.planning.roles import ROLES, format_axes
from hyper_parallel.platform.error_codes import coded

_HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads")


def check_model(model: Any, axes: Mapping[str, int]) -> None:
    """Raises if a mesh of these axes has no plan for the model."""
    unknown = [name for name in axes if name not in ROLES]
    if unknown or not axes:
        named = f"axis {unknown[0]!r} has" if unknown else "the axes have"
        raise coded(
            ValueError,
            "HP904",
            f"auto_plan: {named} no role; name the axes of the mesh {', '.join(ROLES)}",
        )
    config = getattr(model, "config", None)
    _refuse_quantised(model, config)
    check_heads(config, axes)


def check_heads(config: Any, axes: Mapping[str, int]) -> None:
    """Raises if the heads of queries cannot be shared by the ranks along tp."""
    ranks, heads = axes.get("tp", 1), count_heads(config)
    if heads is not None and heads % ranks:
        raise coded(
            ValueError,
            "HP901",
            f"auto_plan: {heads} attention heads cannot be shared by tp={ranks} in {format_axes(axes)}; choose a size "
            f"of tp that divides them: {', '.join(map(str, _divisors(heads)))}",
        )


def count_heads(config: Any) -> int | None:
    """The number of heads of queries that a config has, of its text if it has several parts."""
    for one in (getattr(config, "text_config", None), config):
        for name in _HEADS:
            heads = getattr(one, name, None)
            if isinstance(heads, int) and heads > 0:
                return heads
    return None


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _refuse_quantised(model: Any, config: Any) -> None:
    method = getattr(config, "quantization_config", None)
    if method is None and not getattr(model, "is_quantized", False):
        return
    raise coded(
        ValueError,
        "HP903",
        "auto_plan: the model's weights are quantised; they are packed in ways that no placement describes, and they "
        "cannot be trained: load the model with unquantised weights",
    )
