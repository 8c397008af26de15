# SPDX-License-Identifier: Apache-2.0
"""A small model, its sharded twin, and their comparison, for the tests of fully_shard on torch."""

import copy

import torch
from torch import nn

from hyper_parallel import DTensor
from hyper_parallel.core.fully_shard import fully_shard


class Block(nn.Module):
    """A residual block with odd sizes."""

    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between an embedding and a head; ``skipped`` is the index of a block that is left out."""

    def __init__(self, dim=6, hidden=7, layers=3):
        super().__init__()
        self.embed = nn.Linear(4, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(layers))
        self.head = nn.Linear(dim, 3)
        self.skipped = None

    def forward(self, x):
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            if index != self.skipped:
                x = block(x)
        return self.head(x)


def wrap(net, mesh, **options):
    """Every block a unit, and the rest another."""
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def both(mesh, **options):
    """The model on one device, and the same sharded."""
    torch.manual_seed(0)
    one = Net().double()
    return one, wrap(copy.deepcopy(one), mesh, **options)


def batches(steps, rows=8):
    """Random batches, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(rows, 4, dtype=torch.float64, generator=generator)
        for _ in range(steps)
    ]


def part_of(x, mesh):
    """This rank's rows."""
    index = mesh.rank_list.index(torch.distributed.get_rank())
    return x.chunk(mesh.size())[index]


def check_same(mine, true):
    """Compares a distributed tensor with a plain one to float64 accuracy."""
    assert isinstance(mine, DTensor)
    torch.testing.assert_close(
        mine.full_tensor().detach(), true.detach(), rtol=1e-10, atol=1e-12
    )


def check_gradients(one, many):
    """Compares all gradients, and their layouts with those of the parameters."""
    pairs = zip(many.named_parameters(), one.parameters(), strict=True)
    for (name, own), true in pairs:
        assert (own.grad is None) == (true.grad is None), name
        if true.grad is None:
            continue
        assert own.grad.placements == own.placements, name
        check_same(own.grad, true.grad)
