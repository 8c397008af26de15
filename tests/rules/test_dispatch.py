# SPDX-License-Identifier: Apache-2.0
"""Every call of the tables between real ranks, operands in layouts drawn at random, against the plain call."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from layouts import split_for
from rules.cases import CASES, COMPOSITES
from rules.operators import SIZES, draw, flat, leaf, like

from hyper_parallel import DTensor
from hyper_parallel.core.dtensor.layout import Layout, placements_of
from hyper_parallel.core.dtensor.modes import strict
from hyper_parallel.testing import run_ranks

MESHES = [(4,), (2, 2)]
DRAWS = 2  # layouts for each case and sizes, on one mesh after the other
ALL = {case.name: case for case in [*CASES, *COMPOSITES]}
GROUP = 12  # cases for each job: starting the ranks' world costs more than a case


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
    arrays = draw(case, SIZES[sizes], rng)
    place = base.mesh.get_coordinate()
    tensors = []
    for array in flat(arrays):
        layout = some_layout(base, array.ndim, rng, np.issubdtype(array.dtype, np.inexact))
        shard = leaf(split_for(place, array, layout, rng))
        tensors.append(DTensor(shard, layout, array.shape))
    plain = [leaf(array) for array in flat(arrays)]
    told = f"{case.name} ({sizes}, seed {seed}): {[str(t.layout) for t in tensors]}"
    found, expected = case.call(*like(arrays, tensors)), case.call(*like(arrays, plain))
    found, expected = (flat(x if isinstance(x, (tuple, list)) else [x]) for x in (found, expected))
    loss = truth = 0
    for mine, true in zip(found, expected, strict=True):
        assert isinstance(mine, DTensor), told
        assert mine.shape == true.shape, told
        assert mine.dtype == true.dtype, told
        whole = mine.full_tensor()
        same(whole, true, told)
        if true.requires_grad:
            weight = torch.tensor(rng.standard_normal(true.shape)) * (2 - 1j if true.is_complex() else 1)
            loss, truth = loss + (whole * weight).sum().real, truth + (true * weight).sum().real
    if isinstance(truth, int):
        return
    loss.backward()
    truth.backward()
    for mine, true in zip(tensors, plain, strict=True):
        if true.requires_grad and true.grad is not None:
            assert mine.grad is not None, told
            same(mine.grad.full_tensor(), true.grad, f"{told}: gradient", equal_nan=False)


def same(mine, true, told, equal_nan=True):
    if mine.dtype != true.dtype or not torch.equal(mine, true):  # most are, and assert_close costs ten times as much
        torch.testing.assert_close(mine, true, rtol=1e-9, atol=1e-9, msg=lambda m: f"{told}: {m}", equal_nan=equal_nan)


def on_rank(names):
    count = 0
    with warnings.catch_warnings(), strict():
        warnings.simplefilter("error")
        for name, seed in itertools.product(names, range(DRAWS)):
            shape, case = MESHES[seed % len(MESHES)], ALL[name]
            for sizes in case.sizes:
                compare(case, sizes, Layout(shape, tuple("xy"[: len(shape)])), seed)
                count += 1
    return count


NAMES = list(ALL)


@pytest.mark.parametrize("names", [NAMES[i : i + GROUP] for i in range(0, len(NAMES), GROUP)], ids=lambda n: n[0])
def test_any_layouts_of_the_operands(names):
    counts = run_ranks(on_rank, 4, names, timeout=300)
    assert counts == [sum(len(ALL[name].sizes) * DRAWS for name in names)] * 4
