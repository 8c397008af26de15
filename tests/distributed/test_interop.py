# SPDX-License-Identifier: Apache-2.0
"""To and from torch's own distributed tensors: the same memory, groups, layouts and gradients."""

import logging
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel import (
    DeviceMesh,
    DTensor,
    Layout,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.core.dtensor.interop import (
    from_native,
    mesh_from_native,
    mesh_to_native,
    to_native,
)
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.testing import on_ranks


def grid():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def theirs():
    """torch's distributed tensors, which only the ranks import."""
    import torch.distributed.tensor as tensors

    logging.getLogger("torch.distributed.tensor").setLevel(
        logging.ERROR
    )  # it comments on its own gathers
    return tensors


def known_groups():
    return set(dist.distributed_c10d._world.pg_map)


PLACED = [
    [Replicate(), Replicate()],
    [Shard(0), Replicate()],
    [Shard(1), Shard(0)],
    [Shard(0), Shard(0)],
    (("tp", "dp"), "None"),  # the later axis is the outer one
    ("None", ("tp", "dp")),
]
SHAPES = [
    (8, 4),
    (7, 5),
    (3, 1),
    (1, 2),
    (0, 3),
]  # even, uneven, empty shards, nothing at all


@on_ranks(4)
def test_there_and_back():
    tensors, mesh = theirs(), grid()
    for shape in SHAPES:
        whole = torch.arange(float(shape[0] * shape[1])).view(shape)
        for placed in PLACED:
            ours = distribute_tensor(whole, mesh, placed)
            with CommunicationLedger() as ledger:
                native = to_native(ours)
                again = from_native(native)
            assert not ledger.entries
            assert type(native) is tensors.DTensor
            assert (native.shape, native.stride(), native.dtype) == (
                whole.shape,
                whole.stride(),
                whole.dtype,
            )
            assert type(again) is DTensor
            assert again.layout is ours.layout
            assert again.shape == ours.shape
            local = ours.to_local()
            assert (
                native.to_local().data_ptr()
                == again.to_local().data_ptr()
                == local.data_ptr()
            )
            assert torch.equal(native.full_tensor(), whole)
            assert torch.equal(again.full_tensor(), whole)
            assert native.is_leaf
            assert not native.requires_grad


@on_ranks(4)
def test_tensors_that_torch_has_laid_out():
    tensors = theirs()
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = tensors.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows, columns, copied = tensors.Shard(0), tensors.Shard(1), tensors.Replicate()
    expected = {
        (rows, copied): (Shard(0), Replicate()),
        (columns, rows): (Shard(1), Shard(0)),
        (rows, rows): (Shard(0), Shard(0)),
        (_StridedShard(0, split_factor=2), rows): (StridedShard(0, 2), Shard(0)),
    }
    for native_placements, placements in expected.items():
        for shape in (
            SHAPES[:1]
            if isinstance(native_placements[0], _StridedShard)
            else SHAPES[:4]
        ):
            whole = torch.arange(float(shape[0] * shape[1])).view(shape)
            native = tensors.distribute_tensor(whole, mesh, native_placements)
            ours = from_native(native)
            assert ours.placements == placements
            assert ours.to_local().data_ptr() == native.to_local().data_ptr()
            assert torch.equal(ours.full_tensor(), whole)
            back = to_native(ours)
            assert back.placements == native.placements
            assert back.device_mesh is mesh
    # The order of the axes may stand in the specification instead.
    native = tensors.distribute_tensor(whole, mesh, (rows, rows))
    native._spec.shard_order = (ShardOrderEntry(0, (1, 0)),)
    assert from_native(native).placements == (StridedShard(0, 2), Shard(0))


@on_ranks(4)
def test_what_waits_for_a_reduction():
    tensors, mesh = theirs(), grid()
    rank = get_platform().get_rank()
    part = torch.tensor([1.0, -2.0, 3.0]) * (rank + 1)
    truth = {
        "sum": part / (rank + 1) * 10,
        "avg": part / (rank + 1) * 2.5,
        "prod": torch.tensor([24.0, 384.0, 1944.0]),
    }
    truth |= {
        "max": torch.tensor([4.0, -2.0, 12.0]),
        "min": torch.tensor([1.0, -8.0, 3.0]),
    }
    for op, expected in truth.items():
        ours = DTensor.from_local(part, mesh, [Partial(op), Partial(op)])
        native = to_native(ours)
        assert (
            native.placements
            == (tensors.Partial("product" if op == "prod" else op),) * 2
        )
        assert native.to_local().data_ptr() == part.data_ptr()
        assert from_native(native).layout is ours.layout
        torch.testing.assert_close(native.full_tensor(), expected)
        torch.testing.assert_close(from_native(native).full_tensor(), expected)


@on_ranks(4)
def test_meshes_share_their_groups():
    tensors, platform = theirs(), get_platform()
    mesh = grid()
    groups = mesh.get_all_groups()
    before = known_groups()
    native = mesh_to_native(mesh)
    assert native is mesh_to_native(mesh)
    assert native.mesh.tolist() == [[0, 1], [2, 3]]
    assert native.mesh_dim_names == ("dp", "tp")
    assert [native.get_group(0), native.get_group(1)] == groups
    assert mesh_from_native(native) is mesh
    assert (
        mesh_to_native(mesh["tp"]) == native["tp"]
    )  # a part of the whole, as torch's own
    assert mesh_to_native(mesh["tp"]).get_group() is mesh.get_group("tp")
    assert mesh_from_native(native["dp"]) == mesh["dp"]
    assert known_groups() == before

    # A mesh that torch has made: its groups become ours.
    other = tensors.init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    made = mesh_from_native(other)
    assert (made.mesh_shape, made.mesh_dim_names, made.device_type) == (
        (2, 2),
        ("x", "y"),
        "cpu",
    )
    three = tensors.DeviceMesh("cpu", [0, 1, 2])
    if platform.get_rank() < 3:
        assert (
            mesh_from_native(three).get_group() is three.get_group()
        )  # nobody had one of these ranks
    else:
        assert mesh_from_native(three).get_coordinate() is None
    assert mesh_to_native(made) is other

    # Names are torch's wish where there are several axes; ours may have none.
    bare = init_device_mesh("cpu", (2, 2))
    assert mesh_from_native(mesh_to_native(bare)) is bare
    assert mesh_from_native(mesh_to_native(bare)).mesh_dim_names is None
    flat = init_device_mesh("cpu", (4,))
    assert mesh_to_native(flat).mesh.tolist() == [0, 1, 2, 3]
    assert mesh_from_native(mesh_to_native(flat)) is flat


@on_ranks(2)
def test_a_parameter_becomes_a_parameter_in_the_same_memory():
    tensors, mesh = theirs(), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for trained in (True, False):
        ours = nn.Parameter(
            distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)]),
            requires_grad=trained,
        )
        native = to_native(ours)
        assert isinstance(native, nn.Parameter)
        assert isinstance(native, tensors.DTensor)
        again = from_native(native)
        assert isinstance(again, nn.Parameter)
        assert isinstance(again, DTensor)
        for parameter in (native, again):
            assert parameter.is_leaf
            assert parameter.requires_grad == trained
        assert (
            native.to_local().data_ptr()
            == again.to_local().data_ptr()
            == ours.to_local().data_ptr()
        )
    # Each trains with its framework's gradients, on one memory.
    ours.requires_grad_()
    native = to_native(ours)
    native.full_tensor().square().sum().backward()
    assert ours.grad is None
    torch.testing.assert_close(
        native.grad.full_tensor(), torch.arange(0.0, 12.0, 2).view(3, 2)
    )
    torch.optim.SGD([native], 0.5).step()
    assert ours.full_tensor().eq(0).all()
    leaf = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
    assert to_native(leaf).is_leaf
    assert to_native(leaf).requires_grad
    assert not isinstance(to_native(leaf), nn.Parameter)
    assert from_native(to_native(leaf)).requires_grad


@on_ranks(4)
def test_what_was_computed_keeps_its_graph():
    tensors, mesh = theirs(), grid()
    weights = torch.arange(35.0).view(7, 5)
    for placed in (
        [Shard(0), Shard(1)],
        [Replicate(), Shard(0)],
        [Partial(), Shard(1)],
        [Partial(), Partial()],
    ):
        layout = Layout.from_device_mesh(mesh)(placed).bind(2)
        local = torch.ones(layout.local_shape((7, 5)), requires_grad=True)
        truth = weights[layout.local_slices((7, 5))] * 3

        def through_theirs(x, placed=placed):
            return from_native(
                to_native(DTensor.from_local(x * 3, mesh, placed, shape=(7, 5)))
            )

        back = through_theirs(local)
        assert not back.is_leaf
        (back.full_tensor() * weights).sum().backward()
        assert torch.equal(local.grad, truth), (
            placed
        )  # every part contributes to the one sum
        native = to_native(
            DTensor.from_local(local.detach(), mesh, placed, shape=(7, 5))
        ).requires_grad_()
        (from_native(native * 3).full_tensor() * weights).sum().backward()
        assert native.grad.placements == tuple(
            tensors.Replicate() if p.is_partial() else p for p in native.placements
        )
        assert torch.equal(native.grad.to_local(), truth), placed


@on_ranks(2)
def test_strides_waiting_results_and_data_to_come():
    tensors, mesh = theirs(), init_device_mesh("cpu", (2,))
    column_major = torch.arange(12.0).view(3, 4).t()  # 4 x 3
    ours = DTensor.from_local(column_major, mesh, [Shard(0)])
    native = to_native(ours)
    assert native.shape == (8, 3)
    assert native.stride() == (1, 8)
    assert native.to_local().data_ptr() == column_major.data_ptr()
    pending = native.redistribute(placements=[tensors.Replicate()], async_op=True)
    assert type(from_native(pending).to_local()) is torch.Tensor
    assert torch.equal(from_native(pending).full_tensor(), ours.full_tensor())
    scalar = distribute_tensor(torch.tensor(3.0), mesh, [Replicate()])
    assert (
        to_native(scalar).full_tensor().item()
        == from_native(to_native(scalar)).full_tensor().item()
        == 3.0
    )
    empty = distribute_tensor(torch.empty(5, 2, device="meta"), mesh, [Shard(0)])
    assert to_native(empty).is_meta
    assert from_native(to_native(empty)).layout is empty.layout


@on_ranks(4)
def test_what_cannot_be_converted():
    tensors, platform = theirs(), get_platform()
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = grid()
    for wrong in (torch.ones(2), "tensor", None):
        with pytest.raises(
            TypeError,
            match=r"from_native: expected a torch\.distributed\.tensor\.DTensor, got",
        ):
            from_native(wrong)
        with pytest.raises(
            TypeError, match="to_native: expected a hyper_parallel DTensor, got"
        ):
            to_native(wrong)
    for wrong in (mesh, [0, 1], None):
        with pytest.raises(
            TypeError, match="mesh_from_native: expected a torch DeviceMesh, got"
        ):
            mesh_from_native(wrong)
    with pytest.raises(
        TypeError,
        match="mesh_to_native: expected a hyper_parallel DeviceMesh, got list",
    ):
        mesh_to_native([0, 1])
    with pytest.raises(
        TypeError, match="to_native: expected a hyper_parallel DTensor, got DTensor"
    ):
        to_native(
            to_native(distribute_tensor(torch.ones(2), mesh, [Shard(0), Replicate()]))
        )
    for ranks in ([3, 1, 0, 2], [[0, 1], [3, 2]]):
        with pytest.raises(
            ValueError, match="must ascend along every axis; along axis . they do not"
        ):
            mesh_to_native(DeviceMesh("cpu", ranks))
    with pytest.raises(
        ValueError, match="must ascend along every axis; along axis 0 they do not"
    ):
        mesh_from_native(tensors.DeviceMesh("cpu", [1, 0, 2, 3]))
    if platform.get_rank() == 3:
        with pytest.raises(RuntimeError, match="mesh_to_native: rank 3 is not in"):
            mesh_to_native(DeviceMesh("cpu", [0, 1]))
    native = to_native(distribute_tensor(torch.ones(8, 2), mesh, [Shard(0), Shard(0)]))
    native._spec.placements = (_StridedShard(0, split_factor=3), tensors.Replicate())
    native._spec.use_strided_shard_as_shard_order = False
    with pytest.raises(
        ValueError,
        match=r"_StridedShard.* on axis 0 has no counterpart here; redistribute",
    ):
        from_native(native)
    parts = platform.from_native_dtensor(
        to_native(distribute_tensor(torch.ones(2), mesh, [Shard(0), Replicate()]))
    )
    assert parts.placements == (("shard", 0, 1), ("replicate",))
    elsewhere = platform.to_native_mesh(
        platform.from_native_mesh(parts.mesh)._replace(device_type="cuda")
    )
    with pytest.raises(
        ValueError,
        match=r"shard lies on cpu, but the mesh is one of cuda: torch would copy it",
    ):
        platform.to_native_dtensor(parts._replace(mesh=elsewhere))


def test_torchs_tensors_are_imported_when_they_are_wanted():
    code = "import sys, hyper_parallel.core.dtensor.interop; print('torch.distributed.tensor' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert run.stdout.split() == ["False"]
