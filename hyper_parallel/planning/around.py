# SPDX-License-Identifier: Apache-2.0
"""How modules beside the blocks lie: the vocabulary is sharded by rows, in embeddings and in what computes logits.

plan_around(model, units)            {"model.embed_tokens": (RowwiseParallel(), "derived"), ...}
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hyper_parallel.core.modules.style import ParallelStyle
from hyper_parallel.core.tensor_parallel.style import ColwiseParallel, RowwiseParallel
from hyper_parallel.planning.samples import look_up
from hyper_parallel.platform import get_platform

platform = get_platform()
Planned = tuple[ParallelStyle | None, str]


def plan_around(model: Any, units: Sequence[str]) -> dict[str, Planned]:
    """Styles and sources of embeddings and linear layers that are in no block."""
    modules = dict(_find_beside(model, units))
    vocabulary = _find_vocabulary(model, modules)
    found: dict[str, Planned] = {}
    for name, module in modules.items():
        projection = platform.projection(module)
        assert projection is not None
        weight = dict(platform.own_tensors(module))["weight"]
        rows = int(weight.shape[0])
        is_vocabulary = id(weight) in vocabulary or rows in vocabulary.values()
        if projection.kind == "embedding" and is_vocabulary:
            found[name] = RowwiseParallel(), "derived: the vocabulary"
        elif projection.kind == "linear" and projection.out == 0 and is_vocabulary:
            found[name] = ColwiseParallel(), "derived: the vocabulary"
        else:
            found[name] = None, "replicated: it is in no block"
    return found


def _find_beside(model: Any, units: Sequence[str]) -> Iterator[tuple[str, Any]]:
    inside = tuple(f"{unit}." for unit in units)
    for name, module in platform.get_cells_and_names(model):
        is_projection = platform.projection(module) is not None
        has_weight = "weight" in dict(platform.own_tensors(module))
        if (
            is_projection
            and has_weight
            and name not in units
            and not name.startswith(inside)
        ):
            yield name, module


def _find_vocabulary(model: Any, modules: dict[str, Any]) -> dict[int, int]:
    """The ids of the weights with a row for each token, and how many rows each has."""
    rows = look_up(getattr(model, "config", None), "vocab_size")
    table = _read_input_table(model)
    if table is not None:
        return {id(table): int(table.shape[0])}
    found: dict[int, int] = {}
    outputs: set[int] = set() if rows is None else {rows}
    for module in modules.values():
        projection = platform.projection(module)
        if projection is not None and projection.kind == "linear" and rows is None:
            outputs.add(int(dict(platform.own_tensors(module))["weight"].shape[0]))
    for module in modules.values():
        projection = platform.projection(module)
        weight = dict(platform.own_tensors(module))["weight"]
        is_table = projection is not None and projection.kind == "embedding"
        if is_table and int(weight.shape[0]) in outputs:
            found[id(weight)] = int(weight.shape[0])
    return found


def _read_input_table(model: Any) -> Any:
    """The weight of the embedding that a model of `transformers` says it has."""
    get = getattr(model, "get_input_embeddings", None)
    try:
        module = get() if get is not None else None
    except (AttributeError, NotImplementedError):
        return None
    projection = None if module is None else platform.projection(module)
    if projection is None or projection.kind != "embedding":
        return None
    return dict(platform.own_tensors(module))["weight"]
