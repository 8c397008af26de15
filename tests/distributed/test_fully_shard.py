# SPDX-License-Identifier: Apache-2.0
"""fully_shard on real ranks: training equals one process, and collectives are counted."""

import pytest
import torch
from sharded_models import Net, batches, both, check_gradients, check_same, part_of

from hyper_parallel import init_device_mesh
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.fully_shard import HSDPModule
from hyper_parallel.testing import on_ranks


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
        check_gradients(one, many)
        for optimizer in optimizers:
            optimizer.step()
    for own, true in zip(many.parameters(), one.parameters(), strict=True):
        check_same(own, true)


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
        same_training(one, many, mesh)


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
