# SPDX-License-Identifier: Apache-2.0
"""Plans without processes: chunks against torch.chunk, who writes, state dicts as names, and growth with the ranks."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import layouts_on, own_indices

from hyper_parallel import (
    FusedShard,
    Layout,
    RaggedShard,
    Replicate,
    Shard,
    ZigzagShard,
)
from hyper_parallel.core.distributed_checkpoint.chunks import (
    ChunkGrid,
    ChunkList,
    Cut,
    box_of,
    chunk_of,
    overlap,
)
from hyper_parallel.core.distributed_checkpoint.entries import (
    Entry,
    cut_of,
    digest,
    writers,
)
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.format import Stored, to_bytes
from hyper_parallel.core.distributed_checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from hyper_parallel.core.distributed_checkpoint.planner import WriteItem, WriteItemType
from hyper_parallel.core.distributed_checkpoint.resharding import read_items
from hyper_parallel.core.distributed_checkpoint.standard_planner import plan_for
from hyper_parallel.core.distributed_checkpoint.state_dict import (
    dotted,
    flattened,
    nested,
)

MESHES = [(2,), (3,), (2, 2), (2, 4), (2, 2, 2)]


def places(layout):
    return list(itertools.product(*map(range, layout.mesh_shape)))


def filled(boxes, shape):
    """How often each element is in one of the boxes."""
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[tuple(slice(start, start + size) for start, size in box)] += 1
    return counts


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(MESHES).flatmap(
        lambda mesh: layouts_on(Layout(mesh, tuple("abc"[: len(mesh)])), 1, 3, (None,))
    )
)
def test_a_grid_is_what_the_layout_says(case):
    layout, shape = case
    check_grid(layout, shape)


@pytest.mark.parametrize("sections", [(16, 8, 8), (3, 5), (1, 2), (9,), (2, 0, 7)])
def test_a_grid_of_sections(sections):
    layout = Layout((2, 4), ("dp", "tp"))([Shard(1), FusedShard(0, sections)])
    check_grid(layout.bind(2), (sum(sections), 5))


@pytest.mark.parametrize(
    "sizes", [(2, 3, 0, 4), (0, 0, 0, 0), (0, 9, 0, 0), (1, 1, 1, 1)]
)
def test_a_grid_of_ragged_parts(sizes):
    layout = Layout((2, 4), ("dp", "tp"))([Shard(1), RaggedShard(0, sizes)])
    check_grid(layout.bind(2), (sum(sizes), 5))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 16, 19])
def test_a_grid_of_zigzag_chunks(size):
    layout = Layout((2, 4), ("dp", "tp"))([Shard(1), ZigzagShard(0)])
    check_grid(layout.bind(2), (size, 5))


def check_grid(layout, shape):
    cut = cut_of(layout)
    grid = ChunkGrid(shape, cut, replica=cut.replicas - 1)
    assert (filled(map(box_of, grid), shape) == 1).all()
    for place in places(layout):
        parts = list(grid.parts_at(place))
        for part in parts:
            assert box_of(grid[part.number]) == part.box
        wanted = np.zeros(shape, int)
        wanted[np.ix_(*own_indices(layout, shape, place))] = 1
        assert (filled([part.box for part in parts], shape) == wanted).all()
        rank = layout.rank_list[int(np.ravel_multi_index(place, layout.mesh_shape))]
        assert cut.coordinate(rank) == place
        writes = {
            number
            for number in range(len(grid))
            if grid.place(number) == rank and 0 not in grid[number].sizes
        }
        assert writes == (
            {part.number for part in parts}
            if cut.replica_of(place) == cut.replicas - 1
            else set()
        )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_what_overlaps_a_box_is_found(data):
    mesh = data.draw(st.sampled_from(MESHES))
    layout, shape = data.draw(
        layouts_on(Layout(mesh, tuple("abc"[: len(mesh)])), 1, 3, (None,))
    )
    grid = ChunkGrid(shape, cut_of(layout))
    starts = [data.draw(st.integers(0, size)) for size in shape]
    box = tuple(
        (start, data.draw(st.integers(0, size - start)))
        for start, size in zip(starts, shape, strict=True)
    )
    found = [n for n in range(len(grid)) if overlap(box, box_of(grid[n])) is not None]
    assert list(grid.overlapping(box)) == found
    listed = ChunkList(tuple(grid), tuple(range(len(grid))))
    assert list(listed.overlapping(box)) == found
    items = list(read_items("x", [box], grid))
    whole = np.arange(math.prod(shape)).reshape(shape)
    target = np.full([size for _, size in box], -1)
    for item in items:
        chunk = grid[item.storage_index.index]
        source = whole[
            tuple(
                slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True)
            )
        ]
        source = source[
            tuple(
                slice(o, o + n)
                for o, n in zip(item.storage_offsets, item.lengths, strict=True)
            )
        ]
        target[
            tuple(
                slice(o, o + n)
                for o, n in zip(item.dest_offsets, item.lengths, strict=True)
            )
        ] = source
    assert (target == whole[tuple(slice(o, o + n) for o, n in box)]).all()


def test_rows_to_columns_by_hand():
    grid = ChunkGrid((8, 6), cut_of(Layout((2,), ("a",))([Shard(0)]).bind(2)))
    [item, _] = read_items("x", [((0, 8), (3, 2))], grid)
    assert (item.storage_offsets, item.lengths) == ((0, 3), (4, 2))
    assert (item.dest_offsets, item.storage_index) == (
        (0, 0),
        MetadataIndex("x", (0, 0)),
    )


# --- who writes


def entries_of(layout, sizes, dtype="float32"):
    return [
        Entry(f"w{n}", dtype, size, cut_of(layout.bind(len(size))))
        for n, size in enumerate(sizes)
    ]


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=60), st.sampled_from([2, 3, 8])
)
def test_bytes_are_spread_over_the_copies(sizes, ranks):
    layout = Layout((ranks,), ("dp",))([Replicate()])
    chosen = writers(entries_of(layout, [(size,) for size in sizes]))
    loads = [
        sum(size for n, size in enumerate(sizes) if chosen[f"w{n}"] == rank)
        for rank in range(ranks)
    ]
    assert max(loads) - min(loads) <= max(sizes)


@pytest.mark.parametrize("dp", [8, 512, 8192])
def test_a_plan_does_not_grow_with_the_ranks(dp):
    """65,536 ranks as 8: as many items, as many chunks looked at, as many bytes of metadata."""
    base, many = (planned_on(Layout((ranks, 8), ("dp", "tp"))) for ranks in (1, dp))
    assert many[0] <= base[0]
    assert many[1] <= base[1] + 200  # some digits more


def planned_on(layout):
    cut, copied = layout([Replicate(), Shard(0)]), layout([Replicate(), Replicate()])
    sharded = layout([Shard(0), Shard(1)])
    entries = [
        Entry(f"{kind}{n}", "bfloat16", (65536 + n, 64), cut_of(how.bind(2)))
        for kind, how in (("cut", cut), ("copied", copied), ("sharded", sharded))
        for n in range(20)
    ]
    items, tensors = plan_for(entries, 3, writers)
    metadata = Metadata(
        tensors, {}, Stored("0" * 16, len(layout.rank_list), {}, "test")
    )
    return len(items), len(to_bytes(metadata))


def test_a_digest_tells_every_difference():
    cut = cut_of(Layout((2,), ("a",))([Shard(0)]).bind(1))
    other = cut_of(Layout((2,), ("a",))([Replicate()]).bind(1))
    entries = [
        Entry("x", "float32", (4,), cut), Entry("y", "float32", (4,), cut), Entry("x", "float16", (4,), cut),
        Entry("x", "float32", (5,), cut), Entry("x", "float32", (4,), other), Entry("x", "float32", (4,), cut, True),
    ]  # fmt: skip
    assert len({digest([entry]) for entry in entries}) == len(entries)
    assert digest([entries[0]]) == digest(
        [Entry("x", "float32", (4,), Cut((2,), range(2), ((0,),), {}, ("a",)))]
    )


def test_bytes_of_a_write_item():
    data = {
        "chunk": chunk_of(((0, 3), (2, 5))),
        "properties": TensorProperties(torch.bfloat16),
        "size": (3, 7),
    }
    assert (
        WriteItem(MetadataIndex("x"), WriteItemType.TENSOR, data).tensor_storage_size()
        == 30
    )
    assert (
        WriteItem(
            MetadataIndex("x"), WriteItemType.BYTE_IO, bytes_io_data=b""
        ).tensor_storage_size()
        is None
    )


# --- names

KEYS = st.one_of(st.text("ab.", min_size=1, max_size=3), st.integers(0, 3))
STATES = st.recursive(
    st.one_of(
        st.integers(),
        st.tuples(st.integers()),
        st.just({}),
        st.lists(st.integers(), max_size=2),
    ),
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=3), st.lists(inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, STATES, max_size=3))
def test_a_state_dict_comes_back(state):
    try:
        found = flattened(state)
    except CheckpointError as error:
        assert "two values have this name" in str(error)  # noqa: PT017 - only that may be wrong with it
        return
    assert all(dotted(leaf.path) == name for name, leaf in found.items())
    values = {name: leaf.value for name, leaf in sorted(found.items(), reverse=True)}
    assert nested(values, {name: leaf.path for name, leaf in found.items()}) == state


def test_what_contains_itself_is_refused():
    state = {"a": {}}
    state["a"]["b"] = state
    with pytest.raises(CheckpointError, match="contains itself"):
        flattened(state)
