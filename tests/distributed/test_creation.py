# SPDX-License-Identifier: Apache-2.0
"""Tensors like others: where they lie, and that nothing is communicated. tests/rules has the values."""

import torch

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


@on_ranks(4)
def test_nothing_is_communicated_and_the_layout_stays():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    data = torch.arange(15.0).reshape(5, 3)
    operands = [
        distribute_tensor(data, mesh, [Shard(0), Shard(1)]),
        DTensor.from_local(data, mesh, [Partial(), Partial()]),
    ]
    for x in operands:
        without_sum = tuple(Replicate() if p.is_partial() else p for p in x.placements)
        with CommunicationLedger(mesh) as ledger:
            made = [
                torch.zeros_like(x),
                torch.ones_like(x),
                torch.full_like(x, 2),
                x.new_zeros(5, 3),
                torch.empty_like(x),
            ]
            others = [
                x.new_ones(4),
                x.new_full((2, 2), 3.0),
                x.new_tensor([1.0]),
                x.new_empty(0),
            ]
        assert ledger.counts() == {}
        assert {one.placements for one in made} == {without_sum}
        assert {one.placements for one in others} == {(Replicate(), Replicate())}
        assert all(one.full_tensor().shape == (5, 3) for one in made)


@on_ranks(2)
def test_options():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    x = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)])
    assert torch.zeros_like(x, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert torch.zeros_like(x, layout=torch.strided, device="cpu").device.type == "cpu"
    leaf = torch.ones_like(x, requires_grad=True)
    (leaf * x).sum().redistribute().backward()
    assert leaf.grad.placements == (Shard(0),)
    assert torch.equal(leaf.grad.full_tensor(), torch.ones(5, 3))
    transposed = torch.zeros_like(x.t(), memory_format=torch.preserve_format)
    assert transposed.placements == (Shard(1),)
    assert transposed.shape == (3, 5)
