# SPDX-License-Identifier: Apache-2.0
"""What a user may get wrong: a clear error on every rank, no hang, and the ranks go on together."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it

from hyper_parallel import (
    DeviceMesh,
    DTensor,
    Layout,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.core.shard import OperatorError
from hyper_parallel.testing import on_ranks, run_ranks

R = [Replicate(), Replicate()]


def mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def x(placements=R, shape=(4, 6)):
    return distribute_tensor(torch.ones(shape), mesh(), placements)


# what is done -> the error, and what its message says
WRONG = {
    "too few placements": (
        lambda: distribute_tensor(torch.ones(4), mesh(), [Shard(0)]),
        ValueError,
        "expected 2 placements, one for each axis of .*, got 1",
    ),
    "a dim out of range": (
        lambda: distribute_tensor(torch.ones(4), mesh(), [Shard(1), Replicate()]),
        ValueError,
        "axis 'dp' cuts dim 1, but the tensor has 1 dims",
    ),
    "too few aliases": (
        lambda: distribute_tensor(torch.ones(4, 4), mesh(), ("dp",)),
        ValueError,
        r"expected one alias for each of 2 dims, got 1: \('dp',\)",
    ),
    "an unknown axis": (
        lambda: distribute_tensor(torch.ones(4, 4), mesh(), ("pp", "None")),
        ValueError,
        "unknown axis 'pp'; the mesh has dp, tp",
    ),
    "a repeated axis": (
        lambda: distribute_tensor(torch.ones(4, 4), mesh(), ("dp", "dp")),
        ValueError,
        "axis 'dp' is used twice",
    ),
    "placements that are none": (
        lambda: distribute_tensor(torch.ones(4), mesh(), [Shard(0), 1]),
        ValueError,
        "expected placements .* got 1",
    ),
    "a mesh that does not fit the ranks": (
        lambda: init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp")),
        ValueError,
        "6",
    ),
    "a mesh with a rank that is not there": (
        lambda: DeviceMesh("cpu", [0, 7]).get_group(),
        ValueError,
        "7",
    ),
    "a mesh whose ranks go down": (
        lambda: distribute_tensor(
            torch.ones(8), DeviceMesh("cpu", [3, 1, 0, 2]), [Shard(0)]
        ),
        ValueError,
        "tensors lie on meshes whose ranks ascend along every axis; axis 0 of .* does not",
    ),
    "a layout for other ranks": (
        lambda: Layout((2, 2), ("a", "b"), rank_list=(0, 1)),
        ValueError,
        "needs 4 ranks, got 2",
    ),
    "different meshes": (
        lambda: x() + distribute_tensor(torch.ones(4, 6), mesh()["tp"], [Shard(0)]),
        OperatorError,
        "add: its tensors lie on different meshes, .*from_local",
    ),
    "a plain tensor": (
        lambda: F.linear(x(), torch.ones(3, 6)),
        OperatorError,
        r"linear: tensor 1 among its arguments, of shape \(3, 6\), is a plain tensor.*distribute_tensor.*implicit_repl",
    ),
    "a plain tensor by keyword": (
        lambda: F.linear(x(), x(), bias=torch.ones(4)),
        OperatorError,
        r"linear: tensor 2 among its arguments, of shape \(4,\)",
    ),
    "a shard that contradicts the layout": (
        lambda: DTensor.from_local(
            torch.ones(3, 6), mesh(), [Shard(0), Replicate()], shape=(4, 6)
        ),
        ValueError,
        r"from_local: rank \d has a shard of shape \(3, 6\), but .* gives it \(2, 6\) of a tensor of shape \(4, 6\)",
    ),
    "shapes that do not go together": (
        lambda: x() + x(shape=(4, 5)),
        ValueError,
        "add: .* has size 6 in operand 0 .* but 5 in operand 1",
    ),
    "a contraction that does not match": (
        lambda: x() @ x(),
        ValueError,
        "matmul: .* factor k has size 6 in operand 0 .* but 4 in operand 1",
    ),
    "a dim that is not there": (
        lambda: x().sum(2),
        ValueError,
        "sum: .*dim=2 is not a dim of a tensor with 2 dims",
    ),
    "reductions that do not commute": (
        lambda: distribute_tensor(torch.ones(4), mesh(), [Partial("max"), Partial()]),
        ValueError,
        "reductions by max and by sum cannot be pending together",
    ),
    "a DTensor distributed again": (
        lambda: distribute_tensor(x(), mesh(), R),
        ValueError,
        "already has the layout .* use redistribute",
    ),
    "redistribution to another mesh": (
        lambda: x().redistribute(mesh()["tp"], [Shard(0)]),
        ValueError,
        "redistribute: the tensor lies on",
    ),
    "no mesh": (
        lambda: distribute_tensor(torch.ones(4), None, [Shard(0)]),
        RuntimeError,
        "mesh",
    ),
    "a rank's own values": (
        lambda: DTensor.from_local(
            torch.full((2,), float(get_platform().get_rank())),
            mesh(),
            R,
            run_check=True,
        ),
        ValueError,
        r"from_local: .*ranks \[1, 2, 3\] have another values than rank 0",
    ),
    "a rank's own dtype": (
        lambda: DTensor.from_local(
            torch.ones(
                2,
                dtype=torch.float64
                if get_platform().get_rank() == 2
                else torch.float32,
            ),
            mesh(),
            [Shard(0), Shard(0)],
            run_check=True,
        ),
        ValueError,
        r"from_local: .*ranks \[2\] have another dtype than rank 0",
    ),
}


def go_wrong(names):
    for name in names:
        call, error, says = WRONG[name]
        with pytest.raises(error, match=f"(?s){says}"):
            call()
    # Nobody is left behind: the ranks still communicate.
    return x([Shard(0), Shard(1)]).full_tensor().sum().item()


def test_every_rank_gets_a_clear_error_and_goes_on():
    assert run_ranks(go_wrong, 4, list(WRONG)) == [24.0] * 4


@on_ranks(2)
def test_a_sparse_tensor_is_refused_with_what_to_do():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    sparse = torch.eye(4).to_sparse()
    with pytest.raises(
        ValueError, match=r"distribute_tensor: expected a dense tensor.*to_dense"
    ):
        distribute_tensor(sparse, mesh, [Shard(0)])
    with pytest.raises(ValueError, match="from_local: expected a dense tensor"):
        DTensor.from_local(sparse, mesh, [Shard(0)])
    for resize in (lambda x: x.resize_(2, 2), lambda x: x.resize_as_(x)):
        with pytest.raises(RuntimeError, match="one memory in which all elements lie"):
            resize(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
