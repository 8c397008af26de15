# SPDX-License-Identifier: Apache-2.0
"""Meshes over real ranks: places, groups, meshes cut from meshes."""

import copy
import pickle

import numpy as np
import pytest
import torch

from hyper_parallel import DeviceMesh, get_current_mesh, get_platform, init_device_mesh
from hyper_parallel.testing import on_ranks


def grid():
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))


@on_ranks(8)
def test_places_and_groups():
    platform, mesh = get_platform(), grid()
    rank = platform.get_rank()
    assert grid() is mesh  # the same arguments, the same object
    assert mesh.mesh_shape == mesh.shape == (2, 4)
    assert (mesh.ndim, mesh.size(), mesh.size(0), mesh.size("tp")) == (2, 8, 2, 4)
    assert mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.rank_list == tuple(range(8))
    assert mesh.rank == rank
    assert mesh.root_mesh is mesh
    assert mesh.get_coordinate() == (rank // 4, rank % 4)
    assert (mesh.get_local_rank("dp"), mesh.get_local_rank(1)) == (rank // 4, rank % 4)
    assert mesh.get_rank_list_along_axis("dp") == [rank % 4, rank % 4 + 4]
    assert mesh.get_devices_for_axis("tp", 6) == [4, 5, 6, 7]
    assert mesh.get_device_num_along_axis("tp") == 4
    assert (mesh.axis_index("dp"), mesh.axis_id("dp"), mesh.axis_id("tp")) == (0, 1, 0)
    for axis, name in enumerate(("dp", "tp")):
        group = mesh.get_group(name)
        assert group is mesh.get_group(axis) is mesh.get_all_groups()[axis]
        assert platform.get_process_group_ranks(group) == mesh.get_rank_list_along_axis(
            axis
        )
    total = platform.all_reduce(
        torch.tensor([float(rank)]), mesh.get_group("tp")
    ).item()
    assert total == sum(mesh.get_rank_list_along_axis("tp"))


@on_ranks(8)
def test_meshes_from_meshes():
    platform, mesh = get_platform(), grid()
    rank = platform.get_rank()
    line = mesh["tp"]
    assert line.rank_list == tuple(mesh.get_rank_list_along_axis("tp"))
    assert line.root_mesh is mesh
    assert line.get_group() is mesh.get_group("tp")
    assert line.get_local_rank() == rank % 4
    assert mesh["dp", "tp"] is mesh
    flat = mesh.flatten("all")
    assert flat.rank_list == tuple(range(8))
    assert mesh["all"] is flat is mesh.flatten("all")
    cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    face = cube["a", "c"]
    assert face.mesh_shape == (2, 2)
    assert rank in face.rank_list
    assert cube["b", "c"].flatten("bc").rank_list == tuple(
        range(rank // 4 * 4, rank // 4 * 4 + 4)
    )
    assert cube["bc"].size() == 4
    assert DeviceMesh.concatenate([cube["a"], cube["c"]]) == face
    split = mesh.unflatten("tp", (2, 2), ("cp", "tp"))
    assert split.mesh_shape == (2, 2, 2)
    assert split.mesh_dim_names == ("dp", "cp", "tp")
    assert split["cp"].rank_list == tuple(sorted({rank, rank ^ 2}))
    again = DeviceMesh.from_group(mesh.get_group("tp"), "cpu", mesh_dim_names=("tp",))
    assert again.rank_list == line.rank_list
    assert again.get_group() is mesh.get_group("tp")
    both = DeviceMesh.from_group(
        mesh.get_all_groups(), "cpu", mesh.mesh, mesh_dim_names=("dp", "tp")
    )
    assert both == mesh
    assert hash(both) == hash(mesh)


@on_ranks(4)
def test_a_mesh_may_cover_a_part_of_the_job():
    platform = get_platform()
    rank = platform.get_rank()
    pair = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    assert pair.rank_list == ((0, 1) if rank < 2 else (2, 3))
    assert platform.all_reduce(torch.tensor([rank]), pair.get_group()).item() == sum(
        pair.rank_list
    )
    chosen = init_device_mesh("cpu", (3,), rank_list=(3, 1, 0))
    assert chosen.get_coordinate() == {3: (0,), 1: (1,), 0: (2,)}.get(rank)
    if rank == 2:
        with pytest.raises(RuntimeError, match="rank 2 is not in DeviceMesh"):
            chosen.get_local_rank()


@on_ranks(2)
def test_the_current_mesh():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    with pytest.raises(RuntimeError, match="there is no current mesh"):
        get_current_mesh()
    with mesh as entered:
        assert get_current_mesh() is entered is mesh
        other = DeviceMesh("cpu", [0])
        with other:
            assert get_current_mesh() is other
        assert get_current_mesh() is mesh
    with pytest.raises(RuntimeError):
        get_current_mesh()


@on_ranks(2)
def test_a_mesh_of_the_wrong_size():
    with pytest.raises(ValueError, match="blocks of 3 ranks do not fill the job's 2"):
        init_device_mesh("cpu", (3,))
    with pytest.raises(
        ValueError, match="a mesh of shape \\(2, 2\\) needs 4 ranks, rank_list has 2"
    ):
        init_device_mesh("cpu", (2, 2), rank_list=[0, 1])
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(
        ValueError, match="from_group: a mesh of 2 axes needs as many groups, got 1"
    ):
        DeviceMesh.from_group(mesh.get_group(), "cpu", [[0, 1]])
    with pytest.raises(ValueError, match="from_group: the group of axis 0 has ranks"):
        DeviceMesh.from_group([mesh.get_group(), mesh.get_group()], "cpu", [[0, 1]])


def test_meshes_without_a_job():
    ranks = [[0, 1], [2, 3]]
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b"))
    for same in (torch.tensor(ranks), np.array(ranks), ((0, 1), (2, 3))):
        assert DeviceMesh("cpu", same, mesh_dim_names=("a", "b")) == mesh
    assert mesh != DeviceMesh("cpu", ranks)
    assert (
        mesh.to_hash() != DeviceMesh("cuda", ranks, mesh_dim_names=("a", "b")).to_hash()
    )
    assert pickle.loads(pickle.dumps(mesh)) == copy.deepcopy(mesh) == mesh
    assert "[[0, 1], [2, 3]]" in repr(mesh)
    simulated = init_device_mesh(
        "cpu", (4, 8), mesh_dim_names=("a", "b"), init_backend=False
    )
    assert simulated.get_devices_for_axis("a", 9) == [1, 9, 17, 25]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: DeviceMesh(0, [0]), TypeError, "device_type must be a str"),
        (lambda: DeviceMesh("cpu", "01"), TypeError, "mesh must hold global ranks"),
        (lambda: DeviceMesh("cpu", [0.5]), TypeError, "mesh must hold integer ranks"),
        (
            lambda: DeviceMesh("cpu", [0, 0]),
            ValueError,
            "different ranks from 0 on, got \\[0, 0\\]",
        ),
        (lambda: DeviceMesh("cpu", [-1, 0]), ValueError, "different ranks from 0 on"),
        (lambda: DeviceMesh("cpu", []), (TypeError, ValueError), "mesh must hold"),
        (lambda: DeviceMesh("cpu", [[0, 1], [2]]), ValueError, "different lengths"),
        (
            lambda: DeviceMesh("cpu", [0, 1], mesh_dim_names=("a", "b")),
            ValueError,
            "must be 1 different names",
        ),
        (
            lambda: DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("a", "a")),
            ValueError,
            "must be 2 different names",
        ),
        (
            lambda: DeviceMesh("cpu", [0], mesh_dim_names=(1,)),
            TypeError,
            "must be strings",
        ),
        (
            lambda: init_device_mesh("cpu", 4),
            TypeError,
            "mesh_shape must be a sequence of ints",
        ),
        (
            lambda: init_device_mesh("cpu", (2.0,)),
            TypeError,
            "mesh_shape must hold ints",
        ),
        (
            lambda: init_device_mesh("cpu", (0,)),
            ValueError,
            "every axis needs at least one rank",
        ),
        (
            lambda: DeviceMesh("cpu", [0, 1])["a"],
            RuntimeError,
            "has no names for its axes",
        ),
        (
            lambda: DeviceMesh("cpu", [0], mesh_dim_names=("a",))["b"],
            KeyError,
            "no axis 'b'",
        ),
        (
            lambda: DeviceMesh("cpu", [[0]], mesh_dim_names=("a", "b"))["b", "a"],
            ValueError,
            "in the order of the mesh",
        ),
        (
            lambda: DeviceMesh("cpu", [[0]]).get_group(),
            ValueError,
            "the mesh has 2 axes",
        ),
        (
            lambda: DeviceMesh("cpu", [[0]]).size(2),
            ValueError,
            "axis 2 is not one of the 2 axes",
        ),
        (
            lambda: DeviceMesh("cpu", [[0]]).size(1.0),
            TypeError,
            "named by an int or a str",
        ),
        (
            lambda: DeviceMesh("cpu", [0, 1]).unflatten(0, (3,)),
            ValueError,
            "do not multiply to 2",
        ),
        (
            lambda: DeviceMesh("cpu", [0]).get_devices_for_axis(0, 5),
            ValueError,
            "rank 5 is not in",
        ),
        (
            lambda: DeviceMesh.from_group([None, None], "cpu"),
            ValueError,
            "2 groups need mesh=",
        ),
    ],
)
def test_bad_meshes(make, error, message):
    with pytest.raises(error, match=message):
        make()
