# SPDX-License-Identifier: Apache-2.0
"""Styles as recipes write them, and back.

to_style({"style": "colwise", "heads": 8})          ColwiseParallel(heads=8)
to_words(ColwiseParallel(heads=8))                  {"style": "colwise", "heads": 8}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from hyper_parallel.core.dtensor.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.expert_parallel import ExpertParallel, ExpertTensorParallel
from hyper_parallel.core.modules.style import ParallelStyle
from hyper_parallel.core.tensor_parallel.style import (
    ColwiseParallel,
    FusedColwiseParallel,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
)

STYLES: dict[str, Callable[..., ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "fused_colwise": FusedColwiseParallel,
    "sequence": SequenceParallel,
    "replicate": Replicated,
    "experts": lambda **_: ExpertParallel(),
    "parts_of_experts": lambda **_: ExpertTensorParallel(),
}
_NAMES: dict[type, str] = {
    ColwiseParallel: "colwise",
    RowwiseParallel: "rowwise",
    FusedColwiseParallel: "fused_colwise",
    SequenceParallel: "sequence",
    Replicated: "replicate",
    ExpertParallel: "experts",
    ExpertTensorParallel: "parts_of_experts",
}
_OPTIONS = {"input": "input_layouts", "output": "output_layouts"}


def to_style(words: str | Mapping[str, Any], **more: Any) -> ParallelStyle:
    """The style that a recipe means; ``more``: further options of it."""
    given = {"style": words} if isinstance(words, str) else dict(words)
    kind = given.pop("style")
    options = {_OPTIONS.get(name, name): value for name, value in given.items()}
    for name in _OPTIONS.values():
        if isinstance(options.get(name), str):
            options[name] = _to_placement(options[name])
    return STYLES[kind](**options, **more)


def _to_placement(text: str) -> Placement:
    found = re.search(r"-?\d+", text)
    return Shard(int(found[0])) if found else Replicate()


def to_words(style: ParallelStyle) -> str | dict[str, Any]:
    """What a recipe says for a style: its name alone if it has no options."""
    words: dict[str, Any] = {"style": _NAMES[type(style)]}
    for name, option in _OPTIONS.items():
        placement = getattr(style, option, None)
        if placement is not None:
            is_sharded = isinstance(placement, Shard)
            words[name] = f"shard({placement.dim})" if is_sharded else "replicate"
    for name in ("heads", "sections"):
        value = getattr(style, name, None)
        if value is not None:
            words[name] = list(value) if isinstance(value, tuple) else value
    if isinstance(style, SequenceParallel) and style.sequence_dim != 1:
        words["sequence_dim"] = style.sequence_dim
    return words["style"] if len(words) == 1 else words
