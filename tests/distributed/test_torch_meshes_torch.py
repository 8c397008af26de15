# SPDX-License-Identifier: Apache-2.0
"""Meshes as users of torch know them: names of flattened axes, functional collectives, the fake backend."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh as init_native

from hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.testing import on_ranks


@on_ranks(4)
def test_a_mesh_is_cut_by_names_of_flattened_axes():
    mesh = init_device_mesh(
        "cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "cp")
    )
    assert mesh.get_rank() == torch.distributed.get_rank()
    mesh["shard", "cp"].flatten("shard_cp")
    both = mesh["replicate", "shard_cp"]
    native = init_native("cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "cp"))
    native["shard", "cp"]._flatten("shard_cp")
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # torch wants its users to keep the flattened mesh
        expected = native["replicate", "shard_cp"]
    assert both.mesh_shape == tuple(expected.shape) == (2, 2)
    assert both.mesh_dim_names == expected.mesh_dim_names
    assert both.mesh.tolist() == expected.mesh.tolist()
    whole = torch.arange(8.0).reshape(2, 4)
    found = distribute_tensor(whole, both, [Shard(0), Shard(1)])
    assert torch.equal(found.full_tensor(), whole)
    assert found.to_local().shape == (1, 2)
    mesh["replicate", "shard"].flatten("both")
    assert mesh["both", "cp"].mesh_shape == (4, 1)
    for names in (
        ("shard_cp", "replicate"),
        ("shard", "shard_cp"),
        ("both", "shard_cp"),
    ):
        with pytest.raises(ValueError, match="HP203"):
            mesh[names]
    with pytest.raises(KeyError, match="HP203"):
        mesh["replicate", "nothing"]


@on_ranks(4)
def test_functional_collectives_take_a_mesh_for_a_group():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = mesh.get_rank()
    one = torch.full((2,), float(rank))
    line = [2 * (rank // 2), 2 * (rank // 2) + 1]
    column = [rank % 2, rank % 2 + 2]
    assert functional.all_reduce(one, "sum", mesh["tp"]).tolist() == [sum(line)] * 2
    assert functional.all_reduce(one, "sum", (mesh, 0)).tolist() == [sum(column)] * 2
    scattered = functional.reduce_scatter_single(one, "sum", 0, (mesh, 1))
    assert scattered.tolist() == [sum(line)]
    native = init_native(
        "cpu", (2, 2), mesh_dim_names=("dp", "tp")
    )  # torch's own still do
    assert functional.all_reduce(one, "sum", (native, 1)).tolist() == [sum(line)] * 2
    with pytest.raises(ValueError, match=r"say which one.*HP203"):
        functional.all_reduce(one, "sum", mesh)


@on_ranks(2)
def test_the_backend_of_an_axis_is_that_of_the_job():
    mesh = init_device_mesh(
        "cpu", (2,), mesh_dim_names=("x",), backend_override={"x": "gloo"}
    )
    assert mesh.size() == 2
    for override in ({"x": "nccl"}, {0: ("gloo", object())}):
        with pytest.raises(NotImplementedError, match="HP234"):
            init_device_mesh(
                "cpu", (2,), mesh_dim_names=("x",), backend_override=override
            )
    assert (
        distribute_tensor(torch.ones(2), mesh, [Replicate()]).full_tensor().sum() == 2
    )


_DRY_RUN = """
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group(backend="fake", store=FakeStore(), rank=0, world_size=1000)
from hyper_parallel import (
    ColwiseParallel, Replicate, RowwiseParallel, Shard, distribute_tensor, init_device_mesh, parallelize_module
)
from hyper_parallel.core.dtensor.ledger import CommunicationLedger

mesh = init_device_mesh("cpu", (1000,))
x, w = distribute_tensor(torch.ones(2000, 8), mesh, [Shard(0)]), distribute_tensor(torch.ones(8, 16), mesh)
assert (x @ w).shape == (2000, 16)
assert (x @ w).to_local().shape == (2, 16)
with CommunicationLedger(mesh) as ledger:
    assert x.redistribute(mesh, [Replicate()]).to_local().shape == (2000, 8)
    assert (x.t() @ x).full_tensor().shape == (8, 8)
assert ledger.counts() == {"all_gather_into_tensor": 1, "all_reduce": 1}, ledger.counts()

mesh = init_device_mesh("cpu", (250, 4), mesh_dim_names=("dp", "tp"))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters())
with CommunicationLedger(mesh) as ledger:
    output = model(torch.ones(3, 8))
    output.sum().backward()
    optimizer.step()
assert output.shape == (3, 8)
assert model[0].weight.grad.to_local().shape == (4, 8)
assert ledger.counts() == {"all_reduce": 1}, ledger.counts()
print("done")
"""


def test_a_dry_run_on_the_fake_backend():
    done = subprocess.run(
        [sys.executable, "-c", _DRY_RUN],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout.endswith("done\n"), done.stderr
