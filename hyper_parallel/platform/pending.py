# SPDX-License-Identifier: Apache-2.0
"""Collectives along any dim in two halves: start one, compute something else, finish it.

    pending = start_all_gather(platform, shard, 0, sizes, group)
    ...                                      # computation that needs no result
    whole = pending.finish()

Everything here is outside the graph, for every framework, and for pieces that are uneven
or empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.platform.platform import Platform


class Pending:
    """A collective under way; ``finish()`` waits for it and returns its result."""

    def __init__(self, handle: Any, result: Callable[[], Any]) -> None:
        self._handle, self._result = handle, result

    def finish(self) -> Any:
        """The result, once it is there."""
        if self._handle is not None:
            self._handle.wait()
        return self._result()

    @staticmethod
    def done(result: Any) -> Pending:
        """For what needs no communication."""
        return Pending(None, lambda: result)


def start_all_reduce(platform: Platform, x: Any, op: str, group: Any) -> Pending:
    """The reduction of every rank's ``x``, which stays as it is."""
    buffer = platform.clone(x)
    _, handle = platform.all_reduce(buffer, group, async_op=True, op=op)
    return Pending(handle, lambda: buffer)


def start_all_gather(
    platform: Platform, x: Any, dim: int, sizes: Sequence[int], group: Any
) -> Pending:
    """Every rank's ``x``, whose sizes along ``dim`` are ``sizes``, joined along it."""
    widest = max(sizes)
    padded = _pad(platform, x, dim, widest)
    joined, handle = platform.all_gather_into_tensor(padded, group, async_op=True)
    if dim == 0 and all(size == widest for size in sizes):
        return Pending(handle, lambda: joined)
    rows = padded.shape[0]

    def join() -> Any:
        pieces = []
        for rank, size in enumerate(sizes):
            if size:
                piece = _narrow(joined, 0, rank * rows, rows)
                pieces.append(_narrow(piece, dim, 0, size))
        return platform.cat(pieces, dim) if pieces else joined[:rows]

    return Pending(handle, join)


def start_reduce_scatter(
    platform: Platform, x: Any, dim: int, sizes: Sequence[int], op: str, group: Any
) -> Pending:
    """This rank's piece, of ``sizes`` along ``dim``, of the reduction of every rank's ``x``."""
    rank = platform.get_group_local_rank(group)
    shape = list(x.shape)
    shape[dim] = sizes[rank]
    if not math.prod(x.shape):
        empty = platform.empty(shape, dtype=x.dtype, device=x.device)
        return Pending.done(empty)
    pieces = _split(x, dim, sizes)
    if all(size == sizes[0] for size in sizes):
        stacked = x if dim == 0 else platform.cat(pieces, 0)
        output, handle = platform.reduce_scatter_tensor(
            stacked, group, async_op=True, op=op
        )
        return Pending(handle, lambda: output)
    count = math.prod(shape)
    stacked_shape = (len(sizes), *shape)
    flat = platform.cat([piece.reshape(-1) for piece in pieces])
    sends = [size * math.prod(x.shape) // x.shape[dim] for size in sizes]
    received, handle = platform.exchange(
        "reduce_scatter", flat, sends, [count] * len(sizes), group
    )
    return Pending(handle, lambda: platform.reduce_pieces(received, stacked_shape, op))


def start_all_to_all(
    platform: Platform,
    x: Any,
    gather_dim: int,
    split_dim: int,
    gather_sizes: Sequence[int],
    split_sizes: Sequence[int],
    group: Any,
) -> Pending:
    """Gathers ``gather_dim`` and keeps this rank's piece of ``split_dim``."""
    rank = platform.get_group_local_rank(group)
    shapes = []
    for size in gather_sizes:
        shape = list(x.shape)
        shape[gather_dim], shape[split_dim] = size, split_sizes[rank]
        shapes.append(shape)
    is_even = len(set(gather_sizes)) == len(set(split_sizes)) == 1
    flat = _flatten_pieces(platform, x, split_dim, split_sizes)
    if is_even:  # backends are faster if they are told no sizes
        received, handle = platform.all_to_all_single(
            flat, flat.shape, group, async_op=True
        )
    else:
        row = math.prod(x.shape) // max(x.shape[split_dim], 1)
        sends = [row * size for size in split_sizes]
        receives = [math.prod(shape) for shape in shapes]
        received, handle = platform.exchange(
            "all_to_all_single", flat, sends, receives, group
        )

    def join() -> Any:
        pieces, start = [], 0
        for shape in shapes:
            stop = start + math.prod(shape)
            if stop > start:
                pieces.append(received[start:stop].reshape(shape))
            start = stop
        if pieces:
            return platform.cat(pieces, gather_dim)
        shape = shapes[0]
        shape[gather_dim] = sum(gather_sizes)
        return platform.empty(shape, dtype=x.dtype, device=x.device)

    return Pending(handle, join)


def _pad(platform: Platform, x: Any, dim: int, size: int) -> Any:
    """``x`` with zeros at its end along ``dim``, up to this size."""
    if x.shape[dim] == size:
        return x
    shape = list(x.shape)
    is_empty = not math.prod(shape)
    shape[dim] = size if is_empty else size - x.shape[dim]
    zeros = platform.zeros(shape, dtype=x.dtype, device=x.device)
    return zeros if is_empty else platform.cat([x, zeros], dim)


def _flatten_pieces(platform: Platform, x: Any, dim: int, sizes: Sequence[int]) -> Any:
    """The pieces of a tensor along a dim one after the other, copied at most once."""
    if dim == 0 or not math.prod(x.shape):
        return x.reshape(-1)
    pieces = _split(x, dim, sizes)
    if len(set(sizes)) == 1:
        return platform.cat(pieces, 0).reshape(-1)
    return platform.cat([piece.reshape(-1) for piece in pieces])


def _split(x: Any, dim: int, sizes: Sequence[int]) -> list[Any]:
    """The pieces along a dim that are not empty."""
    pieces, start = [], 0
    for size in sizes:
        if size:
            pieces.append(_narrow(x, dim, start, size))
        start += size
    return pieces


def _narrow(x: Any, dim: int, start: int, size: int) -> Any:
    return x[(slice(None),) * dim + (slice(start, start + size),)]
