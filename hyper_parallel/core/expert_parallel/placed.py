# SPDX-License-Identifier: Apache-2.0
"""What styles have said about a module with experts, and how a call of it runs.

place(module, Where(mesh["ep"]), style)                     once
run_on_rows(module, compute, rows, counts)                  in every call
run_on_tokens(module, compute, tokens, choices)             or so
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.expert_parallel.capacity import Capacity
from hyper_parallel.core.expert_parallel.crossing import cross
from hyper_parallel.core.expert_parallel.experts import (
    Experts,
    Where,
    run_rows,
    run_tokens,
)
from hyper_parallel.core.expert_parallel.order import number_rows
from hyper_parallel.platform import get_platform

platform = get_platform()
_PLACED = "_hyper_parallel_experts"

# Of rows sorted by expert, how many each expert has, and the plain parameters by name.
Compute = Callable[[Any, Sequence[int], dict[str, Any]], Any]


@dataclass(frozen=True)
class Placed:
    """Where the experts of a module are; ``exchange`` is the style that brings rows there."""

    where: Where
    exchange: Any = None

    def __deepcopy__(self, memo: Any) -> Placed:
        return self


_NOWHERE = Placed(Where())


def place(module: Any, where: Where, exchange: Any) -> None:
    """Has calls of a module run where its experts are."""
    vars(module)[_PLACED] = Placed(where, exchange)


def placed_of(module: Any) -> Placed:
    """Where the experts of a module are."""
    placed: Placed = vars(module).get(_PLACED, _NOWHERE)
    return placed


def own_parameters(module: Any) -> dict[str, Any]:
    """The module's own parameters and buffers by name, as the module sees them now."""
    return {name: getattr(module, name) for name, _ in platform.own_tensors(module)}


def count_experts(module: Any) -> int:
    """How many experts all ranks have together; 0 for a module without any."""
    return find_size(own_parameters(module))


def find_size(parameters: Mapping[str, Any]) -> int:
    """Dim 0 of the weights among these parameters; 0 without any."""
    for value in parameters.values():
        if len(value.shape) == 3:
            return int(value.shape[0])
    return 0


@dataclass(frozen=True)
class Choices:
    """The experts of each token and their weights, [tokens, k], and what is done with them.

    ``meanwhile``: work that needs no expert, done while rows travel to them.
    """

    index: Any
    weights: Any
    weighs_inputs: bool = False
    capacity: Capacity | None = None
    meanwhile: Callable[[], None] | None = None


def run_on_tokens(module: Any, compute: Compute, tokens: Any, choices: Choices) -> Any:
    """The outputs of the experts that each token has chosen, by their weights."""

    def run(locals_: list[Any], parameters: dict[str, Any]) -> Any:
        experts = _experts_of(module, compute, parameters, choices.meanwhile)
        return run_tokens(
            experts,
            *locals_,
            weighs_inputs=choices.weighs_inputs,
            capacity=choices.capacity,
        )

    tensors = [tokens, choices.index, choices.weights]
    return cross(placed_of(module).where, tensors, own_parameters(module), run)


def run_on_rows(module: Any, compute: Compute, rows: Any, counts: Any) -> Any:
    """The outputs for rows that are sorted by expert, in the same order."""
    where = placed_of(module).where
    if where.divides_tokens or isinstance(rows, DTensor):
        # A part of the rows has other counts: they are tokens that have chosen one expert each.
        index = number_rows(counts.tolist(), rows)
        ones = platform.ones(tuple(index.shape), dtype=rows.dtype, device=rows.device)
        return run_on_tokens(module, compute, rows, Choices(index, ones))

    def run(locals_: list[Any], parameters: dict[str, Any]) -> Any:
        return run_rows(_experts_of(module, compute, parameters), locals_[0], counts)

    return cross(where, [rows], own_parameters(module), run)


def _experts_of(
    module: Any,
    compute: Compute,
    parameters: dict[str, Any],
    meanwhile: Callable[[], None] | None = None,
) -> Experts:
    placed = placed_of(module)

    def compute_own(rows: Any, sizes: Sequence[int]) -> Any:
        return compute(rows, sizes, parameters)

    return Experts(
        module,
        count_experts(module),
        placed.where,
        compute_own,
        placed.exchange,
        meanwhile,
    )
