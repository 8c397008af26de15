# SPDX-License-Identifier: Apache-2.0
"""Parts of parameters' gradients, added up at the end of backward: the true values, however backward is run."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from torch import nn

from hyper_parallel import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.dtensor import reducer
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.testing import on_ranks

PARAMETERS = 4  # of the net


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x):
        return torch.tanh(self.up(self.norm(x)))


def both(mesh_shape=(2,), names=("dp",)):
    """The net on one device, on a mesh, and the same data for both, its rows cut."""
    torch.manual_seed(0)
    one = Net().double()
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    many = distribute_module(copy.deepcopy(one), mesh)
    x = torch.randn(8, 6, dtype=torch.float64)
    return one, many, x, distribute_tensor(x, mesh, [Shard(0)] * mesh.ndim), mesh


def same(mine, true):
    torch.testing.assert_close(
        mine.full_tensor().detach(), true.detach(), rtol=1e-10, atol=1e-10
    )


def same_gradients(many, one):
    for mine, true in zip(many.parameters(), one.parameters(), strict=True):
        assert mine.grad.placements == mine.placements
        same(mine.grad, true.grad)


@on_ranks(4)
def test_all_parameters_share_one_collective():
    for shape, names in (((4,), ("dp",)), ((2, 2), ("dp", "cp"))):
        one, many, x, mine, mesh = both(shape, names)
        one(x).pow(2).sum().backward()
        loss = many(mine).pow(2).sum()
        with CommunicationLedger(mesh) as ledger:
            loss.backward()
        assert ledger.counts() == {"all_reduce": 1}, ledger.table()
        assert ledger.counts(backward=True, implicit=True) == {"all_reduce": 1}
        same_gradients(many, one)


@on_ranks(2)
def test_gradients_add_up_over_several_backward_calls():
    one, many, x, mine, _ = both()
    for step in range(3):
        one(x * (step + 1)).pow(2).sum().backward()
        many(mine * (step + 1)).pow(2).sum().backward()
        same_gradients(many, one)
    loss, true = many(mine).sum(), one(x).sum()
    for _ in range(2):  # the same graph twice
        loss.backward(retain_graph=True)
        true.backward(retain_graph=True)
    same_gradients(many, one)


@on_ranks(2)
def test_several_buckets_and_dtypes():
    one, many, x, mine, mesh = both()
    one.up.float(), many.up.float()

    def run(net, x):
        return net.up(net.norm(x).float()).pow(2).sum()

    run(one, x).backward()
    with CommunicationLedger(mesh) as ledger:
        run(many, mine).backward()
    assert ledger.counts() == {"all_reduce": 2}, ledger.table()  # one a dtype
    for mine_, true in zip(many.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(
            mine_.grad.full_tensor(), true.grad, rtol=1e-5, atol=1e-5
        )
    largest, reducer.BUCKET_BYTES = (
        reducer.BUCKET_BYTES,
        1,
    )  # byte: every parameter fills one
    try:
        one, many, x, mine, mesh = both()
        one(x).sum().backward()
        with CommunicationLedger(mesh) as ledger:
            many(mine).sum().backward()
        assert ledger.counts() == {"all_reduce": PARAMETERS}, ledger.table()
        same_gradients(many, one)
    finally:
        reducer.BUCKET_BYTES = largest


@on_ranks(2)
def test_who_asks_for_a_gradient_gets_the_sum():
    one, many, x, mine, _ = both()
    true = torch.autograd.grad(one(x).pow(2).sum(), list(one.parameters()))
    for found, expected in zip(
        torch.autograd.grad(many(mine).pow(2).sum(), list(many.parameters())),
        true,
        strict=True,
    ):
        same(found, expected)
    assert all(p.grad is None for p in many.parameters())
    many(mine).pow(2).sum().backward(inputs=[many.up.weight])
    same(many.up.weight.grad, true[2])
    assert many.up.bias.grad is None
    assert many.norm.weight.grad is None


@on_ranks(2)
def test_hooks_see_the_sum():
    one, many, x, mine, _ = both()
    seen = {}
    many.up.weight.register_hook(
        lambda grad: seen.update(weight=grad.clone()) or grad * 2
    )
    many.up.bias.register_post_accumulate_grad_hook(
        lambda p: seen.update(bias=p.grad.clone())
    )
    one(x).pow(2).sum().backward()
    many(mine).pow(2).sum().backward()
    same(seen["weight"], one.up.weight.grad)
    same(seen["bias"], one.up.bias.grad)
    same(many.up.weight.grad, one.up.weight.grad * 2)
    same(many.norm.bias.grad, one.norm.bias.grad)


@on_ranks(2)
def test_a_gradient_of_a_gradient():
    one, many, x, mine, _ = both()
    for net, data in ((one, x), (many, mine)):
        grads = torch.autograd.grad(
            net(data).pow(3).sum(), list(net.parameters()), create_graph=True
        )
        sum(grad.pow(2).sum() for grad in grads).backward()
    same_gradients(many, one)
    one.zero_grad()
    many.zero_grad()
    for net, data in ((one, x), (many, mine)):
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=r"Using backward\(\) with create_graph=True"
            )
            net(data).pow(3).sum().backward(create_graph=True)
        penalty = sum(p.grad.pow(2).sum() for p in net.parameters())
        for p in net.parameters():
            p.grad = None
        penalty.backward()
    same_gradients(many, one)


@on_ranks(2)
def test_copies_and_parts_of_one_parameter():
    """One use sees the same on every rank, another its own rows: the first must not be counted twice."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    w, x = (
        torch.randn(4, 6, dtype=torch.float64),
        torch.randn(8, 6, dtype=torch.float64),
    )
    true = w.clone().requires_grad_()
    (F.linear(x, true).pow(2).sum() + true.pow(3).sum()).backward()
    mine = nn.Parameter(distribute_tensor(w, mesh, [Replicate()]))
    loss = F.linear(distribute_tensor(x, mesh, [Shard(0)]), mine).pow(2).sum()
    (loss + mine.pow(3).sum()).backward()
    same(mine.grad, true.grad)


@on_ranks(2)
def test_recomputed_blocks():
    from torch.utils.checkpoint import checkpoint

    one, many, x, mine, mesh = both()
    one(x).pow(2).sum().backward()
    with CommunicationLedger(mesh) as ledger:
        checkpoint(many, mine, use_reentrant=False).pow(2).sum().backward()
    assert ledger.counts() == {"all_reduce": 1}, ledger.table()
    same_gradients(many, one)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("on purpose")


@on_ranks(2)
def test_nothing_is_left_of_a_backward_that_failed():
    one, many, x, mine, mesh = both()
    first = DTensor.from_local(
        Fails.apply(mine.to_local().clone().requires_grad_()), mesh, [Shard(0)]
    )
    with pytest.raises(ArithmeticError, match="on purpose"):
        many(first).pow(2).sum().backward()
    assert not reducer._REDUCERS
    many.zero_grad()
    one(x).pow(2).sum().backward()
    many(mine).pow(2).sum().backward()
    same_gradients(many, one)


class Watches(torch.autograd.Function):
    """Remembers how many collectives had been started when backward came here."""

    @staticmethod
    def forward(ctx, x, ledger, seen):
        ctx.ledger, ctx.seen = ledger, seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(ctx.ledger.counts().get("all_reduce", 0))
        return grad, None, None


@on_ranks(2)
@pytest.mark.parametrize(("nbytes", "started"), [(1, True), (1 << 22, False)])
def test_full_buckets_start_while_backward_runs(nbytes, started):
    usual, reducer.BUCKET_BYTES = reducer.BUCKET_BYTES, nbytes
    try:
        one, many, x, mine, mesh = both()
        seen = []
        with CommunicationLedger(mesh) as ledger:
            leaf = mine.to_local().clone().requires_grad_()
            first = Watches.apply(leaf, ledger, seen)
            given = DTensor.from_local(first, mesh, mine.placements, shape=mine.shape)
            many(given).pow(2).sum().backward()
        one(x).pow(2).sum().backward()
        same_gradients(many, one)
        [before] = seen
        assert (before > 0) is started
        assert ledger.counts()["all_reduce"] >= max(1, before)
    finally:
        reducer.BUCKET_BYTES = usual
