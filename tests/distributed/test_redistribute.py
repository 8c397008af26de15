# SPDX-License-Identifier: Apache-2.0
"""Redistribution between real ranks: any pair of layouts, the data and the gradient, put together in the parent."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import layouts_on, meshes, own_indices, split_up
from thorough import THOROUGH

from hyper_parallel import DTensor, distribute_tensor, get_platform, init_device_mesh
from hyper_parallel.core.dtensor.collectives import redistribute
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.dtensor.placement_types import Partial, Replicate, Shard
from hyper_parallel.core.dtensor.redistribution import plan
from hyper_parallel.testing import on_ranks, run_ranks

COMBINE = {"sum": np.sum, "avg": np.mean, "max": np.max, "min": np.min, "prod": np.prod}


def coordinates(layout):
    return list(itertools.product(*(range(n) for n in layout.mesh_shape)))


def put_together(shards, layout, shape):
    """The whole from every place's shard; copies must agree."""
    parts = {}
    for place, shard in shards.items():
        whole = np.full(shape, np.nan)
        whole[np.ix_(*own_indices(layout, shape, place))] = shard
        parts[place] = whole
    for placement in reversed(layout.placements):
        grouped = {}
        for place, value in parts.items():
            grouped.setdefault(place[:-1], []).append(value)
        parts = {place: join(placement, values) for place, values in grouped.items()}
    return parts[()]


def join(placement, values):
    if placement.is_partial():
        return COMBINE[placement.reduce_op](np.stack(values), axis=0)
    if placement.is_replicate():
        for value in values[1:]:
            np.testing.assert_array_equal(values[0], value)
        return values[0]
    whole = values[0].copy()
    for value in values[1:]:
        whole = np.where(np.isnan(whole), value, whole)
    return whole


def move(source, target, shape, shards, weights):
    """On a rank: the shard after redistribution, the gradient of the shard before it, the bytes received."""
    place = source.mesh.get_coordinate()
    local = torch.tensor(shards[place], requires_grad=True)
    with CommunicationLedger(source.mesh) as ledger:
        moved = redistribute(local, source, target, shape)
        (moved * torch.tensor(weights[place])).sum().backward()
    return (
        moved.detach().numpy(),
        local.grad.numpy(),
        (ledger.nbytes(backward=False), ledger.nbytes(backward=True)),
    )


def check(source, target, shape, seed):
    rng = np.random.default_rng(seed)
    whole, weight = (
        rng.uniform(0.5, 2.0, shape) * rng.choice([-1.0, 1.0], shape),
        rng.standard_normal(shape),
    )
    shards = split_up(whole, source, rng)
    weights = split_up(
        weight * share_of_averages(source, target),
        gradients_by_part(source, target, "max min"),
        rng,
    )
    results = run_ranks(
        move, source.mesh.size(), source, target, shape, shards, weights
    )
    places = coordinates(source)
    moved = {place: results[rank][0] for rank, place in enumerate(places)}
    for place in places:
        expected = [len(i) for i in own_indices(target, shape, place)]
        assert list(moved[place].shape) == expected
    np.testing.assert_allclose(
        put_together(moved, target, shape), whole, rtol=1e-10, atol=1e-10
    )
    check_bytes(source, target, shape, [result[2] for result in results])
    check_gradients(
        source,
        target,
        shape,
        weight,
        shards,
        {p: results[r][1] for r, p in enumerate(places)},
    )


def gradients_by_part(source, target, ops):
    """How the gradient arrives: as the tensor lies, whole where a sum is pending, and of a maximum or a product that
    became pending a part on every rank; of a product only the first part counts, the others are ones."""
    arriving = list(target.reset_partial().placements)
    for axis, (before, after) in enumerate(
        zip(source.placements, target.placements, strict=True)
    ):
        if after.is_partial() and before != after and after.reduce_op in ops.split():
            arriving[axis] = Partial()
    return target.with_placements(arriving)


def share_of_averages(source, target):
    """What a part of an average that became pending gets of the gradient."""
    pairs = zip(source.placements, target.placements, source.mesh_shape, strict=True)
    return 1 / np.prod(
        [n for before, after, n in pairs if after.is_partial("avg") and before != after]
    )


def check_bytes(source, target, shape, received):
    """No rank receives more than the plans say, and some rank as much where the pieces are even."""
    if any(
        p.is_partial() and p.reduce_op not in ("sum", "avg") for p in source.placements
    ):
        return  # these are reduced before the plan, and their backward has a plan of its own
    even = all(size % source.mesh.size() == 0 for size in shape)
    backward = (
        gradients_by_part(source, target, "max min prod"),
        source.reset_partial(),
    )
    for way, (before, after) in enumerate([(source, target), backward]):
        most = max(rank[way] for rank in received)
        planned = plan(before, after, shape, 8).nbytes
        assert most == planned if even else most <= planned, plan(
            before, after, shape, 8
        ).explain()


def check_gradients(source, target, shape, weight, shards, gradients):
    for place, gradient in gradients.items():
        mine = np.ix_(*own_indices(source, shape, place))
        expected = weight[mine]
        changed = [
            (b, n)
            for b, a, n in zip(
                source.placements, target.placements, source.mesh_shape, strict=True
            )
            if b != a
        ]
        for placement, count in changed:
            if placement.is_partial("avg"):
                expected = expected / count
        if any(
            p.is_partial() and p.reduce_op in ("max", "min", "prod") for p, _ in changed
        ):
            expected = expected * nonlinear_share(source, target, shards, place)
        np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-9)


def nonlinear_share(source, target, shards, place):
    """How the whole depends on a part, axis by axis: 1 for the part that won, the product of the others."""
    share = 1.0
    current = dict(shards)
    for axis, (before, after) in enumerate(
        zip(source.placements, target.placements, strict=True)
    ):
        if (
            not before.is_partial()
            or before == after
            or before.reduce_op not in ("max", "min", "prod")
        ):
            continue
        line = [
            (*place[:axis], i, *place[axis + 1 :])
            for i in range(source.mesh_shape[axis])
        ]
        values = np.stack([current[p] for p in line])
        result = COMBINE[before.reduce_op](values, axis=0)
        own = current[place]
        share = share * (
            (own == result) if before.reduce_op in ("max", "min") else result / own
        )
        reduced = {}
        for p in current:
            its_line = [
                (*p[:axis], i, *p[axis + 1 :]) for i in range(source.mesh_shape[axis])
            ]
            reduced[p] = COMBINE[before.reduce_op](
                np.stack([current[q] for q in its_line]), axis=0
            )
        current = reduced
    return share


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_any_layout_to_any_other(ranks):
    @settings(max_examples=80 if THOROUGH else 25, deadline=None, derandomize=True)
    @given(
        meshes(ranks).flatmap(lambda mesh: layouts_on(mesh, count=2, longest=3)),
        st.integers(0, 1000),
    )
    def property_holds(drawn, seed):
        check(*drawn, seed)

    property_holds()


@pytest.mark.parametrize("shape", [(8, 8), (4, 12), (7, 5), (3, 1)])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("a", "None"), ("None", "a")),
        (("a", "b"), ("b", "a")),
        ((("a", "b"), "None"), (("b", "a"), "None")),
        (("b", "None"), (("a", "b"), "None")),
        ((("b", "a"), "None"), ("None", ("a", "b"))),
        (("None", "None"), ("b", "a")),
        (("a", "b"), ("None", "None")),
    ],
)
def test_nested_and_uneven_shards(source, target, shape):
    layout = Layout((2, 2), ("a", "b"))
    check(layout(*source), layout(*target), shape, seed=1)


@on_ranks(4)
def test_what_stays_is_not_touched():
    layout = Layout((4,), ("x",))
    local = torch.ones(2, requires_grad=True)
    assert redistribute(local, layout([Shard(0)]), layout([Shard(-1)]), (8,)) is local
    moved = redistribute(local, layout([Replicate()]), layout([Partial("max")]), (2,))
    (
        moved / 4
    ).sum().backward()  # the parts that tie share the gradient, as those of a maximum do
    assert local.grad.tolist() == [1, 1]
    assert get_platform().get_rank() == layout.mesh.get_coordinate()[0]


@on_ranks(4)
def test_dtypes_that_travel_as_bytes_in_shards_of_different_sizes():
    mesh = init_device_mesh("cpu", (4,))
    for dtype in (torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn):
        whole = (torch.arange(35) % 2).reshape(7, 5).to(dtype)  # 2, 2, 1 and no columns
        found = distribute_tensor(whole, mesh, [Shard(1)]).full_tensor()
        assert torch.equal(found.to(torch.complex64), whole.to(torch.complex64)), dtype


@on_ranks(4)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([Shard(0), Shard(1)], [Replicate(), Replicate()]),
        ([Shard(0), Replicate()], [Shard(1), Shard(0)]),
        ([Partial(), Shard(0)], [Shard(1), Replicate()]),
        ([Replicate(), Replicate()], [Shard(0), Shard(1)]),
        ([Partial("max"), Shard(0)], [Replicate(), Replicate()]),
    ],
)
def test_a_redistribution_that_is_waited_for_is_the_same(source, target):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    local = torch.arange(12.0, dtype=torch.float64).view(4, 3) + mesh.rank
    weight = torch.randn(8, 8, dtype=torch.float64)[:1, :1]
    gradients = []
    for async_op in (False, True):
        leaf = local.clone().requires_grad_()
        x = DTensor.from_local(leaf, mesh, source)
        moved = x.redistribute(placements=target, async_op=async_op)
        found = moved.wait() if async_op else moved
        assert moved is found or moved.wait() is found
        (found.full_tensor() * weight).sum().backward()
        gradients.append((found.to_local().detach(), leaf.grad))
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


@on_ranks(2)
def test_communication_has_started_before_the_wait():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    x = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    with CommunicationLedger(mesh) as ledger:
        pending = x.redistribute(placements=[Replicate()], async_op=True)
        assert ledger.counts() == {"all_gather_into_tensor": 1}
        assert torch.equal(pending.wait().to_local(), torch.arange(6.0))
    assert ledger.counts() == {"all_gather_into_tensor": 1}
    pending = x.redistribute(placements=[Replicate()], async_op=True)
    x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place between"):
        pending.wait()
