# SPDX-License-Identifier: Apache-2.0
"""Random numbers: dropout the same on copies and different on pieces, repeated by recompute; fills as on one device."""

import warnings

import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.dtensor.dtensor import rand, randn
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.testing import on_ranks

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple("xyz"[: len(shape)]))


def gathered(tensor):
    """The local tensors of all ranks, in their order."""
    found = [None] * 4
    torch.distributed.all_gather_object(found, tensor)
    return found


DROPS = {
    "dropout": (F.dropout, (64, 32)),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, training=True), (64, 32)),
    "dropout1d": (F.dropout1d, (64, 32, 2)),
    "dropout2d": (F.dropout2d, (64, 32, 2, 2)),
    "dropout3d": (F.dropout3d, (64, 32, 2, 2, 2)),
    "feature_alpha_dropout": (
        lambda x: F.feature_alpha_dropout(x, training=True),
        (64, 32, 2),
    ),
    "rrelu": (lambda x: F.rrelu(-x, training=True), (64, 32)),
    "bernoulli": (lambda x: torch.bernoulli(x * 0.5), (64, 32)),
    "bernoulli with p": (lambda x: x.bernoulli(0.5), (64, 32)),
    "poisson": (torch.poisson, (64, 32)),
    "dropout in place": (lambda x: F.dropout(x * 1, inplace=True), (64, 32)),
}


@on_ranks(4)
def test_copies_draw_the_same_and_pieces_do_not():
    mesh = mesh_of(2, 2)
    for name, (call, shape) in DROPS.items():
        for placements in ([R, R], [S0, R], [R, S1], [S1, S0], [S0, S0]):
            torch.manual_seed(3)
            x = distribute_tensor(torch.ones(shape), mesh, placements)
            y = call(x)
            assert y.placements == tuple(placements), name
            locals_ = gathered(y.to_local())
            ranks = [(0, 0), (0, 1), (1, 0), (1, 1)]
            for one, a in enumerate(ranks):
                for other, b in enumerate(ranks[:one]):
                    cut = [
                        i != j
                        for i, j, p in zip(a, b, placements, strict=True)
                        if p.is_shard()
                    ]
                    assert torch.equal(locals_[one], locals_[other]) != any(cut), (
                        name,
                        placements,
                    )
            again = call(x)
            assert not torch.equal(again.to_local(), y.to_local()), name


@on_ranks(4)
def test_the_share_that_is_dropped_and_its_gradient():
    mesh = mesh_of(4)
    torch.manual_seed(0)
    x = distribute_tensor(torch.ones(200, 50, requires_grad=True), mesh, [S0])
    y = F.dropout(x, 0.3)
    y.sum().redistribute().backward()
    whole = y.full_tensor()
    assert abs((whole == 0).double().mean() - 0.3) < 0.02
    assert torch.equal(whole, x.grad.full_tensor())  # of ones, the mask is both
    assert set(whole.unique().tolist()) == {0.0, whole.max().item()}


@on_ranks(4)
def test_a_pending_sum_passes_dropout():
    mesh = mesh_of(4)
    torch.manual_seed(0)
    data = torch.randn(40, 6)
    parts = DTensor.from_local(data * (mesh.get_coordinate()[0] + 1.0), mesh, [P])
    y = F.dropout(parts, 0.5)
    assert y.placements == (P,)
    whole = y.full_tensor()
    kept = whole != 0
    assert 0.3 < kept.double().mean() < 0.7
    torch.testing.assert_close(whole[kept], (data * 10 * 2)[kept])


@on_ranks(4)
def test_recompute_repeats_the_mask():
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    weight = torch.randn(12, 8, dtype=torch.float64)
    x = distribute_tensor(torch.randn(6, 8, dtype=torch.float64), mesh, [S0, R])

    def block(w):
        return F.dropout(F.gelu(F.dropout(F.linear(x, w), 0.4)), 0.4).pow(2).sum()

    found = []
    for run in (block, lambda w: checkpoint(block, w, use_reentrant=False)):
        torch.manual_seed(5)
        w = distribute_tensor(weight.clone().requires_grad_(), mesh, [R, S0])
        loss = run(w)
        loss.redistribute().backward()
        found.append(
            (loss.full_tensor().detach(), w.grad.full_tensor(), torch.get_rng_state())
        )
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@on_ranks(4)
def test_what_is_off_draws_nothing():
    mesh = mesh_of(4)
    x = distribute_tensor(torch.ones(5, 3), mesh, [S0])
    before = torch.get_rng_state()
    assert F.dropout(x, 0.5, training=False) is x
    assert F.dropout(x, 0.0) is x
    assert torch.equal(F.rrelu(x).full_tensor(), torch.ones(5, 3))
    assert nn.Dropout(0.5).eval()(x) is x
    assert torch.equal(torch.get_rng_state(), before)


@on_ranks(4)
def test_copies_are_alike_though_ranks_were_seeded_differently():
    """And though they draw different amounts, and are seeded anew, some of them or all."""
    rank = torch.distributed.get_rank()
    seeds = [
        lambda: rank,
        lambda: 7,
        lambda: int(rank == 2),
        lambda: 0,
        lambda: 40 + rank,
    ]
    for sizes, placements in (((4,), [R]), ((2, 2), [R, S0]), ((2, 2), [R, R])):
        mesh = mesh_of(*sizes)
        for seed in seeds:
            torch.manual_seed(seed())
            torch.rand(rank)
            x = distribute_tensor(torch.ones(64, 4), mesh, placements)
            layer = nn.Dropout(0.5)
            drawn = [
                F.dropout(x),
                layer(x),
                x.clone().normal_(),
                torch.rand_like(x),
                torch.bernoulli(x * 0.5),
            ]
            drawn += [make((64, 4), mesh, placements) for make in (rand, randn)]
            for one in drawn:
                copies = gathered(one.redistribute(mesh, [R] * mesh.ndim).to_local())
                assert all(torch.equal(copies[0], copy) for copy in copies)
                assert len(copies[0].unique()) > 1
                locals_ = gathered(one.to_local())
                if placements[-1] == S0:
                    assert torch.equal(locals_[0], locals_[2])
                    assert not torch.equal(locals_[0], locals_[1])
            assert not torch.equal(drawn[0].to_local(), drawn[1].to_local())


@on_ranks(4)
def test_recompute_repeats_though_ranks_were_seeded_differently():
    torch.manual_seed(torch.distributed.get_rank())
    x = distribute_tensor(torch.ones(64, 4), mesh_of(4), [R]).requires_grad_()
    seen = []

    def drop(x):
        seen.append(F.dropout(x))
        return seen[-1] * x

    checkpoint(drop, x, use_reentrant=False).sum().backward()
    assert torch.equal(seen[0].to_local(), seen[1].to_local())
    assert torch.equal(x.grad.to_local(), 2 * seen[0].to_local().detach())


@on_ranks(4)
def test_nothing_is_communicated_for_numbers_that_are_given():
    x = distribute_tensor(torch.ones(8, 3), mesh_of(4), [R])
    torch.manual_seed(torch.distributed.get_rank())
    nn.init.constant_(x, 2.0)
    x.uniform_(generator=torch.Generator().manual_seed(1))
    assert len({tuple(one.flatten().tolist()) for one in gathered(x.to_local())}) == 1


FILLS = {
    "normal_": lambda x: x.normal_(1.0, 2.0),
    "uniform_": lambda x: x.uniform_(-1, 3),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "exponential_": lambda x: x.exponential_(2.0),
    "log_normal_": lambda x: x.log_normal_(),
    "cauchy_": lambda x: x.cauchy_(),
    "geometric_": lambda x: x.geometric_(0.4),
    "random_": lambda x: x.random_(2, 9),
    "random_ to": lambda x: x.random_(7),
    "init.normal_": lambda x: nn.init.normal_(x, std=0.02),
    "init.uniform_": nn.init.uniform_,
    "init.trunc_normal_": lambda x: nn.init.trunc_normal_(x, std=0.5),
    "init.xavier_uniform_": nn.init.xavier_uniform_,
    "init.kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x, a=5**0.5),
    "init.kaiming_normal_": nn.init.kaiming_normal_,
    "init.constant_": lambda x: nn.init.constant_(x, 2.5),
    "init.orthogonal_": nn.init.orthogonal_,
    "with a generator": lambda x: x.normal_(generator=torch.Generator().manual_seed(4)),
}
LIKE = {
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "randint_like between": lambda x: torch.randint_like(x, low=3, high=9),
    "randn_like, a leaf": lambda x: torch.randn_like(input=x, requires_grad=True),
}


@on_ranks(4)
def test_fills_are_those_of_one_device_on_every_mesh():
    for shape in ((4,), (2, 2)):
        base = Layout(shape, tuple("xy"[: len(shape)]))
        choices = (
            [[R], [S0], [S1], [P]]
            if len(shape) == 1
            else [[S0, S1], [S1, S1], [R, S0], [P, S1]]
        )
        for placements in choices:
            layout = base(placements).bind(2)
            for name, fill in {**FILLS, **LIKE}.items():
                one = torch.zeros(7, 5, requires_grad=name.startswith("init"))
                torch.manual_seed(11)
                true = fill(one)
                after = torch.get_rng_state()
                mine = DTensor(torch.zeros(layout.local_shape((7, 5))), layout, (7, 5))
                mine.requires_grad_(name.startswith("init"))
                torch.manual_seed(11)
                with warnings.catch_warnings():
                    warnings.simplefilter(
                        "ignore"
                    )  # the decomposition of orthogonal_ has no rule
                    found = fill(mine)
                assert torch.equal(torch.get_rng_state(), after), name
                assert torch.equal(found.full_tensor().detach(), true.detach()), (
                    name,
                    placements,
                )
                assert found.requires_grad == true.requires_grad, name
                if name in FILLS:
                    assert found is mine, name
                    assert mine.placements == tuple(placements), name
                else:
                    assert found.placements == tuple(
                        R if p is P else p for p in placements
                    ), name


@on_ranks(4)
def test_bernoulli_by_a_tensor_of_probabilities():
    mesh = mesh_of(4)
    p = torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    true = torch.zeros(6, 5).bernoulli_(p)
    torch.manual_seed(1)
    mine = distribute_tensor(torch.zeros(6, 5), mesh, [S0]).bernoulli_(
        distribute_tensor(p, mesh, [S1])
    )
    assert torch.equal(mine.full_tensor(), true)
