# SPDX-License-Identifier: Apache-2.0
"""Checks a rule against the operator itself: every choice of every mesh axis, with the ranks simulated in one process.

    count = check_rule(torch.nn.functional.silu, np.random.randn(5, 4))

The call is caught where distributed tensors would be dispatched, so that its rule, its local function and its arguments
are the real ones. Operands are cut as a choice says, in parts of different signs where a reduction is pending; the
local call runs for every rank; the results are put together and compared with the plain call, and then the gradients of
a randomly weighted sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.placement_types import commute
from hyper_parallel.core.shard.arguments import flat
from hyper_parallel.core.shard.rule import BoundRule, Choice
from hyper_parallel.platform import PlatformType, get_platform
from hyper_parallel.platform.error_codes import coded, without_hint
from hyper_parallel.testing.rules.call import CaughtCall, in_form_of
from hyper_parallel.testing.rules.choice import OneChoice
from hyper_parallel.testing.rules.gradients import (
    gradients_of,
    is_differentiable,
    results_of,
)
from hyper_parallel.testing.rules.pieces import Array, Mesh, Pieces, drawn_like
from hyper_parallel.testing.rules.second_order import compare_second, second_truth

MESHES: tuple[Mesh, ...] = ((2,), (4,), (2, 2))
# MindSpore takes a number that a tensor is multiplied by as a float32.
_TOLERANCES = {PlatformType.PYTORCH: 1e-9, PlatformType.MINDSPORE: 1e-6}


def check_rule(
    call: Callable[..., Any],
    *operands: Any,
    meshes: Sequence[Mesh] = MESHES,
    tolerance: float | None = None,
    seed: int = 0,
    gradients: bool = True,
    second: Sequence[Mesh] = (),
) -> int:
    """How many comparisons held; an AssertionError that names the choice where one does not.

    ``operands``: arrays, or lists of arrays. ``call`` is given tensors of them, plain or distributed, and must run one
    operator that has a rule, in which each operand is used once. ``gradients=False`` is for an operator of which the
    framework has no gradient. ``second``: the meshes on which gradients of gradients are compared too, where the
    framework has them.
    """
    rng = np.random.default_rng(seed)
    tolerance = (
        _TOLERANCES[get_platform().platform_type] if tolerance is None else tolerance
    )
    arrays, function = flat(operands), _of_tensors(call, operands)
    expected = results_of(function, arrays)
    weights = [
        drawn_like(y, rng) if gradients and is_differentiable(y) else None
        for y in expected
    ]
    true = gradients_of(function, arrays, weights)
    of_second = (
        second_truth(function, arrays, weights, rng) if second and gradients else None
    )
    done = 0
    for mesh in meshes:
        caught, pieces = CaughtCall(call, operands, mesh), Pieces(mesh, rng, tolerance)
        _check_shapes(caught.bound, expected)
        for combination in _combinations(caught, mesh, meshes):
            one = OneChoice(caught, combination, pieces)
            try:
                one.compare(operands, expected, weights, true)
                if of_second is not None and mesh in second:
                    compare_second(one, operands, weights, of_second)
            except AssertionError as error:
                done_by = (
                    f"{' and '.join(map(str, combination))}: {without_hint(error)}"
                )
                raise coded(
                    AssertionError,
                    "HP604",
                    f"{caught.called.name}: {caught.bound.rule} on {mesh}: {done_by}",
                ) from None
            done += 1
    return done


def choices_of(call: Callable[..., Any], *operands: Any) -> tuple[Choice, ...]:
    """All that one axis may do under the rule of the operator that a call runs."""
    return CaughtCall(call, operands, (2,)).bound.choices()


def _of_tensors(
    call: Callable[..., Any], operands: Sequence[Any]
) -> Callable[..., list[Any]]:
    """The call as a function of all its operands one by one, that gives its results so."""

    def results(*tensors: Any) -> list[Any]:
        found = call(*in_form_of(operands, tensors))
        return flat(found if isinstance(found, (list, tuple)) else [found])

    return results


def _check_shapes(bound: BoundRule, expected: Sequence[Array]) -> None:
    shapes = [tuple(shape) for shape in _flat_shapes(bound.result_shapes)]
    if [y.shape for y in expected] != shapes:
        raise coded(
            AssertionError,
            "HP604",
            f"the rule gives results of shapes {shapes}, the operator {[y.shape for y in expected]}",
        )


def _combinations(
    caught: CaughtCall, mesh: Mesh, meshes: Sequence[Mesh]
) -> Iterator[tuple[Choice, ...]]:
    """What the axes may do together."""
    for combination in itertools.product(caught.bound.choices(), repeat=len(mesh)):
        if fits(caught.bound, combination, mesh) and not _is_seen_elsewhere(
            caught, combination, mesh, meshes
        ):
            yield combination


def fits(bound: BoundRule, combination: Sequence[Choice], mesh: Mesh) -> bool:
    """Whether every factor can be cut so, and the pending reductions of every result can be taken in any order."""
    axes: dict[str, list[int]] = {}
    for choice, ranks in zip(combination, mesh, strict=True):
        if choice.factor:
            axes.setdefault(choice.factor, []).append(ranks)
    pending = zip(*(flat(choice.results) for choice in combination), strict=True)
    return all(bound.fits(f, *ranks) for f, ranks in axes.items()) and all(
        commute(p.op for p in ps) for ps in pending
    )


def _is_seen_elsewhere(
    caught: CaughtCall,
    combination: Sequence[Choice],
    mesh: Mesh,
    meshes: Sequence[Mesh],
) -> bool:
    """Whether another combination makes the same local calls, on ranks in another order or on fewer of them.

    A local function may ask for its place in the mesh; without one nothing but the pieces of the operands counts.
    """
    if caught.op.local is not None:
        return False
    used = tuple(
        ranks
        for choice, ranks in zip(combination, mesh, strict=True)
        if choice.kind != "unused"
    )
    if (
        len(used) < len(mesh)
        and (used or mesh[:1]) in meshes
        and (used or mesh[:1]) != mesh
    ):
        return True
    numbers = [caught.bound.choices().index(choice) for choice in combination]
    return (
        len(set(mesh)) == 1
        and numbers != sorted(numbers)
        and not _cut_one_dim(combination)
    )


def _cut_one_dim(combination: Sequence[Choice]) -> bool:
    """Whether different choices cut the same dim of a tensor, so that it matters which is the outer one."""
    each_side = ("operands", "results", "grads_in", "grads_out")
    different = set(combination)
    for places in (
        zip(*(flat(getattr(choice, side)) for choice in different), strict=True)
        for side in each_side
    ):
        for place in places:
            dims = [one.dim for one in place if one.dim is not None]
            if len(set(dims)) < len(dims):
                return True
    return False


def _flat_shapes(shapes: Sequence[Any]) -> Iterator[Any]:
    for shape in shapes:
        if shape and isinstance(shape[0], tuple):
            yield from shape
        else:
            yield shape
