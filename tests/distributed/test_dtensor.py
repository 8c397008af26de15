# SPDX-License-Identifier: Apache-2.0
"""Distributed tensors between real ranks: making, moving, gathering, gradients, copies, bad input."""

import copy
import io

import pytest
import torch
from torch import nn

from hyper_parallel import (
    DTensor,
    Layout,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.core.dtensor import dtensor
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.testing import on_ranks

WHOLE = torch.arange(35.0, dtype=torch.float64).view(7, 5)


def grid():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


PLACED = [
    [Shard(0), Shard(1)],
    [Shard(0), Shard(0)],
    [Replicate(), Shard(-1)],
    [Replicate(), Replicate()],
    ("dp", "tp"),
    (("tp", "dp"), "None"),
]


@pytest.mark.parametrize("placements", PLACED, ids=str)
@on_ranks(4)
def test_cut_without_communication_and_put_together(placements):
    mesh = grid()
    with CommunicationLedger() as ledger:
        tensor = distribute_tensor(WHOLE, mesh, placements)
    assert not ledger.entries
    layout = tensor.layout
    assert tensor.shape == (7, 5)
    assert (tensor.size(), tensor.size(1), tensor.numel(), tensor.ndim) == (
        torch.Size((7, 5)),
        5,
        35,
        2,
    )
    assert tensor.local_shape == tensor.to_local().shape == layout.local_shape((7, 5))
    assert torch.equal(tensor.to_local(), WHOLE[layout.local_slices((7, 5))])
    assert (
        tensor.to_local().untyped_storage().nbytes() == tensor.to_local().nbytes
    )  # a shard does not hold the whole
    assert tensor.device_mesh is mesh
    assert tensor.placements == layout.placements
    assert torch.equal(tensor.full_tensor(), WHOLE)
    for other in PLACED:
        moved = tensor.redistribute(mesh, other)
        assert torch.equal(moved.full_tensor(), WHOLE)
        assert (moved is tensor) == (moved.layout is tensor.layout)


@on_ranks(4)
def test_gradients_flow_from_plain_tensors_through_layouts():
    platform, mesh = get_platform(), grid()
    rank = platform.get_rank()
    part = torch.tensor([float(rank + 1)] * 4, requires_grad=True)
    pending = DTensor.from_local(part, mesh, [Partial(), Partial()])
    assert pending.full_tensor().tolist() == [10.0] * 4
    weights = torch.arange(4.0)
    rows = pending.redistribute(mesh, [Shard(0), Replicate()])
    (rows.to_local() * weights[rows.layout.local_slices((4,))]).sum().backward()
    assert (
        part.grad.tolist() == weights.tolist()
    )  # every part contributes to the one sum
    assert pending.reduce_partial().placements == (Replicate(), Replicate())
    assert pending.requires_grad
    assert pending.is_leaf
    assert rows.grad_fn is not None
    assert pending.grad.placements == (Replicate(), Replicate())
    assert pending.grad.to_local() is part.grad


@on_ranks(4)
def test_a_parameter_that_lies_on_a_mesh():
    mesh = grid()
    parameter = nn.Parameter(distribute_tensor(WHOLE, mesh, [Shard(0), Replicate()]))
    assert isinstance(parameter, DTensor)
    assert isinstance(parameter, nn.Parameter)
    assert parameter.is_leaf
    assert parameter.requires_grad
    module = nn.Module()
    module.weight = parameter
    assert dict(module.named_parameters())["weight"] is parameter
    parameter.full_tensor().square().sum().backward()
    expected = distribute_tensor(2 * WHOLE, mesh, [Shard(0), Replicate()])
    assert parameter.grad.placements == parameter.placements
    assert torch.equal(parameter.grad.to_local(), expected.to_local())
    state = module.state_dict()["weight"]
    assert isinstance(state, DTensor)
    assert not state.requires_grad
    parameter.grad = None
    assert parameter.grad is None
    twin = copy.deepcopy(module).weight
    assert isinstance(twin, nn.Parameter)
    assert twin.layout is parameter.layout
    assert twin.to_local().data_ptr() != parameter.to_local().data_ptr()
    with pytest.raises(TypeError, match="what the other ranks have would be missing"):
        torch.save(state, io.BytesIO())
    buffer = io.BytesIO()
    torch.save(state.redistribute(), buffer)  # which every rank has all of
    buffer.seek(0)
    again = torch.load(buffer)
    assert again.layout is state.redistribute().layout
    assert torch.equal(again.to_local(), WHOLE)


@on_ranks(4)
def test_tensors_from_nothing():
    mesh = grid()
    placements = [Shard(0), Shard(1)]
    for made, value in (
        (dtensor.ones((7, 5), mesh, placements), 1),
        (dtensor.zeros((7, 5), mesh, placements), 0),
    ):
        assert made.full_tensor().eq(value).all()
    made = dtensor.full(
        (7, 5), 3, device_mesh=mesh, placements=placements, dtype=torch.float64
    )
    assert made.full_tensor().eq(3).all()
    assert made.dtype is torch.float64
    assert dtensor.empty((7, 5), mesh, placements).local_shape == made.local_shape
    assert dtensor.ones(4, mesh, [Shard(0), Replicate()]).shape == (4,)
    for draw, plain in ((dtensor.rand, torch.rand), (dtensor.randn, torch.randn)):
        for drawn in (
            [Shard(0), Shard(1)],
            [Shard(1), Replicate()],
            [Replicate(), Replicate()],
        ):
            torch.manual_seed(4)
            mine = draw((7, 5), mesh, drawn)
            torch.manual_seed(4)
            assert torch.equal(mine.full_tensor(), plain(7, 5))
    with pytest.raises(ValueError, match="leaves a reduction pending"):
        dtensor.ones((2,), mesh, [Partial(), Replicate()])


@on_ranks(4)
def test_casts_and_the_current_mesh():
    mesh = grid()
    with mesh:
        tensor = DTensor.from_local(
            torch.ones(2, dtype=torch.float64), None, [Partial(), Replicate()]
        )
    assert tensor.float().dtype is torch.float32
    assert tensor.to(torch.float64) is tensor
    assert tensor.to(torch.float16).placements == tensor.placements
    rounded = tensor.to(torch.int64)  # parts are reduced before they are rounded
    assert not rounded.layout.is_partial()
    assert rounded.full_tensor().tolist() == [2, 2]
    assert tensor.reduce_partial().to(torch.int64).full_tensor().tolist() == [2, 2]


@on_ranks(4)
def test_one_rank_may_have_the_data():
    platform, mesh = get_platform(), grid()
    mine = WHOLE * (platform.get_rank() + 1)
    sent = distribute_tensor(mine, mesh, [Shard(0), Shard(1)], src_data_rank=2)
    assert torch.equal(sent.full_tensor(), WHOLE * 3)
    assert torch.equal(
        mine, WHOLE * (platform.get_rank() + 1)
    )  # the caller's tensor is left alone
    with pytest.raises(ValueError, match="src_data_rank 9 is not in"):
        distribute_tensor(mine, mesh, [Shard(0), Shard(1)], src_data_rank=9)


@on_ranks(4)
def test_from_local_checks():
    platform, mesh = get_platform(), grid()
    rank = platform.get_rank()
    rows = [2, 2, 2, 1][rank]
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    uneven = DTensor.from_local(
        torch.full((rows, 3), float(rank)),
        flat,
        [Shard(0)],
        shape=(7, 3),
        run_check=True,
    )
    assert uneven.full_tensor()[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3]
    with pytest.raises(
        ValueError,
        match=rf"rank {rank} has a shard of shape \(5, 3\), but .* gives it \({rows}, 3\)",
    ):
        DTensor.from_local(torch.ones(5, 3), flat, [Shard(0)], shape=(7, 3))
    with pytest.raises(ValueError, match=r"ranks \[2\] have another dtype than rank 0"):
        odd = torch.ones(2, dtype=torch.float64 if rank == 2 else torch.float32)
        DTensor.from_local(odd, flat, [Shard(0)], run_check=True)
    with pytest.raises(
        ValueError, match=r"ranks \[1\] have another values than rank 0"
    ):
        DTensor.from_local(
            torch.ones(2) * (1 + (rank == 1)),
            mesh,
            [Shard(0), Replicate()],
            run_check=True,
        )
    with pytest.raises(ValueError, match=r"ranks \[3\] have another shape than rank 0"):
        DTensor.from_local(
            torch.ones(3 if rank == 3 else 2), flat, [Shard(0)], run_check=True
        )


@on_ranks(4)
def test_bad_input():
    mesh = grid()
    tensor = distribute_tensor(WHOLE, mesh, [Shard(0), Replicate()])
    with pytest.raises(ValueError, match="expected 2 placements, one for each axis"):
        distribute_tensor(WHOLE, mesh, [Shard(0)])
    with pytest.raises(ValueError, match="cuts dim 2, but the tensor has 2 dims"):
        tensor.redistribute(mesh, [Shard(2), Replicate()])
    with pytest.raises(ValueError, match="unknown axis 'cp'"):
        distribute_tensor(WHOLE, mesh, ("cp", "None"))
    with pytest.raises(
        ValueError, match="expected one alias for each of 2 dims, got 1"
    ):
        distribute_tensor(WHOLE, mesh, ("dp",))
    with pytest.raises(ValueError, match="already has the layout"):
        distribute_tensor(tensor, mesh, [Shard(0), Replicate()])
    with pytest.raises(ValueError, match="redistribute: the tensor lies on"):
        tensor.redistribute(init_device_mesh("cpu", (4,)), [Shard(0)])
    with pytest.raises(TypeError, match="device_mesh must be a DeviceMesh, got str"):
        distribute_tensor(WHOLE, "cpu", [Shard(0)])
    with pytest.raises(RuntimeError, match="there is no current mesh"):
        distribute_tensor(WHOLE, None, [Shard(0)])
    bound = Layout.from_device_mesh(mesh)("dp", "None")
    assert distribute_tensor(WHOLE, None, bound).layout is bound
