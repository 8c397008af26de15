# SPDX-License-Identifier: Apache-2.0
"""Calls of users as cases, their operands, and the check of a case's rule."""

from dataclasses import dataclass, field

import numpy as np

from hyper_parallel.platform import PlatformType, get_platform
from hyper_parallel.testing import check_rule

IS_TORCH = get_platform().platform_type is PlatformType.PYTORCH
# The rules are the same for every framework; elsewhere it is the local functions that are tried, on empty shards too.
MESHES = ((2,), (4,), (2, 2)) if IS_TORCH else ((4,),)
SIZES = {
    "even": {"a": 4, "b": 8, "c": 12},
    "uneven": {"a": 5, "b": 6, "c": 7},
    "empty": {"a": 3, "b": 2, "c": 1},
}


@dataclass
class OpCase:
    """A call of a user. ``shapes``: letters are sizes, "." a scalar, [ab,cb] a list; ``call`` gets the operands.

    ``ints``: operand -> upper bound (a number or a letter) of integers instead of floats; a bound of 2 gives booleans
    where ``bools`` names the operand. ``positive``: the operands that must be above zero. ``complexes``: those with
    imaginary parts. ``sizes``: which of SIZES fit (an operator may need a divisible size). ``shards``, ``carries``: the
    factors that may be sharded (None: not compared) and the number of ways for a Partial to pass.
    """

    name: str
    call: object
    shapes: str
    shards: str | None = None
    carries: int | None = None
    ints: dict = field(default_factory=dict)
    bools: tuple = ()
    positive: tuple = ()
    complexes: tuple = ()
    sizes: tuple = ("even", "uneven", "empty")


def draw(case, sizes, rng):
    """The operands as arrays; a list for a list."""

    def one(number, text):
        shape = (
            [] if text == "." else [sizes.get(letter) or int(letter) for letter in text]
        )
        if number in case.ints or number in case.bools:
            bound = case.ints.get(number, 2)
            drawn = rng.integers(0, sizes.get(bound, bound), shape)
            return drawn.astype(bool) if number in case.bools else drawn
        drawn = rng.uniform(0.3, 2.0, shape)
        drawn = (
            drawn if number in case.positive else drawn * rng.choice([-1.0, 1.0], shape)
        )
        return (
            drawn + 1j * rng.standard_normal(shape)
            if number in case.complexes
            else drawn
        )

    return [
        [one(i, t) for t in text[1:-1].split(",")] if text[0] == "[" else one(i, text)
        for i, text in enumerate(case.shapes.split())
    ]


def in_precision(operands, dtype):
    """The operands with their floating numbers, or complex ones, in another precision."""

    def cast(array):
        if not np.issubdtype(array.dtype, np.inexact):
            return array
        return array.astype(
            {"float64": np.complex128, "float32": np.complex64}[dtype]
            if array.imag.any()
            else dtype
        )

    return [
        [cast(x) for x in one] if isinstance(one, list) else cast(one)
        for one in operands
    ]


def leaf(array):
    platform = get_platform()
    made = platform.tensor(array)
    if np.issubdtype(np.asarray(array).dtype, np.inexact):
        platform.set_requires_grad(made, True)
    return made


def flat(items):
    return [
        x
        for item in items
        for x in (item if isinstance(item, (tuple, list)) else [item])
    ]


def like(structure, leaves):
    leaves = iter(leaves)
    return [
        [next(leaves) for _ in s] if isinstance(s, list) else next(leaves)
        for s in structure
    ]


def check(
    case, sizes, dtype="float64", meshes=MESHES, gradients=True, second_order=True
):
    """Compares every choice on every mesh with the plain call; the number of comparisons."""
    operands = in_precision(draw(case, sizes, np.random.default_rng(0)), dtype)
    tolerance = None if dtype == "float64" else 1e-4
    second = [(2,)] if IS_TORCH and second_order else []
    return check_rule(
        case.call,
        *operands,
        meshes=meshes,
        tolerance=tolerance,
        gradients=gradients,
        second=second,
    )
