# SPDX-License-Identifier: Apache-2.0
"""Reading and writing by index: what is shared, what is refused, what it costs. tests/rules has the values."""

import warnings

import pytest
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
from hyper_parallel.core.shard.arguments import OperatorError
from hyper_parallel.testing import on_ranks

LAYOUTS = [[Replicate()], [Shard(0)], [Shard(1)]]


def draw(*shape, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def mesh_of(count):
    return init_device_mesh("cpu", (count,), mesh_dim_names=("x",))


def parts_of(data, mesh):
    """A pending sum, of which each rank has another part."""
    rank = mesh.get_coordinate()[0]
    return DTensor.from_local(
        [data, data, -data, 0 * data][rank].clone(), mesh, [Partial()]
    )


def same(mine, true):
    torch.testing.assert_close(
        mine.full_tensor().detach(), true.detach(), rtol=0, atol=0
    )


@on_ranks(4)
def test_masks_and_booleans_run_on_whole_tensors():
    data, mesh = draw(5, 6), mesh_of(4)
    for placements in LAYOUTS:
        x = distribute_tensor(data, mesh, placements)
        mask = x > 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for index in (
                lambda t, m: m,
                lambda t, m: (m[:, 0], 1),
                lambda t, m: True,
                lambda t, m: [True] * 5,
            ):
                same(x[index(x, mask)], data[index(data, data > 0)])
            for value in (torch.arange(int((data > 0).sum()), dtype=torch.float64),):
                mine, true = x.clone(), data.clone()
                mine[mask] = distribute_tensor(value, mesh, [Replicate()])
                true[data > 0] = value
                same(mine, true)
                assert mine.placements == tuple(placements)
            mine, true = x.clone(), data.clone()
            mine[True, 1] = 3.0
            true[True, 1] = 3.0
            same(mine, true)


@on_ranks(4)
def test_an_assignment_to_a_part_moves_nothing():
    data, mesh = draw(5, 6), mesh_of(4)
    row = distribute_tensor(draw(6, seed=1), mesh, [Replicate()])
    for placements in LAYOUTS:
        mine, true = distribute_tensor(data, mesh, placements), data.clone()
        memory = mine.to_local().data_ptr()
        with CommunicationLedger(mesh) as ledger:
            mine[1:4, 2] = 7.0
            mine[-1] = row
            mine[:, ::2] = 1.5
        assert ledger.counts() == {}
        true[1:4, 2] = 7.0
        true[-1] = row.to_local()
        true[:, ::2] = 1.5
        same(mine, true)
        assert mine.placements == tuple(placements)
        assert mine.to_local().data_ptr() == memory


@on_ranks(4)
def test_a_table_that_is_cut_is_read_without_gathering_it():
    data, mesh = draw(9, 3), mesh_of(4)
    table = distribute_tensor(data, mesh, [Shard(0)])
    rows = distribute_tensor(torch.tensor([[8, -9], [0, 4]]), mesh, [Replicate()])
    with CommunicationLedger(mesh) as ledger:
        found = table[rows]
    assert ledger.counts() == {}
    assert found.placements == (Partial(),)
    same(found, data[rows.to_local()])


@on_ranks(4)
def test_what_is_read_shares_memory_or_refuses_to_be_changed():
    data, mesh = draw(8, 6), mesh_of(4)
    x = distribute_tensor(data, mesh, [Shard(0)])
    x[:, 1].fill_(3.0)
    x[:, 2:4].mul_(2.0)
    x.view(4, 2, 6)[:, 0, 5].zero_()
    x.t()[0].add_(1.0)
    true = data.clone()
    true[:, 1].fill_(3.0)
    true[:, 2:4].mul_(2.0)
    true.view(4, 2, 6)[:, 0, 5].zero_()
    true.t()[0].add_(1.0)
    same(x, true)
    for view in (
        x[1],
        x[2:4],
        x.narrow(0, 1, 2),
        x.split(3)[1],
        x.reshape(3, 16),
        x[1].contiguous(),
        x[1].double(),
        x[1].real,
    ):
        with pytest.raises(OperatorError, match="copy"):
            view.add_(1.0)
        with pytest.raises(OperatorError, match="copy"):
            view[0] = 1.0
    rows = x[distribute_tensor(torch.tensor([1, 2]), mesh, [Replicate()])]
    rows.add_(1.0)  # a copy in torch too
    same(x, true)


@on_ranks(4)
def test_assignments_to_a_pending_sum():
    data, mesh = draw(5, 6), mesh_of(4)
    index = distribute_tensor(torch.tensor([0, 3]), mesh, [Replicate()])
    assignments = [(1, 2.5), ((slice(1, 3), 2), 0.0), (index, 4.0), (Ellipsis, 1.0)]
    for where, value in assignments:
        mine, true = parts_of(data, mesh), data.clone()
        mine[where] = value
        true[where.to_local() if isinstance(where, DTensor) else where] = value
        assert mine.placements == (Partial(),)
        same(mine, true)


@on_ranks(2)
def test_errors_are_those_of_one_device():
    mesh = mesh_of(2)
    x = distribute_tensor(draw(4, 6), mesh, [Shard(0)])
    rows = distribute_tensor(torch.tensor([0, 4]), mesh, [Replicate()])
    for index in (4, -5, (0, 6), (0, 0, 0), (Ellipsis, Ellipsis), rows, (rows, rows)):
        with pytest.raises(IndexError):
            x[index]
        with pytest.raises(IndexError):
            x[index] = 1.0
    one = distribute_tensor(torch.tensor([True]), mesh, [Replicate()])
    half = distribute_tensor(torch.tensor([0.5]), mesh, [Replicate()])
    for index in (one, half, half[0]):
        with warnings.catch_warnings(), pytest.raises(IndexError):
            warnings.simplefilter("ignore")
            x[index]
        with warnings.catch_warnings(), pytest.raises(IndexError):
            warnings.simplefilter("ignore")
            x[index] = 1.0
    for index, value in ((0, [1.0] * 6), (slice(None, None, -1), 1.0)):
        with pytest.raises((TypeError, ValueError)):
            x[index] = value
    with pytest.raises(RuntimeError):
        x[0] = distribute_tensor(draw(5), mesh, [Replicate()])
    parameter = distribute_tensor(draw(4).requires_grad_(), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="leaf"):
        parameter[0] = 1.0
    with pytest.raises(OperatorError, match="as_strided"):
        x.as_strided((2, 2), (1, 2))
