# SPDX-License-Identifier: Apache-2.0
"""Every call of the tables between real ranks, operands in layouts drawn at random, against the plain call."""

import itertools
import math

import numpy as np
import pytest
from layouts import split_for
from rules.cases import CASES, COMPOSITES
from rules.framework import (
    IS_TORCH,
    gradients,
    same,
    unruled_is_an_error,
    weight_of,
    weighted,
)
from rules.operators import flat, leaf, like
from rules.outcomes import RULE, drawn, known, taken, that_run
from thorough import THOROUGH, compare_few_collectives

from hyper_parallel import DTensor
from hyper_parallel.core.dtensor.layout import Layout, placements_of
from hyper_parallel.testing import run_ranks

MESHES = [(4,), (2, 2)]
SEEDS = (
    (0, 1) if THOROUGH else (0,)
)  # layouts for each case and sizes, on one mesh after the other
ALL = {case.name: case for case in [*CASES, *COMPOSITES]}
PLACES = {name: place for place, name in enumerate(ALL)}
# Whose choices rules/test_operators.py tries one by one, on uneven shards and on empty ones.
RULED = {case.name for case in that_run(CASES, RULE)}
GROUP = (
    12 if IS_TORCH else 24
)  # cases for each job: starting the ranks' world costs more than a case


def some_layout(base, ndim, rng, floating):
    """Any dim for any axis, or a pending sum, or a copy."""
    dim_axes, partial = [[] for _ in range(ndim)], [None] * base.mesh.ndim
    for axis in rng.permutation(base.mesh.ndim):
        what = rng.integers(-2, ndim) if floating else rng.integers(-1, ndim)
        if what >= 0:
            dim_axes[what].append(int(axis))
        elif what == -2:
            partial[axis] = "sum"
    return base(list(placements_of(dim_axes, partial, base.mesh_shape))).bind(ndim)


def compare(case, sizes, base, seed):
    """One call with layouts drawn by this seed: results and gradients."""
    rng = np.random.default_rng(seed)
    arrays = drawn(case, sizes, rng)
    place = base.mesh.get_coordinate()
    tensors = []
    for array in flat(arrays):
        layout = some_layout(
            base, array.ndim, rng, np.issubdtype(array.dtype, np.inexact)
        )
        shard = leaf(split_for(place, array, layout, rng))
        tensors.append(DTensor(shard, layout, array.shape))
    told = f"{case.name} ({sizes}, seed {seed}): {[str(t.layout) for t in tensors]}"
    expected, weights = [], []

    def results(leaves):
        found = case.call(*like(arrays, leaves))
        return flat(found if isinstance(found, (tuple, list)) else [found])

    def truth(*leaves):
        expected[:] = results(leaves)
        weights[:] = [weight_of(y, rng) for y in expected]
        return weighted(expected, weights)

    def distributed(*leaves):
        found = results(leaves)
        wholes = []
        for mine, true in zip(found, expected, strict=True):
            assert isinstance(mine, DTensor), told
            assert tuple(mine.shape) == tuple(true.shape), told
            assert mine.dtype == true.dtype, told
            wholes.append(mine.full_tensor())
            same(wholes[-1], true, told)
        return weighted(wholes, weights)

    plain_leaves = [leaf(array) for array in flat(arrays)]
    if not known(case.name).gradients:
        truth(*plain_leaves)
        distributed(*tensors)
        return
    plain = gradients(truth, plain_leaves)
    for mine, true in zip(gradients(distributed, tensors), plain, strict=True):
        if true is not None:
            assert mine is not None, told
            same(mine.full_tensor(), true, f"{told}: gradient", equal_nan=False)


def sizes_of(case):
    """All that a case takes; in CI one of them where its rule is checked anyway, another one for the next case."""
    sizes = taken(case)
    if THOROUGH or not sizes or case.name not in RULED:
        return sizes
    return [sizes[PLACES[case.name] % len(sizes)]]


def meshes_of(name):
    """Elsewhere it is the local functions that are tried, on empty shards too."""
    if IS_TORCH:
        return MESHES
    return [(4,)] if THOROUGH or name not in RULED else [(2,)]


def on_rank(names):
    count = 0
    with unruled_is_an_error(), compare_few_collectives():
        for (number, name), seed in itertools.product(enumerate(names), SEEDS):
            case = ALL[name]
            meshes = meshes_of(name)
            for turn, sizes in enumerate(sizes_of(case), start=number + seed):
                shape = meshes[turn % len(meshes)]
                compare(case, sizes, Layout(shape, tuple("xy"[: len(shape)])), seed)
                count += 1
    return count


NAMES = [case.name for case in that_run(ALL.values())]


def group_names():
    """The cases for each job, which have the same number of ranks."""
    for is_ruled in [None] if IS_TORCH else [True, False]:
        names = [n for n in NAMES if is_ruled is None or (n in RULED) == is_ruled]
        yield from (names[i : i + GROUP] for i in range(0, len(names), GROUP))


@pytest.mark.parametrize("names", list(group_names()), ids=lambda n: n[0])
def test_any_layouts_of_the_operands(names):
    ranks = math.prod(meshes_of(names[0])[0])
    counts = run_ranks(on_rank, ranks, names, timeout=300)
    count = sum(len(sizes_of(ALL[name])) * len(SEEDS) for name in names)
    assert counts == [count] * ranks
