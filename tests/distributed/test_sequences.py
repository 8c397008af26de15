# SPDX-License-Identifier: Apache-2.0
"""Writes by index to cut targets, bags, losses of sequences, draws: what a user sees of them on a mesh."""

import pytest
import torch
from torch import nn

from hyper_parallel import (
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.dtensor.modes import strict
from hyper_parallel.testing import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def mesh_of(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple("xy"[: len(shape)]))


def gathered(local):
    found = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, local)
    return found


@on_ranks(4)
def test_nothing_is_communicated_to_write_to_a_cut_target():
    mesh = mesh_of(4)
    plain = torch.arange(20.0).reshape(10, 2)
    rows, values = torch.tensor([9, 0, 4, -3]), torch.ones(4, 2)
    i, v = (distribute_tensor(x, mesh, [R]) for x in (rows, values))
    x = distribute_tensor(plain, mesh, [S0])
    place = x.to_local().data_ptr()
    with CommunicationLedger() as ledger, strict():
        x[i] = v
        x[i] += v
        x.index_add_(0, i.clamp(min=0), v)
        x.scatter_(0, i.clamp(min=0).reshape(4, 1).expand(4, 2), 5.0)
        y = x.index_put((i,), v, accumulate=True)
    plain[rows] = values
    plain[rows] += values
    plain.index_add_(0, rows.clamp(min=0), values)
    plain.scatter_(0, rows.clamp(min=0).reshape(4, 1).expand(4, 2), 5.0)
    assert x.placements == y.placements == (S0,)
    assert x.to_local().data_ptr() == place
    assert torch.equal(x.full_tensor(), plain)
    assert torch.equal(
        y.full_tensor(), plain.index_put((rows,), values, accumulate=True)
    )
    assert {entry.collective for entry in ledger.entries} <= {
        "all_reduce"
    }  # of the few rows that += reads


@on_ranks(4)
def test_an_index_that_no_rank_has_is_an_error():
    mesh = mesh_of(4)
    x = distribute_tensor(torch.zeros(6, 2), mesh, [S0])
    v = distribute_tensor(torch.ones(1, 2), mesh, [R])
    for wrong in (6, -7):
        i = distribute_tensor(torch.tensor([wrong]), mesh, [R])
        calls = {
            "index_add": lambda i=i: x.index_add(0, i, v),
            "index_copy": lambda i=i: x.index_copy(0, i, v),
            "index_put": lambda i=i: x.index_put((i,), v),
            "scatter": lambda i=i: x.scatter(0, i.reshape(1, 1).expand(1, 2), v),
            "index_fill": lambda i=i: x.index_fill(0, i, 1.0),
        }
        for name, call in calls.items():
            with pytest.raises((IndexError, RuntimeError)):
                call()
                raise AssertionError(name)


@on_ranks(4)
def test_bags_of_a_cut_table():
    mesh = mesh_of(4)
    ids = torch.randint(0, 10, (6, 3), generator=torch.Generator().manual_seed(0))
    for mode in ("sum", "mean", "max"):
        torch.manual_seed(0)
        plain = nn.EmbeddingBag(10, 4, mode=mode, padding_idx=2).double()

        def rows(_, module, mesh):
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [S0]))

        torch.manual_seed(0)
        mine = distribute_module(
            nn.EmbeddingBag(10, 4, mode=mode, padding_idx=2).double(), mesh, rows
        )
        expected = plain(ids)
        found = mine(distribute_tensor(ids, mesh, [R]))
        torch.testing.assert_close(found.full_tensor(), expected)
        found.full_tensor().pow(2).sum().backward()
        expected.pow(2).sum().backward()
        torch.testing.assert_close(mine.weight.grad.full_tensor(), plain.weight.grad)


@on_ranks(2)
def test_an_index_out_of_the_table_is_an_error():
    mesh = mesh_of(2)
    bag = nn.EmbeddingBag(4, 2, mode="sum")
    weight = distribute_tensor(bag.weight.detach(), mesh, [S0])
    with pytest.raises((IndexError, RuntimeError)):
        nn.functional.embedding_bag(
            distribute_tensor(torch.tensor([[4]]), mesh, [R]), weight, mode="sum"
        )


@on_ranks(4)
def test_all_ranks_get_one_answer():
    mesh = mesh_of(4)
    plain = torch.arange(10.0)
    other = plain.clone()
    other[7] += 1e-3  # only one rank sees it
    x, y = (distribute_tensor(t, mesh, [S0]) for t in (plain, other))
    for call in (torch.equal, torch.allclose):
        assert call(x, x) is True
        assert call(x, y) is False
        assert call(x, distribute_tensor(plain, mesh, [R])) is True
    assert torch.allclose(x, y, atol=1e-2) is True
    assert torch.equal(x, x[:9]) is False


@on_ranks(4)
def test_samples_are_the_same_on_copies_and_others_on_pieces():
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    chances = distribute_tensor(torch.ones(8, 50), mesh, [S0, R])
    found = torch.multinomial(chances, 20)
    assert found.placements == (S0, R)
    one, copy, other, _ = gathered(found.to_local())
    assert torch.equal(one, copy)
    assert not torch.equal(one, other)
    assert all(len(set(row)) == 20 for row in found.full_tensor().tolist())


@on_ranks(4)
def test_normal_numbers_are_those_of_one_device():
    mesh = mesh_of(4)
    mean, std = torch.arange(10.0), torch.ones(10)
    torch.manual_seed(0)
    expected = torch.normal(mean, std)
    torch.manual_seed(0)
    found = torch.normal(
        distribute_tensor(mean, mesh, [S0]), distribute_tensor(std, mesh, [S0])
    )
    assert found.placements == (S0,)
    torch.testing.assert_close(found.full_tensor(), expected)
