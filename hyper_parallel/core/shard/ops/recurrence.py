# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002 - operands have the names that torch gives them
"""Recurrent layers and cells: batches are free, steps and features whole; the weights' gradients are summed.

lstm        "l! b i!, s! b h!, s! b c!, ...  -> l! b o!, s! b h!, s! b c!"      and every weight whole
gru_cell    "b i!, b h!, g! i!, g! h!, g!, g! -> b h!"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from hyper_parallel.core.dtensor.random import seed_of_piece
from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.rule import Rule
from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform

platform = get_platform()


def _states(hx: Any) -> list[Any]:
    return list(hx) if isinstance(hx, (list, tuple)) else [hx]


def _whole(tensors: Sequence[Any]) -> list[str]:
    """The dims of weights that every rank must have."""
    return [
        " ".join(f"w{n}x{i}!" for i in range(len(one.shape)))
        for n, one in enumerate(tensors)
    ]


def _layers(
    input: Any,
    hx: Any,
    params: Any,
    has_biases: Any,
    bidirectional: Any = None,
    batch_first: bool = False,
    **_: Any,
) -> Any:
    states = _states(hx)
    packed = not isinstance(
        has_biases, bool
    )  # sequences of different lengths, whose second argument tells them
    if packed or any(len(one.shape) != 3 for one in (input, *states)):
        return None
    steps = "b l! {}!" if batch_first else "l! b {}!"
    of_states = [f"s! b h{n}!" for n in range(len(states))]
    operands = ", ".join([steps.format("i"), *of_states, *_whole(params)])
    results = ", ".join([steps.format("o"), *of_states])
    text = f"{operands} -> {results}"
    width = states[0].shape[2] * (2 if bidirectional else 1)
    return RuleForCall(
        Rule(text, broadcast="none"), {"o": width}, [input, *states, *params]
    )


def _layers_of_shard(
    here: ShardContext, dropout: float, train: bool, **more: Any
) -> Any:
    drops = dropout and train and more["num_layers"] > 1
    with (
        platform.seeded(seed_of_piece(here.plan.results[0], here.piece))
        if drops
        else nullcontext()
    ):
        return here.function(**more, dropout=dropout, train=train)


for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    operator(
        _name,
        "input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first=False",
        _layers,
        local=_layers_of_shard,
        zeros=True,
    )

# --- one step


def _gates(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any) -> Any:
    """The rule of cells with several gates, which lie one after the other in the rows of the weights."""
    states = _states(hx)
    if any(len(one.shape) != 2 for one in (input, *states)):
        return None
    kept = ", ".join(["b h!", "b c!"][: len(states)])
    rule = Rule(f"b i!, {kept}, g! i!, g! h!, g!, g! -> {kept}", broadcast="none")
    return RuleForCall(rule, operands=[input, *states, w_ih, w_hh, b_ih, b_hh])


def _one_gate(activation: str) -> Callable[..., Any]:
    """A cell by its two products: the rows of the weights, and so the new state, may be cut."""

    def handler(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any) -> Any:
        linear = platform.operator("linear")
        return platform.operator(activation)(
            linear(input, w_ih, b_ih) + linear(hx, w_hh, b_hh)
        )

    return handler


CELL = "input, hx, w_ih, w_hh, b_ih=None, b_hh=None"
operator("lstm_cell gru_cell", CELL, _gates, zeros=True)
operator("rnn_tanh_cell", CELL, handler=_one_gate("tanh"), zeros=True)
operator("rnn_relu_cell", CELL, handler=_one_gate("relu"), zeros=True)
