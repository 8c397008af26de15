# SPDX-License-Identifier: Apache-2.0
"""The blocks of attention on parts of a sequence, against a mask that is written down pair by pair."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel import RaggedShard, Shard, ZigzagShard
from hyper_parallel.core.context_parallel import blocks
from hyper_parallel.core.context_parallel.blocks import (
    CAUSAL,
    FULL,
    Block,
    Visibility,
    documents_of_ids,
    documents_of_lengths,
    imbalance,
    work_of_ranks,
)


def seen_by_definition(sight, ids, queries, keys):
    """For every pair of positions whether the key is visible."""
    mask = np.ones((queries, keys), dtype=bool)
    for i, j in itertools.product(range(queries), range(keys)):
        if sight.before is not None:
            mask[i, j] &= j >= i - sight.before
        if sight.after is not None:
            mask[i, j] &= j <= i + sight.after
        if ids is not None:
            mask[i, j] &= ids[i] == ids[j] and ids[i] >= 0
    return mask


def seen_in_blocks(found, queries, keys, row):
    """How often the blocks have every pair of local tensors of these sizes."""
    count = np.zeros((queries, keys), dtype=int)
    for block in found:
        if block.row not in (None, row):
            continue
        (q, m), (k, n) = block.queries, block.keys
        assert m > 0
        assert n > 0
        j_minus_i = np.arange(n)[None] - np.arange(m)[:, None]
        inside = np.ones((m, n), dtype=bool)
        if block.before is not None:
            inside &= j_minus_i >= -block.before
        if block.after is not None:
            inside &= j_minus_i <= block.after
        assert block.work == inside.sum() > 0
        assert block.is_full == inside.all() or not block.is_full
        count[q : q + m, k : k + n] += inside
    return count


def positions(spans):
    return [i for start, size in spans for i in range(start, start + size)]


@st.composite
def cases(draw):
    ranks = draw(st.integers(1, 4))
    queries = draw(st.integers(0, 13))
    keys = draw(st.one_of(st.just(queries), st.integers(0, 13)))
    limit = st.one_of(st.none(), st.integers(0, 5))
    sight = Visibility(draw(limit), draw(limit))
    ids = None
    if queries == keys and draw(st.booleans()):
        one = st.lists(st.integers(-1, 3), min_size=queries, max_size=queries)
        ids = draw(st.lists(one, min_size=1, max_size=2))
        sight = replace(sight, documents=documents_of_ids(ids))
    placement = draw(st.sampled_from([Shard(0), ZigzagShard(0)]))
    other = draw(st.sampled_from([Shard(0), ZigzagShard(0)]))
    return ranks, queries, keys, sight, ids, placement, other


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases(), st.integers(1, 3))
def test_blocks_have_every_visible_pair_once(case, tile):
    ranks, queries, keys, sight, ids, placement, other = case
    blocks.SHORTEST_TILE, before = tile, blocks.SHORTEST_TILE
    blocks._find_blocks.cache_clear()
    try:
        for one, another in itertools.product(range(ranks), range(ranks)):
            own = placement.spans(queries, ranks, one)
            theirs = other.spans(keys, ranks, another)
            found = sight.blocks(own, theirs)
            i, j = positions(own), positions(theirs)
            for row in range(len(ids) if ids else 1):
                mask = seen_by_definition(sight, ids and ids[row], queries, keys)
                count = seen_in_blocks(found, len(i), len(j), row)
                np.testing.assert_array_equal(count, mask[np.ix_(i, j)])
    finally:
        blocks.SHORTEST_TILE = before
        blocks._find_blocks.cache_clear()


def test_causal_blocks_need_no_mask():
    for placement in (Shard(0), ZigzagShard(0), RaggedShard(0, (3, 0, 9, 1))):
        for one, another in itertools.product(range(4), range(4)):
            own, theirs = (placement.spans(13, 4, index) for index in (one, another))
            found = CAUSAL.blocks(own, theirs)
            assert all(block.is_full or block.is_causal for block in found)
    assert CAUSAL.blocks(((4, 4),), ((0, 8),)) == (
        Block((0, 4), (0, 4)),
        Block((0, 4), (4, 4), after=0),
    )
    assert CAUSAL.blocks(((0, 4),), ((4, 4),)) == ()


def test_windows_skip_what_they_hide():
    window = Visibility(before=255, after=0)
    found = window.blocks(((0, 8192),), ((0, 8192),))
    masked = sum(b.queries[1] * b.keys[1] for b in found if not b.is_full)
    assert window.work(((0, 8192),), ((0, 8192),)) > 0.4 * masked


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zigzag_balances_causal_attention(ranks):
    chunk = 6
    size = 2 * ranks * chunk
    balanced = work_of_ranks(ZigzagShard(0), size, ranks)
    on_diagonal, beside = chunk * (chunk + 1) // 2, chunk * chunk
    assert balanced == [2 * on_diagonal + (2 * ranks - 1) * beside] * ranks
    assert imbalance(ZigzagShard(0), size, ranks) == 1
    assert imbalance(Shard(0), 1024, ranks) == pytest.approx(2 - 1 / ranks, rel=1e-2)
    assert imbalance(Shard(0), size, ranks, FULL) == 1


def test_documents():
    assert documents_of_lengths([0, 2, 2, 5], 6) == (((0, 2, 0), (2, 5, 2)),)
    assert documents_of_ids([[0, 0, 1, -1], [0, 0, 1, -1]]) == (
        ((0, 2, 0), (2, 3, 1), (3, 4, -1)),
    )
    for borders in ([], [1, 2], [0, 3, 2], [0, 9]):
        with pytest.raises(ValueError, match="cumulative lengths"):
            documents_of_lengths(borders, 6)
