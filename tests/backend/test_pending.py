# SPDX-License-Identifier: Apache-2.0
"""Collectives in two halves, along any dim, with uneven and empty pieces; gradients that are completed later."""

import functools

import frame
import numpy as np
import pytest
from frame import REDUCTIONS, array, draw, tensor

from hyper_parallel import get_platform
from hyper_parallel.platform.pending import (
    Pending,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from hyper_parallel.testing import on_ranks

RANKS = 3
SIZES = [(2, 2, 2), (3, 1, 0), (0, 2, 0), (0, 0, 0)]


def starts(sizes):
    return np.cumsum([0, *sizes])


def piece_of(whole, dim, sizes, rank):
    begin = starts(sizes)[rank]
    return np.take(whole, range(begin, begin + sizes[rank]), dim)


@on_ranks(RANKS)
@pytest.mark.parametrize("op", REDUCTIONS)
def test_all_reduce_leaves_its_operand_alone(op):
    platform = get_platform()
    rank = platform.get_rank()
    x = tensor(draw(4, 3, seed=rank))
    pending = start_all_reduce(platform, x, op, None)
    every = np.stack([draw(4, 3, seed=one) for one in range(RANKS)])
    np.testing.assert_allclose(array(pending.finish()), REDUCTIONS[op](every))
    np.testing.assert_array_equal(array(x), draw(4, 3, seed=rank))


@on_ranks(RANKS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dim", [0, 1])
def test_all_gather_joins_uneven_pieces(sizes, dim):
    platform = get_platform()
    shape = [4, 4]
    shape[dim] = sum(sizes)
    whole = draw(*shape)
    mine = tensor(piece_of(whole, dim, sizes, platform.get_rank()))
    found = start_all_gather(platform, mine, dim, sizes, None).finish()
    np.testing.assert_array_equal(array(found), whole)


@on_ranks(RANKS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_reduce_scatter_keeps_this_ranks_piece(sizes, dim, op):
    platform = get_platform()
    shape = [4, 4]
    shape[dim] = sum(sizes)
    parts = [draw(*shape, seed=one) for one in range(RANKS)]
    rank = platform.get_rank()
    pending = start_reduce_scatter(platform, tensor(parts[rank]), dim, sizes, op, None)
    whole = REDUCTIONS[op](np.stack(parts))
    found = array(pending.finish())
    np.testing.assert_allclose(found, piece_of(whole, dim, sizes, rank))


@on_ranks(RANKS)
@pytest.mark.parametrize("gathered", SIZES)
@pytest.mark.parametrize("split", SIZES)
@pytest.mark.parametrize(("gather_dim", "split_dim"), [(0, 1), (1, 0)])
def test_all_to_all_changes_the_dim(gathered, split, gather_dim, split_dim):
    platform = get_platform()
    rank = platform.get_rank()
    shape = [0, 0]
    shape[gather_dim], shape[split_dim] = sum(gathered), sum(split)
    whole = draw(*shape)
    mine = tensor(piece_of(whole, gather_dim, gathered, rank))
    found = start_all_to_all(
        platform, mine, gather_dim, split_dim, gathered, split, None
    ).finish()
    expected = piece_of(whole, split_dim, split, rank)
    np.testing.assert_array_equal(array(found), expected)


@on_ranks(RANKS)
def test_an_exchange_of_uneven_rows():
    platform = get_platform()
    rank = platform.get_rank()
    sends = [rank, 1, 0]  # rows to each rank
    receives = [range(RANKS), [1] * RANKS, [0] * RANKS][rank]
    rows = np.full((sum(sends), 2), float(rank))
    output, handle = platform.exchange(
        "all_to_all_single", tensor(rows), sends, list(receives), None
    )
    handle.wait()
    expected = np.repeat(np.arange(RANKS, dtype=float), list(receives))
    np.testing.assert_array_equal(array(output), np.stack([expected] * 2, 1))


@pytest.mark.parametrize("op", REDUCTIONS)
def test_pieces_are_reduced_in_rank_order(op):
    pieces = draw(4, 3, 2)
    found = get_platform().reduce_pieces(tensor(pieces.reshape(-1)), (4, 3, 2), op)
    np.testing.assert_allclose(array(found), REDUCTIONS[op](pieces))
    empty = get_platform().reduce_pieces(tensor(np.zeros(0)), (4, 0), op)
    assert tuple(empty.shape) == (0,)


def test_what_needs_no_communication_is_done():
    assert Pending.done(3).finish() == 3


@functools.cache
def deferring():
    platform = get_platform()

    class Deferring(platform.Function):
        """Promises ten times the gradient."""

        @staticmethod
        def forward(ctx, leaf):
            ctx.leaf = leaf
            return platform.detach(leaf)

        @staticmethod
        def backward(ctx, part):
            if not platform.can_defer_gradient(ctx.leaf):
                return part * 10
            kept = platform.clone(part)
            now, complete = platform.defer_gradient(ctx.leaf, part, lambda: kept * 10)
            platform.after_backward(lambda: complete(kept * 10))
            return now

    return Deferring


@pytest.mark.parametrize("uses", ["alone", "twice", "directly too"])
def test_a_gradient_is_completed_when_backward_ends(uses):
    platform, leaf = get_platform(), frame.leaf([1.0, 2.0])
    with platform.tape():
        first = deferring().apply(leaf)
        out = (first * first).sum()
        if uses == "twice":
            out = out + (deferring().apply(leaf) * 3.0).sum()
        if uses == "directly too":
            out = out + (leaf * 3.0).sum()
    platform.backward([out])
    more = {"alone": 0.0, "twice": 30.0, "directly too": 3.0}[uses]
    assert frame.grad(leaf).tolist() == [20.0 + more, 40.0 + more]


def test_a_gradient_that_a_hook_sees_is_not_deferred():
    platform, leaf, seen = get_platform(), frame.leaf([1.0, 2.0]), []
    leaf.register_hook(lambda grad: seen.append(array(grad).tolist()))
    assert not platform.can_defer_gradient(leaf)
    with platform.tape():
        out = (deferring().apply(leaf) * 2.0).sum()
    platform.backward([out])
    assert seen == [[20.0, 20.0]]
    assert frame.grad(leaf).tolist() == [20.0, 20.0]


@on_ranks(2)
def test_collectives_of_backward_are_known_as_such():
    platform = get_platform()
    heard = []
    platform._listeners.append(heard.append)
    try:
        platform.barrier()
        with platform.in_backward():
            platform.barrier()
    finally:
        platform._listeners.pop()
    # torch knows by itself, so that the context does nothing there.
    assert [one.backward for one in heard] == [False, not frame.IS_TORCH]
