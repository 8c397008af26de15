# SPDX-License-Identifier: Apache-2.0
"""Compares gradients of gradients under one combination of choices with those of the plain call.

What a tensor is to its gradient, its gradient is to the gradient of that: operands are cut as they are taken, and
directions as the operands are; what arrives is cut as the choice says of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.core.shard.arguments import flat
from hyper_parallel.core.shard.rule import REPLICATE, SUM, AxisUse
from hyper_parallel.testing.rules.choice import OneChoice
from hyper_parallel.testing.rules.gradients import (
    is_differentiable,
    second_gradients_of,
)
from hyper_parallel.testing.rules.pieces import Array, drawn_like

SIDES = ("operands", "results", "grads_in", "grads_out")


@dataclass
class SecondTruth:
    """Gradients of gradients: of the products of each operand's gradient with its direction."""

    directions: list[Any]
    by_operands: list[Any]
    by_weights: list[Any]


def second_truth(
    function: Callable[..., Any], arrays: Sequence[Array], weights: list[Any], rng: Any
) -> SecondTruth | None:
    """Those of the plain call; None where the framework has none, or they are complex."""
    if any(np.iscomplexobj(one) for one in (*arrays, *weights)):
        return None
    directions = [
        drawn_like(array, rng) if is_differentiable(array) else None for array in arrays
    ]
    try:
        found = second_gradients_of(function, arrays, weights, directions)
    except (RuntimeError, NotImplementedError):
        return None
    return None if found is None else SecondTruth(directions, *found)


def compare_second(
    one: OneChoice, operands: Sequence[Any], weights: list[Any], true: SecondTruth
) -> None:
    """Raises an AssertionError where a gradient of gradients is not that of the plain call."""
    if any(
        place.op not in (None, "sum")
        for side in SIDES
        for places in one.places(side)
        for place in places
    ):
        return  # a maximum or product between ranks: tests/distributed/test_second_order.py
    found = _differentiate_twice(one, flat(operands), weights, true.directions)
    if not found:
        return
    leaving = one.of_operands("grads_out")
    for i, gradients in enumerate(
        zip(*(by_operands for by_operands, _ in found), strict=True)
    ):
        expected = true.by_operands[one.caught.ours[i]]
        _require_same(
            one, f"operand {one.caught.rules[i]}", gradients, expected, leaving[i]
        )
    for i, gradients in enumerate(
        zip(*(by_weights for _, by_weights in found), strict=True)
    ):
        # The gradient of a pending sum is a copy on every rank, of which each makes its own use.
        summed = [SUM if place.op else place for place in one.places("results")[i]]
        _require_same(one, f"weight {i}", gradients, true.by_weights[i], summed)


def _differentiate_twice(
    one: OneChoice,
    arrays: Sequence[Array],
    weights: Sequence[Any],
    directions: Sequence[Any],
) -> list[tuple[list[Any], list[Any]]]:
    """Every rank's gradients of gradients, by its operands and by what arrived; none where a kernel has none."""
    taken = list(zip(one.caught.ours, one.of_operands("operands"), strict=True))
    held = [one.pieces.cut(arrays[i], places) for i, places in taken]
    along = [_cut_if_there(one, directions[i], places) for i, places in taken]
    arriving = [
        _cut_if_there(one, *pair)
        for pair in zip(weights, one.places("grads_in"), strict=True)
    ]
    made = []
    for rank, place in enumerate(one.pieces.ranks):
        inputs, factors, direction = (
            [pieces[rank] for pieces in side] for side in (held, arriving, along)
        )
        try:
            found = second_gradients_of(
                one.local_call(place), inputs, factors, direction
            )
        except RuntimeError as error:
            if "is not implemented" in str(
                error
            ):  # a kernel for such shards has no second derivative
                return []
            raise
        made.append(
            (_zeros_like(inputs), _zeros_like(factors)) if found is None else found
        )
    return made


def _cut_if_there(
    one: OneChoice, array: Array | None, places: Sequence[AxisUse]
) -> list[Any]:
    return (
        [None] * len(one.pieces.ranks)
        if array is None
        else one.pieces.cut(array, places)
    )


def _zeros_like(arrays: Sequence[Any]) -> list[Any]:
    return [None if array is None else np.zeros_like(array) for array in arrays]


def _require_same(
    one: OneChoice,
    what: str,
    gradients: Sequence[Any],
    true: Array | None,
    leaving: Sequence[AxisUse],
) -> None:
    """Compares the ranks' gradients, after the sums that are due, with their pieces of the true one."""
    if true is None or gradients[0] is None:
        return
    parts = [REPLICATE if place == SUM or place.op else place for place in leaving]
    right = one.pieces.cut(true, parts)
    for mine, expected in zip(
        one.pieces.sum_over(gradients, leaving), right, strict=True
    ):
        one.pieces.require_same(f"gradient of gradients by {what}", mine, expected)
