# SPDX-License-Identifier: Apache-2.0
"""Modules with experts that were written for one device: their own forward computes this rank's experts.

Two kinds are known by the arguments of forward: (hidden_states, top_k_index, top_k_weights), as in transformers, and
(rows sorted by expert, tokens per expert), as in torchtitan.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.expert_parallel.order import number_rows
from hyper_parallel.core.expert_parallel.placed import (
    Choices,
    count_experts,
    find_size,
    run_on_rows,
    run_on_tokens,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()
_OF_TOKENS = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),  # GPT-OSS
)


def take_over(module: Any, name: str) -> None:
    """Has a module run where its experts are, whatever it is called with; ``name``: of the style, for messages."""
    kind: Any = type(module)
    if hasattr(kind, "runs_where_experts_are"):
        return
    if not count_experts(module):
        raise coded(
            TypeError,
            "HP455",
            f"{name}: {kind.__name__} has no weights of all experts in one tensor, [experts, out, in]; apply the style "
            "to the module that has them",
        )
    module.__class__ = _class_for(kind, _is_of_tokens(module, name))


def _is_of_tokens(module: Any, name: str) -> bool:
    method = platform.get_cell_construct(module)
    names = tuple(inspect.signature(method).parameters)
    if names[:3] in _OF_TOKENS:
        return True
    if len(names) == 2:
        return False
    raise coded(
        TypeError,
        "HP455",
        f"{name}: forward of {type(module).__name__} takes {names}; expected (hidden_states, top_k_index, "
        "top_k_weights), or rows sorted by expert and the number of tokens per expert",
    )


@functools.cache
def _class_for(kind: Any, is_of_tokens: bool) -> Any:
    def run_tokens(
        self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any
    ) -> Any:
        choices = Choices(top_k_index, top_k_weights)
        compute = functools.partial(_compute_tokens, self, kind)
        return run_on_tokens(self, compute, hidden_states, choices)

    def run_rows(self: Any, rows: Any, counts: Any) -> Any:
        compute = functools.partial(_compute_rows, self, kind)
        return run_on_rows(self, compute, rows, counts)

    run = run_tokens if is_of_tokens else run_rows
    members = {"forward": run, "construct": run, "runs_where_experts_are": True}
    return type(f"Parallel{kind.__name__}", (kind,), members)


def _compute_tokens(
    module: Any, kind: Any, rows: Any, sizes: Sequence[int], parameters: dict[str, Any]
) -> Any:
    """Rows are tokens that have chosen one expert each; weights are applied where the tokens come from."""
    if not rows.shape[0]:
        return _compute_nothing(rows, parameters)
    index = number_rows(sizes, rows)
    weights = platform.ones(tuple(index.shape), dtype=rows.dtype, device=rows.device)
    own = _local_module(module, kind, parameters)
    return platform.get_cell_construct(own)(rows, index, weights)


def _compute_rows(
    module: Any, kind: Any, rows: Any, sizes: Sequence[int], parameters: dict[str, Any]
) -> Any:
    if not rows.shape[0]:
        return _compute_nothing(rows, parameters)
    counts = platform.tensor(list(sizes)).to(rows.device)
    own = _local_module(module, kind, parameters)
    return platform.get_cell_construct(own)(rows, counts)


def _compute_nothing(rows: Any, parameters: dict[str, Any]) -> Any:
    """No rows, in whose backward parameters get gradients of zeros as on other ranks."""
    trained = [one for one in parameters.values() if platform.requires_grad(one)]
    return platform.keep_in_graph(rows * 1, [rows, *trained])


def _local_module(module: Any, kind: Any, parameters: dict[str, Any]) -> Any:
    """The module with this rank's experts only, for one call."""
    own = platform.with_tensors(module, kind, parameters)
    if "num_experts" in vars(own):
        vars(own)["num_experts"] = find_size(parameters)
    return own
