# SPDX-License-Identifier: Apache-2.0
"""fully_shard on MindSpore alone: the Cells that read whole tensors, what is freed, and operators in the background.

Operators run in the background here, as they do for users; the ranks of other tests run them at once.
"""

import gc
import resource
from pathlib import Path

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint, nn
from mindspore.experimental import optim

from hyper_parallel import get_platform, init_device_mesh
from hyper_parallel.core.fully_shard import fully_shard
from hyper_parallel.core.fully_shard.running import runner_of
from hyper_parallel.testing import close_ranks, on_ranks

DIM = 260  # whose weights are large enough to travel without a copy
STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def _ranks_of_their_own():
    """The first operator of a process decides for good how all of them run."""
    close_ranks()
    yield
    close_ranks()


class Net(nn.Cell):
    """One of each of the Cells that have parameters and a kernel on a CPU."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, DIM)
        self.dense = nn.Dense(DIM, DIM)
        self.norm = nn.LayerNorm((DIM,))
        self.linear = mint.nn.Linear(DIM, DIM)
        self.head = nn.Dense(DIM, 3, has_bias=False)

    def construct(self, ids):
        x = mint.tanh(self.dense(self.embed(ids)))
        return self.head(mint.tanh(self.linear(self.norm(x))))


def new_net():
    net = Net()
    for seed, (_, parameter) in enumerate(net.parameters_and_names()):
        drawn = np.random.default_rng(seed).standard_normal(parameter.shape)
        parameter.set_data(Tensor((drawn / 9).astype(np.float32)))
    return net


def units_of(net, mesh):
    for cell in (net.embed, net.dense, net.norm, net.linear):
        fully_shard(cell, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def batch(step):
    return np.random.default_rng(50 + step).integers(0, 11, (4, 3)).astype(np.int32)


def train(net, take):
    """The losses of some steps."""
    optimizer = optim.AdamW(net.trainable_params(), 1e-2)

    def loss_of(ids):
        return mint.mean(net(ids) ** 2)

    compute = mindspore.value_and_grad(loss_of, None, weights=net.trainable_params())
    losses = []
    for step in range(STEPS):
        loss, gradients = compute(take(batch(step)))
        optimizer(gradients)
        losses.append(float(loss))
    return losses


@on_ranks(2)
def test_every_cell_trains_as_in_one_process():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rank, one, many = get_platform().get_rank(), new_net(), units_of(new_net(), mesh)
    expected = train(one, Tensor)
    own = train(many, lambda ids: Tensor(ids[2 * rank : 2 * rank + 2]))
    total = Tensor(np.array(own, np.float32))
    get_platform().all_reduce(total, mesh.get_group(0))
    np.testing.assert_allclose(total.asnumpy() / 2, expected, rtol=2e-5)
    for mine, true in zip(many.get_parameters(), one.get_parameters(), strict=True):
        np.testing.assert_allclose(
            mine.asnumpy(), true.asnumpy(), rtol=1e-3, atol=1e-4, err_msg=true.name
        )


def resident():
    """The bytes of memory of this process."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


@on_ranks(2)
def test_whole_parameters_are_freed_between_forward_and_backward():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    size, layers = 1024, 16
    net = nn.SequentialCell(*[nn.Dense(size, size) for _ in range(layers)])
    for cell in net:
        fully_shard(cell, mesh=mesh)
    fully_shard(net, mesh=mesh)
    platform, x = get_platform(), Tensor(np.ones((2, size), np.float32))
    grown = []
    for _ in range(3):
        gc.collect()
        before = resident()
        with platform.tape():
            loss = mint.sum(net(x))
        loss.asnumpy()
        grown.append(resident() - before)
        platform.backward([loss])
        net.zero_grad()
        assert not any(runner_of(cell).unit.whole_keys for cell in net)
    whole = layers * size * size * 4
    assert grown[-1] < whole / 4, (grown, whole)
