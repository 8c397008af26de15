# SPDX-License-Identifier: Apache-2.0
"""The ledger sees every collective, its bytes, its direction and the line that caused it."""

import threading

import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.dtensor.redistribution import plan
from hyper_parallel.core.shard.decision import decide
from hyper_parallel.testing import on_ranks


@on_ranks(4)
def test_every_collective_with_its_bytes():
    platform = get_platform()
    rank = platform.get_rank()
    x = torch.ones(8, dtype=torch.float32)  # 32 bytes
    with CommunicationLedger() as ledger:
        platform.all_reduce(x.clone(), None)
        platform.all_gather_into_tensor(x, None)
        platform.reduce_scatter_tensor(x, None)
        platform.all_to_all_single(x, (8,), None)
        platform.broadcast(x.clone(), 2, None)
        platform.differentiable_all_to_all_single(
            x[: rank + 3], [rank, 1, 1, 1], [[0, 1, 2, 3], *[[1] * 4] * 3][rank], None
        )
        platform.barrier()
        platform.all_gather_object([None] * 4, rank)
        platform.p2p_exchange(x, rank ^ 1)
    platform.all_reduce(x.clone(), None)  # outside: not seen
    received = [(entry.collective, entry.nbytes) for entry in ledger.entries]
    assert received == [
        ("all_reduce", 2 * 24),
        ("all_gather_into_tensor", 96),
        ("reduce_scatter_tensor", 24),
        ("all_to_all_single", 24),
        ("broadcast", 0 if rank == 2 else 32),
        ("all_to_all_single", 4 * [6, 3, 3, 3][rank]),
        ("barrier", 0),
        ("all_gather_object", 0),
        ("p2p_exchange", 32),
    ]
    assert ledger.nbytes() == sum(nbytes for _, nbytes in received)


@on_ranks(4)
def test_names_directions_and_lines():
    platform = get_platform()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.ones(2, 3, requires_grad=True)
    with CommunicationLedger(mesh) as ledger:
        y = platform.differentiable_all_gather_concat(x, mesh.get_group("tp"), 2, 0)
        y = platform.differentiable_all_reduce(y, "sum", mesh.get_group("dp"))
        platform.all_reduce(y.detach().clone(), None)
        y.sum().backward()
    assert [(entry.axis, entry.backward) for entry in ledger.entries] == [
        ("tp", False),
        ("dp", False),
        ("all axes", False),
        ("dp", True),
        ("tp", True),
    ]
    assert ledger.counts(backward=False) == {
        "all_gather_into_tensor": 1,
        "all_reduce": 2,
    }
    assert ledger.counts(backward=True) == {"all_reduce": 1, "reduce_scatter_tensor": 1}
    assert ledger.counts() == {
        "all_gather_into_tensor": 1,
        "all_reduce": 3,
        "reduce_scatter_tensor": 1,
    }
    lines = [
        int(entry.line.removeprefix("test_ledger.py:")) for entry in ledger.entries
    ]
    assert lines[1] == lines[0] + 1
    assert lines[2] == lines[0] + 2
    table = ledger.table()
    assert table.splitlines()[-1] == f"5 collectives, {ledger.nbytes()} bytes"
    assert "backward" in table
    assert f"test_ledger.py:{lines[0]}" in table


@on_ranks(2)
def test_ledgers_nest_and_end_on_errors():
    platform = get_platform()
    with CommunicationLedger() as outer:
        platform.barrier()
        try:
            with CommunicationLedger() as inner:
                platform.barrier()
                raise ValueError("on the way")
        except ValueError:
            pass
        thread = threading.Thread(target=platform.barrier)
        thread.start()
        thread.join()
    platform.barrier()
    assert (len(outer.entries), len(inner.entries)) == (3, 1)
    assert not platform._listeners


@on_ranks(2)
def test_collectives_are_counted_by_module():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), nn.Linear(4, 6)
    )
    gathered = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(
        model, mesh, {"0.0": ColwiseParallel(), "0.2": RowwiseParallel(), "1": gathered}
    )
    x = torch.ones(2, 4)
    with CommunicationLedger(mesh, model) as ledger:
        loss = model(x).sum()
        get_platform().all_reduce(torch.ones(1), None)
        loss.backward()
    by_module = ledger.counts_by_module()
    assert by_module == {
        "0.2": {"all_reduce": 1},
        "1": {"all_gather_into_tensor": 1},
        "": {"all_reduce": 1},
    }
    assert ledger.counts(backward=True)  # those have no module
    assert all(entry.module == "" for entry in ledger.entries if entry.backward)
    seen = len(ledger.entries)
    with CommunicationLedger(mesh) as other:
        model(x)
    assert len(ledger.entries) == seen
    assert {entry.module for entry in other.entries} == {
        ""
    }  # nothing is left on the model


@on_ranks(2)
def test_decisions_are_kept_and_promise_the_bytes_that_are_sent():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.randn(8, 16), mesh, [Shard(1)])
    w = distribute_tensor(torch.randn(6, 16), mesh, [Shard(0)])
    with CommunicationLedger(mesh) as silent:
        decision = decide(torch.nn.functional.linear, x, w)
    assert silent.counts() == {}
    with CommunicationLedger(mesh, decisions=True) as ledger:
        torch.nn.functional.linear(x, w)
        torch.nn.functional.linear(x, w)
    [kept] = ledger.decisions  # the second time it is known
    assert str(kept) == str(decision) == ledger.explain()
    planned = 0
    for (layout, shape, itemsize), move in zip(kept.tensors, kept.moves, strict=True):
        if move is not None:
            planned += plan(layout, move[0], shape, itemsize).nbytes
    assert planned == ledger.nbytes() > 0  # the second call finds what was gathered
    with CommunicationLedger(mesh) as after:
        torch.nn.functional.linear(x, w)
    assert after.decisions == []
