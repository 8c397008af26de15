# SPDX-License-Identifier: Apache-2.0
"""Results, gradients and gradients of gradients of a function of arrays, by the framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hyper_parallel.platform import get_platform
from hyper_parallel.testing.rules.pieces import Array

Function = Callable[..., list[Any]]  # of tensors; gives tensors


def is_differentiable(array: Array) -> bool:
    """Whether an array's dtype is one that gradients have."""
    return bool(np.issubdtype(array.dtype, np.inexact))


def results_of(function: Function, arrays: Sequence[Array]) -> list[Array]:
    """What a function gives for these arrays."""
    platform = get_platform()
    return [
        platform.tensor_to_numpy(y) for y in function(*map(platform.tensor, arrays))
    ]


def gradients_of(
    function: Function, arrays: Sequence[Array], weights: Sequence[Any]
) -> list[Any]:
    """The gradient of the weighted sum of the results for every array; None for those that have none."""
    platform = get_platform()
    wanted = [i for i, array in enumerate(arrays) if is_differentiable(array)]

    def loss(*tensors: Any) -> Any:
        found = function(*_completed(arrays, wanted, tensors))
        pairs = [(y, w) for y, w in zip(found, weights, strict=True) if w is not None]
        terms = [term for y, w in pairs for term in _weighted(y, w)]
        return sum(terms + [term * 0 for t in tensors for term in _weighted(t, None)])

    made: list[Any] = [None] * len(arrays)
    if wanted and any(w is not None for w in weights):
        found = platform.gradients(loss, [platform.tensor(arrays[i]) for i in wanted])
        for i, gradient in zip(wanted, found, strict=True):
            made[i] = platform.tensor_to_numpy(gradient)
    return made


def second_gradients_of(
    function: Function,
    arrays: Sequence[Array],
    weights: Sequence[Any],
    directions: Sequence[Any],
) -> tuple[list[Any], list[Any]] | None:
    """Gradients of the products of each array's gradient with its direction, by the arrays and by the weights.

    None where the first gradients are constant.
    """
    platform = get_platform()
    wanted = [i for i, direction in enumerate(directions) if direction is not None]
    weighted = [i for i, weight in enumerate(weights) if weight is not None]
    if not wanted or not weighted:
        return None

    def loss(*tensors: Any) -> Any:
        found = function(*_completed(arrays, wanted, tensors[: len(wanted)]))
        factors = zip(weighted, tensors[len(wanted) :], strict=True)
        return sum((found[i] * factor).sum() for i, factor in factors)

    inputs = [platform.tensor(arrays[i]) for i in wanted]
    inputs += [platform.tensor(weights[i]) for i in weighted]
    along = [platform.tensor(directions[i]) for i in wanted]
    found = platform.second_gradients(loss, inputs, [*along, *[None] * len(weighted)])
    if found is None:
        return None
    values = [platform.tensor_to_numpy(one) for one in found]
    by_arrays = _at_places(wanted, values[: len(wanted)], len(arrays))
    return by_arrays, _at_places(weighted, values[len(wanted) :], len(weights))


def _completed(
    arrays: Sequence[Array], wanted: Sequence[int], tensors: Sequence[Any]
) -> list[Any]:
    """Tensors of all arrays, of which some are given."""
    given = dict(zip(wanted, tensors, strict=True))
    return [
        given[i] if i in given else get_platform().tensor(array)
        for i, array in enumerate(arrays)
    ]


def _at_places(places: Sequence[int], values: Sequence[Any], count: int) -> list[Any]:
    """So many places, with the values at theirs and None at the others."""
    found = dict(zip(places, values, strict=True))
    return [found.get(i) for i in range(count)]


def _weighted(result: Any, weight: Array | None) -> list[Any]:
    """Sums whose sum is the real part of that of a result by its weights; not every framework has complex products."""
    platform = get_platform()
    if platform.dtype_kind(result.dtype) != "complex":
        return [(result if weight is None else result * platform.tensor(weight)).sum()]
    real, imaginary = (
        platform.operator("real")(result),
        platform.operator("imag")(result),
    )
    if weight is None:
        return [real.sum()]
    return [
        (real * platform.tensor(weight.real.copy())).sum(),
        (imaginary * platform.tensor(-weight.imag)).sum(),
    ]
