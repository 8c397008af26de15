# SPDX-License-Identifier: Apache-2.0
"""What is communicated on MindSpore is what a careful person would: consumers of one kind share one sum.

tests/backend/test_changes.py holds that nothing of it is wrong after a change in place.
"""

from collections import Counter

import at_once  # noqa: F401 - for what it does
import mindspore
import numpy as np
import pytest
from mindspore import Tensor

import model_mindspore as example
import plan
from hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.testing import run_ranks


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def count_a_block(sequence_parallel):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = example.Llama(example.Config(layers=1, dim=32, hidden=48, context=16))
    plan.put_on_mesh(model, mesh, sequence_parallel=sequence_parallel)
    stream = [Shard(1) if sequence_parallel else Replicate()]
    block, x = model.blocks[0], distribute_tensor(Tensor(draw(2, 16, 32)), mesh, stream)
    shapes = []

    def loss(x):
        y = block(x)
        shapes.append((list(y.placements), y.shape))
        return (y * y).sum()

    with CommunicationLedger(mesh) as ledger:
        found = mindspore.value_and_grad(loss, 0, weights=block.trainable_params())(x)
    assert shapes == [(stream, (2, 16, 32))]
    assert found is not None
    return [entry.collective for entry in ledger.entries]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_block_costs_what_megatrons_costs(sequence_parallel):
    """Two all-reduces each way, or two pairs; with sequence parallel the gradients of both norms, in one bucket."""
    expected = (
        {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4}
        if sequence_parallel
        else {"all_reduce": 4}
    )
    more = {"all_reduce": 1} if sequence_parallel else {}
    for found in run_ranks(count_a_block, 2, sequence_parallel):
        assert Counter(found) == Counter(expected) + Counter(more)
