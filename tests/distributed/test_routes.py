# SPDX-License-Identifier: Apache-2.0
"""Gradients by their routes: the true values, for as few collectives as a careful person would write."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.testing import on_ranks

R, S0, S1 = [Replicate()], [Shard(0)], [Shard(1)]


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def same(mine, true):
    whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
    torch.testing.assert_close(whole.detach(), true.detach(), rtol=1e-10, atol=1e-10)


def leaf(tensor, mesh, placements):
    return distribute_tensor(tensor.clone().requires_grad_(), mesh, placements)


def plain_block(x, ws, out):
    q, k, v = (F.linear(x, w) for w in ws)
    return F.linear(q * k + v, out)


@on_ranks(4)
def test_q_k_v_of_one_input_cost_one_all_reduce_each_way():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    data, ws, out = (
        draw(6, 8),
        [draw(12, 8, seed=i) for i in range(3)],
        draw(8, 12, seed=9),
    )
    x = leaf(data, mesh, R)
    weights, down = [leaf(w, mesh, S0) for w in ws], leaf(out, mesh, S1)
    with CommunicationLedger(mesh) as ledger:
        y = plain_block(x, weights, down)
        assert y.placements == (Partial(),)
        loss = y.redistribute().pow(2).sum()
        loss.backward()
    assert ledger.counts(backward=False) == {"all_reduce": 1}
    assert ledger.counts(backward=True) == {"all_reduce": 1}
    one = [t.clone().requires_grad_() for t in (data, *ws, out)]
    plain_block(one[0], one[1:4], one[4]).pow(2).sum().backward()
    for mine, true in zip((x, *weights, down), one, strict=True):
        same(mine.grad, true.grad)
        assert mine.grad.placements == mine.placements


@on_ranks(4)
def test_three_wrappings_of_one_plain_tensor_share_their_route():
    """As three styles do that each wrap their module's input by themselves."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    data, ws = draw(6, 8), [draw(12, 8, seed=i) for i in range(3)]
    weights = [leaf(w, mesh, S0) for w in ws]

    def spread(x):
        return sum(
            F.linear(DTensor.from_local(x, mesh, R), w).pow(2).sum() for w in weights
        )

    for is_leaf in (True, False):
        x = data.clone().requires_grad_()
        with CommunicationLedger(mesh) as ledger:
            loss = spread(x if is_leaf else x * 1)
            loss.backward()
        assert ledger.counts() == {"all_reduce": 1}, f"leaf {is_leaf}: {ledger.table()}"
        true = data.clone().requires_grad_()
        sum(F.linear(true, w).pow(2).sum() for w in ws).backward()
        same(x.grad, true.grad)
        gone = weakref.ref(x)
        del x, loss
        gc.collect()
        assert gone() is None, "the route must not keep the tensor alive"


@on_ranks(4)
def test_a_gathered_input_costs_a_reduce_scatter():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    data, ws, out = (
        draw(8, 8),
        [draw(12, 8, seed=i) for i in range(3)],
        draw(8, 12, seed=9),
    )
    one = [t.clone().requires_grad_() for t in (data, *ws, out)]
    plain_block(one[0], one[1:4], one[4]).pow(2).sum().backward()
    x = leaf(data, mesh, S0)
    weights, down = [leaf(w, mesh, S0) for w in ws], leaf(out, mesh, S1)
    with CommunicationLedger(mesh) as ledger:
        y = plain_block((x * 1).redistribute(), weights, down)
        rows = y.redistribute(mesh, S0)
        rows.pow(2).sum().backward()
    assert ledger.counts(backward=False) == {
        "all_gather_into_tensor": 1,
        "reduce_scatter_tensor": 1,
    }
    assert ledger.counts(backward=True) == {
        "all_gather_into_tensor": 1,
        "reduce_scatter_tensor": 1,
    }
    for mine, true in zip((x, *weights, down), one, strict=True):
        same(mine.grad, true.grad)


@on_ranks(4)
def test_an_implicit_gather_is_done_once_for_all_consumers():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    data, ws = draw(8, 4), [draw(64, 4, seed=i) for i in range(3)]
    x = leaf(data, mesh, S0)
    weights = [leaf(w, mesh, S0) for w in ws]
    with CommunicationLedger(mesh) as ledger:
        h = x * 1
        loss = sum(F.linear(h, w).pow(2).sum() for w in weights)
        loss.backward()
    assert ledger.counts(backward=False, implicit=True) == {"all_gather_into_tensor": 1}
    assert ledger.counts(backward=True) == {"reduce_scatter_tensor": 1}
    true = data.clone().requires_grad_()
    sum(F.linear(true, w).pow(2).sum() for w in ws).backward()
    same(x.grad, true.grad)


@on_ranks(4)
def test_sharded_and_replicated_consumers_of_one_tensor():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data, w, u = draw(6, 8), draw(12, 8, seed=1), draw(5, 8, seed=2)
    for placements in (
        [Replicate(), Replicate()],
        [Shard(0), Replicate()],
        [Shard(0), Shard(1)],
        [Shard(0), Shard(0)],
    ):
        x = leaf(data, mesh, placements)
        cut, copied = (
            leaf(w, mesh, [Replicate(), Shard(0)]),
            leaf(u, mesh, [Replicate(), Replicate()]),
        )
        whole = x.redistribute(mesh, [placements[0], Replicate()]) * 1
        loss = (
            F.linear(whole, cut).pow(2).sum()
            + F.linear(whole, copied).pow(3).sum()
            + (whole * 3).sum()
        )
        loss.backward()
        one = [t.clone().requires_grad_() for t in (data, w, u)]
        truth = (
            F.linear(one[0], one[1]).pow(2).sum()
            + F.linear(one[0], one[2]).pow(3).sum()
            + (one[0] * 3).sum()
        )
        truth.backward()
        same(loss, truth)
        for mine, true in zip((x, cut, copied), one, strict=True):
            same(mine.grad, true.grad)


@on_ranks(4)
def test_tied_weights_and_accumulation_over_several_backward_calls():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    table, tokens, scale = (
        draw(12, 8),
        torch.tensor([[3, 1, 4], [1, 5, 11]]),
        draw(8, seed=3),
    )
    for placements in (R, S0, S1):
        weight = leaf(table, mesh, placements)
        gain = leaf(scale, mesh, R)
        ids = distribute_tensor(tokens, mesh, R)
        true, true_gain = table.clone().requires_grad_(), scale.clone().requires_grad_()
        for step in range(3):
            hidden = F.embedding(ids, weight) * gain
            loss = F.linear(hidden, weight).pow(2).sum() * (step + 1)
            loss.backward()
            truth = F.linear(F.embedding(tokens, true) * true_gain, true).pow(
                2
            ).sum() * (step + 1)
            truth.backward()
            same(loss, truth)
        same(weight.grad, true.grad)
        same(gain.grad, true_gain.grad)


@on_ranks(2)
def test_a_change_in_place_ends_what_was_remembered():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    data, w = draw(4, 6), draw(8, 6, seed=1)
    x, weight = leaf(data, mesh, R), leaf(w, mesh, S0)
    h = x * 1
    loss = F.linear(h, weight).sum()
    h.mul_(3)
    loss = loss + F.linear(h, weight).pow(2).sum()
    true = data.clone().requires_grad_()
    g = true * 1
    truth = F.linear(g * 1, w).sum()
    g = g * 3
    truth = truth + F.linear(g, w).pow(2).sum()
    same(loss, truth)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # as torch: the first product needs what was overwritten
    x = leaf(data, mesh, R)
    h = x * 1
    first = (h * weight.detach().sum()).sum()
    h.mul_(3)
    second = F.linear(h, weight.detach()).pow(2).sum()
    (first + second).backward()
    true = data.clone().requires_grad_()
    (((true * 1) * w.sum()).sum() + F.linear(true * 3, w).pow(2).sum()).backward()
    same(x.grad, true.grad)
    # Parameters between steps: the value that a gather brought is not used for the next step.
    rows, p = leaf(draw(8, 6, seed=5), mesh, S0), leaf(draw(6, 6, seed=6), mesh, S0)
    for _ in range(3):
        y = F.linear(rows, p)
        true = F.linear(rows.full_tensor().detach(), p.full_tensor().detach())
        same(y, true)
        with torch.no_grad():
            p.add_(0.5)


@on_ranks(2)
def test_a_loss_in_parts_or_in_copies_needs_no_scaling():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    data, w = draw(5, 6), draw(6, seed=1)
    true = w.clone().requires_grad_()
    (data * true).pow(2).sum().backward()
    for placements in (R, S0, S1):
        weight = leaf(w, mesh, R)
        loss = (distribute_tensor(data, mesh, placements) * weight).pow(2).sum()
        assert loss.placements == ((Replicate(),) if placements is R else (Partial(),))
        loss.backward()
        same(weight.grad, true.grad)
    weight = leaf(w, mesh, R)
    loss = (distribute_tensor(data, mesh, S0) * weight).pow(2).sum()
    average = DTensor(
        loss.to_local() * 2, loss.layout.with_placements([Partial("avg")]), ()
    )
    average.backward()
    same(weight.grad, true.grad)


@on_ranks(2)
def test_a_number_in_a_tensor_gets_the_whole_gradient():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    data = draw(5, 6)
    scale, true = (
        torch.tensor(0.5, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    (distribute_tensor(data, mesh, S0) * scale).pow(2).sum().backward()
    (data * true).pow(2).sum().backward()
    same(scale.grad, true.grad)


@on_ranks(4)
def test_a_view_of_a_gathered_tensor_goes_back_by_its_reduce_scatter():
    """As a layer does that flattens batch and sequence of what was gathered for it."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    data, w = draw(2, 8, 6), draw(12, 6, seed=1)

    def layer(x, weight):
        flat = x.view(-1, 6)
        return (
            F.linear(flat, weight).pow(2).sum()
            + F.linear(flat.unflatten(0, (2, 8)).transpose(0, 1), weight).sum()
        )

    true = data.clone().requires_grad_()
    layer(true, w).backward()
    x, weight = leaf(data, mesh, [Shard(1)]), leaf(w, mesh, S0)
    with CommunicationLedger(mesh) as ledger:
        layer((x * 1).redistribute(), weight).backward()
    assert ledger.counts(backward=True) == {"reduce_scatter_tensor": 1}, ledger.table()
    same(x.grad, true.grad)
    # What is changed in place after the view was taken is no longer what was gathered.
    x = leaf(data, mesh, [Shard(1)])
    whole = (x * 1).redistribute()
    flat = whole.view(-1, 6)
    flat.mul_(2.0)
    F.linear(flat, weight.detach()).pow(2).sum().backward()
    true = data.clone().requires_grad_()
    F.linear((true * 2.0).view(-1, 6), w).pow(2).sum().backward()
    same(x.grad, true.grad)
