# SPDX-License-Identifier: Apache-2.0
"""The order of rows by expert: of every token one row for each of its experts.

order = sort_by_expert(index)                   index [tokens, k]
rows = order.spread(tokens)                     [tokens * k, dim], all rows of expert 0 first
tokens = order.gather(rows)                     the k rows of each token, added in the order of k

The two are each other's adjoints, and neither adds in an order that depends on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.platform import get_platform

platform = get_platform()


@dataclass(frozen=True, eq=False)
class RowOrder:
    """Where rows come from: row i is choice ``rows[i] % choices`` of token ``rows[i] // choices``.

    ``inverse``: where the choices of all tokens are among the rows. With one choice it is a permutation.
    """

    rows: Any
    inverse: Any
    choices: int = 1

    def spread(self, tokens: Any) -> Any:
        """A row for every choice of every token; differentiable any number of times."""
        if not platform.is_recorded(tokens):
            return self._take(tokens)
        return _function().apply(tokens, self, True)

    def gather(self, rows: Any) -> Any:
        """The sum of the rows of each token, its first choice first; differentiable any number of times."""
        if not platform.is_recorded(rows):
            return self._add(rows)
        return _function().apply(rows, self, False)

    def sort_choices(self, values: Any) -> Any:
        """What belongs to every choice of every token, [tokens, k], in the order of rows: [tokens * k, 1]."""
        column = values.reshape((-1, 1))
        return RowOrder(self.rows, self.inverse).spread(column)

    def _take(self, tokens: Any) -> Any:
        rows = self.rows if self.choices == 1 else self.rows // self.choices
        return tokens[rows]

    def _add(self, rows: Any) -> Any:
        by_choice = rows[self.inverse]
        if self.choices == 1:
            return by_choice
        tokens = int(rows.shape[0]) // self.choices
        of_tokens = by_choice.reshape((tokens, self.choices, rows.shape[1]))
        total = of_tokens[:, 0]
        for choice in range(1, self.choices):
            total = total + of_tokens[:, choice]
        return total


@functools.cache
def _function() -> Any:
    class MoveRows(platform.HigherOrderFunction):  # type: ignore[name-defined, misc]
        @staticmethod
        def forward(ctx: Any, values: Any, order: RowOrder, spreads: bool) -> Any:
            ctx.order, ctx.spreads = order, spreads
            return order._take(values) if spreads else order._add(values)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            order = ctx.order
            back = order.gather(grad) if ctx.spreads else order.spread(grad)
            return back, None, None

    return MoveRows


def sort_by_expert(index: Any) -> RowOrder:
    """The order by expert, and by token within an expert; ``index``: the experts of each token, [tokens, k]."""
    choices = int(index.shape[1])
    flat = index.reshape(-1).to(platform.str_to_dtype("int64"))
    count = int(flat.shape[0])
    if not count:
        return RowOrder(flat, flat, choices)
    # Keys without ties: whether a sort is stable depends on the framework and the device.
    positions = platform.arange(count, dtype=flat.dtype, device=flat.device)
    rows = _argsort(flat * count + positions)
    return RowOrder(rows, _argsort(rows), choices)


def _argsort(keys: Any) -> Any:
    order = platform.operator("argsort")(keys)
    return order.to(platform.str_to_dtype("int64"))


def sort_chunks(chunks: Sequence[Sequence[int]], like: Any) -> RowOrder | None:
    """The order by (expert, source) of rows that arrive by (source, expert); None where nothing moves.

    ``chunks``: for every source the number of rows by expert. ``like``: a tensor on the device.
    """
    sizes = np.asarray(chunks, dtype=np.int64)
    if 1 in sizes.shape:
        return None
    ends = np.cumsum(sizes.reshape(-1)).reshape(sizes.shape)
    starts = ends - sizes
    # Turned, the sources of one expert follow each other.
    spans = zip(starts.T.reshape(-1), ends.T.reshape(-1), strict=True)
    order = np.concatenate([np.arange(start, end) for start, end in spans])
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return RowOrder(_to_device(order, like), _to_device(inverse, like))


def _to_device(values: Any, like: Any) -> Any:
    if not len(values):
        dtype = platform.str_to_dtype("int64")
        return platform.zeros((0,), dtype=dtype, device=like.device)
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    return platform.tensor_from_bytes(raw, "int64", values.shape).to(like.device)


def number_rows(sizes: Sequence[int], like: Any) -> Any:
    """The expert of each row, [rows, 1], where rows are sorted by expert; ``sizes``: how many each expert has."""
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    return _to_device(numbers, like).reshape((-1, 1))


def count_tokens(index: Any, num_experts: int) -> Any:
    """How many tokens have chosen each expert."""
    dtype = platform.str_to_dtype("int64")
    counts = platform.zeros((num_experts,), dtype=dtype, device=index.device)
    flat = platform.detach(index).reshape(-1).to(dtype)
    if not flat.shape[0]:
        return counts
    ones = platform.ones((flat.shape[0],), dtype=dtype, device=index.device)
    return platform.operator("scatter_add")(counts, 0, flat, ones)
