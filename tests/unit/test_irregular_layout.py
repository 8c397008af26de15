# SPDX-License-Identifier: Apache-2.0
"""Dims that are cut section by section: placements and layouts as values, shards, errors, plans."""

import copy
import pickle

import pytest
import torch
from layouts import own_indices

from hyper_parallel import FusedShard, Layout, Partial, Replicate, Shard, StridedShard
from hyper_parallel.core.dtensor.geometry import chunk_span
from hyper_parallel.core.dtensor.redistribution import plan

LINE = Layout((4,), ("tp",))
GRID = Layout((2, 4), ("dp", "tp"))
R, P = Replicate(), Partial()
SECTIONS = [(16, 8, 8), (4, 4), (3, 5), (1, 2), (9,), (2, 0, 7), (0, 0), (5, 1, 1, 6)]


def qkv(dim=0):
    return FusedShard(dim, (16, 8, 8))


def test_it_is_a_shard_with_sections():
    assert qkv() == FusedShard(0, [16, 8, 8]) == FusedShard(dim=0, sections=(16, 8, 8))
    assert (
        len(
            {
                qkv(),
                FusedShard(0, [16, 8, 8]),
                FusedShard(0, (8, 16, 8)),
                Shard(0),
                FusedShard(0, (32,)),
            }
        )
        == 4
    )
    assert str(qkv()) == "F(0; 16+8+8)"
    assert qkv().is_shard(0)
    assert not qkv().is_shard(1)
    assert not qkv().is_replicate()
    assert pickle.loads(pickle.dumps(qkv())) == qkv()


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: FusedShard("0", (4,)), TypeError),
        (lambda: FusedShard(0, (4, 2.0)), TypeError),
        (lambda: FusedShard(0, (4, True)), TypeError),
        (lambda: FusedShard(0, ()), ValueError),
        (lambda: FusedShard(0, (4, -1)), ValueError),
    ],
)
def test_what_is_no_section(make, error):
    with pytest.raises(error, match="FusedShard|dim must be an int"):
        make()


def test_a_layout_keeps_them():
    layout = LINE([qkv(-1)]).bind(3)
    assert layout.placements == (qkv(2),)
    assert layout is LINE([qkv(2)]).bind(3)
    assert layout is not LINE([Shard(2)]).bind(3)
    assert not layout.is_regular
    assert layout.irregular == {0: qkv(2)}
    assert LINE([Shard(0)]).is_regular
    assert layout.regular() is LINE([Shard(2)]).bind(3)
    assert layout.dim_axes == ((), (), (0,))
    assert layout.alias_placements == ("None", "None", "tp")
    assert layout.get_dim_split_num(2) == 4
    assert copy.deepcopy(layout) is layout
    assert pickle.loads(pickle.dumps(layout)) is layout
    assert layout.to_dict()["placements"] == ["F(2; 16+8+8)"]
    assert "F(2; 16+8+8)" in str(layout)
    assert GRID([P, qkv()]).bind(2).reset_partial() is GRID([R, qkv()]).bind(2)


@pytest.mark.parametrize("sections", SECTIONS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shards(sections, ranks):
    layout, shape = (
        Layout((ranks,), ("tp",))([FusedShard(1, sections)]),
        (3, sum(sections)),
    )
    whole = torch.arange(3 * shape[1]).view(shape)
    together = 0
    for place in range(ranks):
        pieces = [chunk_span(size, ranks, place)[1] for size in sections]
        local = layout.local_shape(shape, (place,))
        assert local == (3, sum(pieces))
        boxes = layout.boxes_of(shape, (place,))
        assert [box[1][1] for box in boxes] == pieces
        found = [whole[a : a + n, b : b + m] for (a, n), (b, m) in boxes]
        expected = whole[:, own_indices(layout.bind(2), shape, (place,))[1]]
        assert torch.equal(torch.cat(found, 1), expected)
        together += local[1]
    assert together == shape[1]


def test_boxes_of_an_ordinary_layout_are_one():
    layout = GRID("dp", "tp")
    for place in [(0, 0), (1, 3)]:
        assert layout.boxes_of((5, 7), place) == (layout.shard_of((5, 7), place),)


def test_boxes_of_two_dims_with_sections():
    layout = Layout((2, 2), ("a", "b"))([FusedShard(0, (2, 4)), FusedShard(1, (2, 2))])
    assert layout.boxes_of((6, 4), (1, 0)) == (
        ((1, 1), (0, 1)), ((1, 1), (2, 1)), ((4, 2), (0, 1)), ((4, 2), (2, 1)),
    )  # fmt: skip
    assert layout.local_shape((6, 4), (1, 0)) == (3, 2)


def test_there_is_no_single_box():
    layout = LINE([qkv()]).bind(1)
    with pytest.raises(ValueError, match=r"several boxes.*boxes_of"):
        layout.shard_of((32,), (0,))


def test_sections_must_add_up():
    layout = LINE([qkv()]).bind(2)
    assert layout.get_global_shape((8, 5)) == (32, 5)
    for ask in (layout.local_shape, layout.spans_of, layout.boxes_of):
        with pytest.raises(ValueError, match="add up to 32, but dim 0 has size 31"):
            ask((31, 5), (0,))


@pytest.mark.parametrize(
    "others",
    [[Shard(0), qkv()], [qkv(), Shard(0)], [qkv(), qkv()], [StridedShard(0, 4), qkv()]],
)
def test_no_other_axis_cuts_the_dim(others):
    with pytest.raises(
        ValueError, match=r"only Shard can shard dim 0 on several axes.*'dp', 'tp'"
    ):
        GRID(others).bind(2)


def test_other_axes_cut_other_dims():
    layout = GRID([Shard(0), qkv(1)]).bind(2)
    assert layout.local_shape((6, 32), (1, 2)) == (3, 8)
    inside, shape = layout.within_spans((6, 32), (1, 2))
    assert inside is GRID([Shard(0), R]).bind(2)
    assert shape == (6, 8)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ([R], [qkv()], ["slice"]),
        ([qkv()], [R], ["all_gather"]),
        ([qkv()], [qkv()], []),
        ([qkv()], [Shard(0)], ["exchange"]),
        ([Shard(0)], [qkv()], ["exchange"]),
        ([Shard(1)], [qkv()], ["exchange"]),
        ([P], [qkv()], ["all_reduce", "slice"]),
        ([qkv()], [P], ["all_gather", "part"]),
        ([qkv()], [FusedShard(0, (8, 24))], ["exchange"]),
    ],
)
def test_plans_on_one_axis(source, target, expected):
    made = plan(LINE(source), LINE(target), (32, 12))
    assert [step.kind for step in made.steps] == expected
    assert ([*made.layouts] or [LINE(source).bind(2)])[-1] is LINE(target).bind(2)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ([P, qkv()], [R, qkv()], ["all_reduce"]),
        ([P, qkv()], [Shard(1), qkv()], ["reduce_scatter"]),
        ([Shard(1), qkv()], [R, qkv()], ["all_gather"]),
        ([R, qkv()], [Shard(1), qkv()], ["slice"]),
        ([Shard(1), qkv()], [R, R], ["exchange"]),
        ([Shard(2), qkv()], [Shard(1), qkv()], ["all_to_all"]),
        ([P, R], [R, qkv()], None),
    ],
)
def test_sections_stay_while_other_axes_move(source, target, expected):
    made = plan(GRID(source), GRID(target), (32, 12, 8))
    assert expected is None or [step.kind for step in made.steps] == expected
    assert made.layouts[-1] is GRID(target).bind(3)
    if expected is not None and qkv() in target:
        assert all(qkv() in layout.placements for layout in made.layouts)
        whole = plan(GRID([source[0], R]), GRID([target[0], R]), (32, 12, 8))
        assert made.nbytes <= max(whole.nbytes, 1) or len(whole.steps) > 1
    assert "F(0; 16+8+8)" in made.explain()
