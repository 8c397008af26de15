# SPDX-License-Identifier: Apache-2.0
"""fully_shard on real ranks: training equals one process, and collectives are counted."""

import copy

import pytest
import torch
from torch import nn

from hyper_parallel import init_device_mesh
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.fully_shard import HSDPModule, fully_shard
from hyper_parallel.testing import on_ranks


class Block(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, dim=6, hidden=7, layers=3):
        super().__init__()
        self.embed = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(layers))
        self.head = nn.Linear(dim, 3)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def wrap(net, mesh, **options):
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def both(mesh, **options):
    torch.manual_seed(0)
    one = Net().double()
    many = wrap(copy.deepcopy(one), mesh, **options)
    return one, many


def batches(steps, rows=8):
    torch.manual_seed(1)
    return [torch.randn(rows, 4, dtype=torch.float64) for _ in range(steps)]


def part_of(x, mesh):
    rank, ranks = torch.distributed.get_rank(), mesh.size()
    return x.chunk(ranks)[mesh.rank_list.index(rank)]


def same(mine, true):
    torch.testing.assert_close(
        mine.full_tensor().detach(), true.detach(), rtol=1e-10, atol=1e-12
    )


def same_training(one, many, mesh, steps=20):
    """Trains both, and compares every loss, gradient and parameter."""
    optimizers = [torch.optim.AdamW(net.parameters(), 1e-2) for net in (one, many)]
    for x in batches(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = one(x).square().mean()
        loss.backward()
        mine = many(part_of(x, mesh)).square().mean()
        mine.backward()
        total = mine.detach().clone()
        torch.distributed.all_reduce(total)
        torch.testing.assert_close(total / mesh.size(), loss.detach())
        for (name, own), true in zip(
            many.named_parameters(), one.parameters(), strict=True
        ):
            assert own.grad.placements == own.placements, name
            same(own.grad, true.grad)
        for optimizer in optimizers:
            optimizer.step()
    for own, true in zip(many.parameters(), one.parameters(), strict=True):
        same(own, true)


@pytest.mark.parametrize("setting", [None, True, False])
@on_ranks(2)
def test_training_equals_one_process(setting):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    one, many = both(mesh, reshard_after_forward=setting)
    assert isinstance(many, HSDPModule)
    assert isinstance(many, Net)
    same_training(one, many, mesh)


@on_ranks(4)
def test_training_equals_one_process__four_ranks_and_hybrid():
    for shape, names in (((4,), ("dp",)), ((2, 2), ("replicate", "shard"))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        one, many = both(mesh)
        same_training(one, many, mesh, steps=5)


@on_ranks(2)
def test_collectives_are_counted():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    expected = {None: 7, True: 8, False: 4}
    for setting, gathers in expected.items():
        _, many = both(mesh, reshard_after_forward=setting)
        for _ in range(2):
            with CommunicationLedger(mesh) as ledger:
                many(batches(1)[0]).sum().backward()
            assert ledger.counts() == {
                "all_gather_into_tensor": gathers,
                "reduce_scatter_tensor": 4,
            }, ledger.table()
