# SPDX-License-Identifier: Apache-2.0
"""Reshapes and indices drawn at random: their rules are made from shapes, and shapes have many corners."""

import random

import numpy as np
import pytest
from rules.framework import IS_TORCH
from thorough import THOROUGH

from hyper_parallel.platform import get_platform
from hyper_parallel.testing import check_rule

MESHES = [(2,), (3,), (2, 2)]
# The rules are the same elsewhere, where each draw takes eight times as long.
COUNT = 60 if IS_TORCH or THOROUGH else 24


def factors(rng, size):
    """Sizes with that product, some of them one."""
    found = []
    while size > 1:
        found.append(rng.choice([n for n in range(2, size + 1) if size % n == 0]))
        size //= found[-1]
    for _ in range(rng.randint(0, 2)):
        found.insert(rng.randint(0, len(found)), 1)
    return found


def reshape(rng):
    size = rng.choice([1, 2, 6, 8, 12, 16, 18, 24])
    old, new = factors(rng, size), factors(rng, size)
    if rng.random() < 0.15:  # of nothing, in other sizes
        new = factors(rng, rng.choice([1, 4, 6]))
        for shape in (old, new):
            shape.insert(rng.randint(0, len(shape)), 0)
    return old, lambda x: x.reshape(new), new


def index(rng):
    shape = [rng.randint(0, 5) for _ in range(rng.randint(1, 3))]
    items = []
    for size in shape[: rng.randint(0, len(shape))]:
        bounds = (
            rng.choice([None, 0, 1, -1, -9]),
            rng.choice([None, 1, 3, -1, 9]),
            rng.choice([None, 1, 2, 3]),
        )
        items.append(
            rng.randint(-size, size - 1)
            if size and rng.random() < 0.3
            else slice(*bounds)
        )
        items += [None] * (rng.random() < 0.2)
    items += [...] * (rng.random() < 0.2)
    return shape, lambda x: x[tuple(items)], items


def is_taken(call, array):
    """Whether the framework itself has a gradient of the call; MindSpore has none of some parts of nothing."""
    try:
        get_platform().gradients(
            lambda x: call(x).sum(), [get_platform().tensor(array)]
        )
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("draw", [reshape, index])
def test_moves_drawn_at_random(draw):
    done = 0
    for seed in range(COUNT):
        rng = random.Random(seed)
        shape, call, asked = draw(rng)
        array = np.random.default_rng(seed).standard_normal(shape)
        if IS_TORCH or is_taken(call, array):
            try:
                assert check_rule(call, array, meshes=MESHES[: seed % 3 + 1]) > 0
            except Exception as error:
                raise AssertionError(f"{shape} as {asked}") from error
            done += 1
    assert done == COUNT if IS_TORCH else done > COUNT * 2 / 3
