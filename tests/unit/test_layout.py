# SPDX-License-Identifier: Apache-2.0
"""Placements and layouts as values: both forms, orders, shards, errors."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from layouts import layouts_on, meshes

from hyper_parallel import Layout, Partial, Replicate, Shard, StridedShard
from hyper_parallel.core.dtensor.placement_types import Placement

GRID = Layout((2, 4), ("dp", "tp"))


def test_placements_are_values():
    assert Shard(0) == Shard(0) != Shard(1)
    assert (
        len(
            {
                Shard(0),
                Shard(0),
                StridedShard(0, 2),
                Replicate(),
                Replicate(),
                Partial(),
                Partial("sum"),
            }
        )
        == 4
    )
    assert [str(p) for p in (Shard(0), Replicate(), Partial(), Partial("max"), StridedShard(1, 2))] == [
        "S(0)", "R", "P", "P(max)", "S(1, 2)",
    ]  # fmt: skip
    assert Shard(1).is_shard()
    assert Shard(1).is_shard(1)
    assert not Shard(1).is_shard(0)
    assert StridedShard(1, 2).is_shard(1)
    assert Replicate().is_replicate()
    assert not Replicate().is_shard()
    assert Partial("max").is_partial("max")
    assert Partial("max").is_partial()
    assert not Partial("max").is_partial("sum")
    assert all(isinstance(p, Placement) for p in (Shard(0), Replicate(), Partial()))


@pytest.mark.parametrize(
    "make", [lambda: Shard("0"), lambda: Shard(True), lambda: StridedShard(0, 1.5)]
)
def test_placements_of_wrong_types(make):
    with pytest.raises(TypeError, match="must be an int"):
        make()


def test_placements_of_wrong_values():
    with pytest.raises(
        ValueError,
        match="reduce_op must be one of sum, avg, max, min, prod, got 'mean'",
    ):
        Partial("mean")
    with pytest.raises(ValueError, match="split_factor must be at least 1"):
        StridedShard(0, 0)


def test_both_forms_say_the_same():
    layout = GRID("dp", "None")
    assert layout.placements == (Shard(0), Replicate())
    assert (
        layout
        is GRID("dp", None)
        is GRID([Shard(0), Replicate()]).bind(2)
        is GRID([Shard(-2), Replicate()]).bind(2)
    )
    assert layout.alias_placements == ("dp", "None")
    assert layout.tensor_map == (1, -1)
    assert GRID([Shard(0), Shard(0)]).placement_to_tensor_map(2) == ((1, 0), -1)
    assert GRID(("dp", "tp"), "None").alias_placements == (("dp", "tp"), "None")
    assert GRID("None", "tp").tensor_map == (-1, 0)
    assert GRID("None", "tp").tensor_map_to_placement() == (Replicate(), Shard(1))
    assert GRID(("dp",), "None") is layout


def test_another_order_is_a_strided_shard():
    layout = GRID(("tp", "dp"), "None")
    assert layout.placements == (StridedShard(0, 4), Shard(0))
    assert layout.dim_axes == ((1, 0), ())
    assert layout.tensor_map == ((0, 1), -1)
    assert layout is GRID([StridedShard(0, 4), Shard(0)]).bind(2)
    three = Layout((2, 3, 5), ("a", "b", "c"))
    for order in (
        ("a", "b", "c"),
        ("c", "b", "a"),
        ("b", "c", "a"),
        ("c", "a", "b"),
        ("b", "a", "c"),
        ("a", "c", "b"),
    ):
        layout = three(order)
        assert layout.alias_placements == (order,)
        assert three(list(layout.placements)).bind(1) is layout


def test_equal_layouts_are_one_object_and_cannot_be_changed():
    layout = GRID("dp", "None")
    assert Layout((2, 4), ("dp", "tp"))("dp", "None") is layout
    assert copy.deepcopy(layout) is copy.copy(layout) is layout
    assert pickle.loads(pickle.dumps(layout)) is layout
    assert layout == GRID("dp", "None")
    assert layout != GRID("tp", "None")
    assert {layout: 1}[GRID("dp", "None")] == 1
    with pytest.raises(AttributeError, match="a layout is a value"):
        layout.placements = ()


def test_pending_reductions():
    layout = GRID("dp", "None")
    assert not layout.is_partial()
    pending = layout.set_partial_by_dev_axis("tp", "max")
    assert pending.is_partial()
    assert pending.partial == [None, "max"]
    assert pending.get_partial_by_dev_id("tp") == "max"
    assert pending.get_partial_by_dev_id(0) is None
    assert pending.reset_partial() is layout
    with pytest.raises(ValueError, match="axis 'dp' cuts the tensor"):
        layout.set_partial_by_dev_axis("dp", "sum")
    with pytest.raises(
        ValueError, match="reductions by max and by sum cannot be pending together"
    ):
        GRID([Partial(), Partial("max")])
    assert GRID([Partial(), Partial("avg")]).is_partial()


def test_counting():
    layout = GRID(("dp", "tp"), "None")
    assert layout.get_dim_split_num(0) == 8
    assert layout.get_dim_split_num(1) == 1
    assert layout.get_global_shape((3, 5)) == (24, 5)
    assert layout.repeat_num() == 1
    assert GRID("dp", "None").repeat_num() == 4
    assert GRID([Partial(), Replicate()]).repeat_num() == 4
    assert GRID("None", "None").repeat_num() == 8
    assert layout.get_split_id(0) == 0  # one process is rank 0


def test_as_text_and_data():
    layout = GRID("dp", "None")
    assert layout.to_string() == repr(layout) == "Layout(dp=2, tp=4) [S(0), R]"
    assert layout.to_dict() == {
        "mesh_shape": [2, 4],
        "alias_name": ["dp", "tp"],
        "rank_list": list(range(8)),
        "placements": ["S(0)", "R"],
        "tensor_map": [1, -1],
        "partial": [None, None],
    }
    assert GRID.to_string() == "Layout(dp=2, tp=4)"


@settings(max_examples=200, deadline=None)
@given(meshes(8).flatmap(lambda mesh: layouts_on(mesh, count=1, longest=3)))
def test_shards_are_those_of_torch_chunk(drawn):
    layout, shape = drawn
    for rank, coordinate in enumerate(
        torch.cartesian_prod(*(torch.arange(n) for n in layout.mesh_shape)).reshape(
            8, -1
        )
    ):
        assert layout.mesh.coordinate_of(rank) == tuple(coordinate.tolist())
        expected = []
        for size, axes in zip(shape, layout.dim_axes, strict=True):
            indices = torch.arange(size)
            for axis in axes:
                pieces = (
                    list(indices.chunk(layout.mesh_shape[axis]))
                    + [indices[:0]] * layout.mesh_shape[axis]
                )
                indices = pieces[coordinate[axis]]
            expected.append(indices.tolist())
        shard = layout.shard_of(shape, coordinate.tolist())
        assert [list(range(start, start + size)) for start, size in shard] == expected
        assert layout.local_shape(shape, coordinate.tolist()) == tuple(
            len(e) for e in expected
        )
    again = pickle.loads(pickle.dumps(layout))
    assert again is layout


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GRID("cp", "None"), "unknown axis 'cp'; the mesh has dp, tp"),
        (lambda: GRID("dp", "dp"), "axis 'dp' is used twice"),
        (lambda: GRID(("dp", "dp"), "None"), "axis 'dp' is used twice"),
        (
            lambda: GRID(1, "None"),
            "expected 'None', an axis or a tuple of axes for each dim, got 1",
        ),
        (lambda: GRID([Shard(0)]), "expected 2 placements, one for each axis"),
        (lambda: GRID([Shard(0), "tp"]), "expected placements .* got 'tp'"),
        (
            lambda: GRID([Shard(2), Replicate()]).bind(2),
            "axis 'dp' cuts dim 2, but the tensor has 2 dims",
        ),
        (
            lambda: GRID([StridedShard(0, 3), Shard(0)]).bind(1),
            "the split factor 3 on axis 'dp' is not made by",
        ),
        (lambda: GRID("dp").bind(2), "is for tensors of 1 dims, not of 2"),
        (lambda: GRID([Shard(0), Replicate()]).tensor_map, r"bind\(ndim\) first"),
        (lambda: GRID.partial, "has no placements yet"),
        (lambda: Layout((2, 2), ("a", "b"), [0, 1]), "needs 4 ranks, got 2"),
        (lambda: Layout((2, 2), ("a",)), "mesh_dim_names must be 2 different names"),
    ],
)
def test_bad_layouts(make, message):
    with pytest.raises(ValueError, match=message):
        make()
