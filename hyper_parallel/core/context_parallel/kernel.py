# SPDX-License-Identifier: Apache-2.0
"""Attention block by block on one rank, and the merging of what blocks give; outside the graph, nothing communicates.

    merged = Merged(query, value)
    merged.add(Operands(query, key, value, scale), blocks)       once for each part of the keys
    output, logsumexp = merged.result()

What a query gets from different keys is merged by the sums of its softmax, in float32, or float64 for float64 inputs.
Tensors are (batch, heads, sequence, head_dim), and several heads of queries may share one of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.context_parallel.blocks import Block
from hyper_parallel.core.dtensor.geometry import Span
from hyper_parallel.platform import get_platform

platform = get_platform()
NOTHING = float("-inf")  # the logarithm of an empty sum


class Operands(NamedTuple):
    """What attention is computed from; ``mask`` has a row for each query and a column for each key, or one for all."""

    query: Any
    key: Any
    value: Any
    scale: float
    mask: Any = None

    def of_block(self, block: Block) -> Operands:
        """The operands of one block; views."""
        return self._replace(
            query=take(self.query, block.row, block.queries),
            key=take(self.key, block.row, block.keys),
            value=take(self.value, block.row, block.keys),
            mask=_mask_of_block(self, block),
        )


def take(tensor: Any, row: int | None, span: Span) -> Any:
    """The part of a tensor in one row of the batch, or all of them, and one span of its sequence."""
    return tensor[place(row, span)]


def place(row: int | None, span: Span) -> tuple[slice, ...]:
    """The index of such a part, up to the dim of the sequence."""
    rows = slice(None) if row is None else slice(row, row + 1)
    return rows, slice(None), slice(span[0], span[0] + span[1])


def _mask_of_block(operands: Operands, block: Block) -> Any:
    """What is added to the scores of a block; None if the kernel knows by itself what is visible."""
    mask, query = operands.mask, operands.query
    if mask is None:
        return None if block.is_full or block.is_causal else _band(block, query)
    mask = additive(_part_of_mask(mask, block), query.dtype)
    return mask if block.is_full else _band(block, query) + mask


def _part_of_mask(mask: Any, block: Block) -> Any:
    """The rows and columns of a block; a dim of size 1 is the same for all."""
    row, rows, columns = block.row, slice(None), slice(None)
    if mask.shape[2] > 1:
        rows = slice(block.queries[0], sum(block.queries))
    if mask.shape[3] > 1:
        columns = slice(block.keys[0], sum(block.keys))
    of_batch = slice(None)
    if row is not None and mask.shape[0] > 1:
        of_batch = slice(row, row + 1)
    return mask[of_batch, :, rows, columns]


def additive(mask: Any, dtype: Any) -> Any:
    """A mask as numbers that are added to the scores."""
    if platform.dtype_kind(mask.dtype) != "bool":
        return mask.to(dtype)
    zeros = platform.zeros(tuple(mask.shape), dtype=dtype, device=mask.device)
    hidden = platform.operator("logical_not")(mask)
    return platform.operator("masked_fill")(zeros, hidden, NOTHING)


def _band(block: Block, like: Any) -> Any:
    queries, keys = block.queries[1], block.keys[1]
    distance = np.arange(keys)[None] - np.arange(queries)[:, None]
    hidden = np.zeros((1, 1, queries, keys))
    if block.before is not None:
        hidden[:, :, distance < -block.before] = NOTHING
    if block.after is not None:
        hidden[:, :, distance > block.after] = NOTHING
    return platform.tensor(hidden, dtype=like.dtype).to(like.device)


# --- forward


class Merged:
    """The attention of a rank's queries to the keys seen so far."""

    def __init__(self, query: Any, value: Any) -> None:
        self._shape = (*query.shape[:3], value.shape[-1])
        self._like = query
        self._dtype = exact_dtype(query)
        self._output: Any = None
        self._logsumexp: Any = None

    def add(self, operands: Operands, blocks: Sequence[Block]) -> None:
        """Adds what the queries see of these keys."""
        for block in blocks:
            output, logsumexp = _attend(operands.of_block(block), block)
            covers_all = block.row is None and block.queries[1] == self._shape[2]
            if self._output is None and covers_all:
                self._output, self._logsumexp = output, logsumexp
            else:
                self._merge(place(block.row, block.queries), output, logsumexp)

    def _merge(self, where: Any, output: Any, logsumexp: Any) -> None:
        if self._output is None:
            make = {"dtype": self._dtype, "device": self._like.device}
            self._output = platform.zeros(self._shape, **make)
            self._logsumexp = platform.full(self._shape[:3], NOTHING, **make)
        elif self._output.dtype != self._dtype:
            self._output = self._output.to(self._dtype)
        before, after = self._logsumexp[where], logsumexp.to(self._dtype)
        exp = platform.operator("exp")
        top = platform.operator("maximum")(before, after)
        top = platform.operator("masked_fill")(top, top == NOTHING, 0.0)
        shares = exp(before - top), exp(after - top)
        total = shares[0] + shares[1]
        # A query that has seen nothing so far keeps the output zero.
        divisor = platform.operator("masked_fill")(total, total == 0, 1.0)
        kept, added = ((share / divisor)[..., None] for share in shares)
        self._output[where] = self._output[where] * kept + output * added
        self._logsumexp[where] = platform.operator("log")(total) + top

    def result(self) -> tuple[Any, Any]:
        """(output, logsumexp); the output is zero and the other minus infinity where a query saw nothing."""
        if self._output is None:
            make = {"dtype": self._dtype, "device": self._like.device}
            self._output = platform.zeros(self._shape, **make)
            self._logsumexp = platform.full(self._shape[:3], NOTHING, **make)
        return self._output.to(self._like.dtype), self._logsumexp


def exact_dtype(tensor: Any) -> Any:
    """The dtype in which parts are merged."""
    is_double = platform.get_element_size(tensor) == 8
    return platform.str_to_dtype("float64" if is_double else "float32")


def _attend(given: Operands, block: Block) -> tuple[Any, Any]:
    """(output, logsumexp) of one block."""
    is_causal = block.is_causal and given.mask is None
    found = platform.fused_attention(
        given.query, given.key, given.value, given.mask, is_causal, given.scale
    )
    if found is None:
        return _attend_by_operators(given, block, is_causal)
    output, logsumexp = found
    if given.mask is not None:  # kernels give a row of zeros any logarithm
        fill = platform.operator("masked_fill")
        logsumexp = fill(logsumexp, _hides_all(given.mask), NOTHING)
    return output, logsumexp


def _hides_all(mask: Any) -> Any:
    """Which queries see no key."""
    return platform.operator("amax")(mask, -1) == NOTHING


def _attend_by_operators(
    given: Operands, block: Block, is_causal: bool
) -> tuple[Any, Any]:
    dtype = exact_dtype(given.query)
    fill = platform.operator("masked_fill")
    scores = _scores(given, block, is_causal)
    top = platform.operator("amax")(scores, -1, keepdim=True)
    top = fill(top, top == NOTHING, 0.0)
    weights = platform.operator("exp")(scores - top)
    total = platform.operator("sum")(weights, -1, keepdim=True)
    logsumexp = (platform.operator("log")(total) + top)[..., 0]
    weights = weights / fill(total, total == 0, 1.0)
    output = _matmul(_by_groups(weights, given), given.value.to(dtype))
    shape = (*given.query.shape[:3], given.value.shape[-1])
    return output.reshape(shape), logsumexp


def _scores(given: Operands, block: Block, is_causal: bool) -> Any:
    """What the softmax is taken of, in the dtype of merging: (batch, heads of queries, queries, keys)."""
    dtype = exact_dtype(given.query)
    query = _by_groups(given.query.to(dtype), given)
    scores = _matmul(query, _transposed(given.key.to(dtype))) * _scale(given)
    scores = scores.reshape((*given.query.shape[:3], given.key.shape[2]))
    mask = _band(block, given.query) if is_causal else given.mask
    return scores if mask is None else scores + mask.to(dtype)


def _scale(given: Operands) -> Any:
    """The scale as a tensor: MindSpore rounds a number to float32."""
    dtype, device = exact_dtype(given.query), given.query.device
    return platform.full((1,), given.scale, dtype=dtype, device=device)


def _by_groups(tensor: Any, given: Operands) -> Any:
    """(batch, heads, sequence, ...) with the queries of all heads that share a key one after the other."""
    batch, heads = given.key.shape[:2]
    rows = given.query.shape[1] // heads * given.query.shape[2]
    return tensor.reshape((batch, heads, rows, tensor.shape[-1]))


def _matmul(left: Any, right: Any) -> Any:
    return platform.operator("matmul")(left, right)


def _transposed(tensor: Any) -> Any:
    return platform.operator("transpose")(tensor, -1, -2)


# --- backward


class Gradients:
    """The gradients of a rank's queries, which grow with every part of the keys that is passed."""

    def __init__(self, grad: Any, output: Any, logsumexp: Any) -> None:
        """``output``, ``logsumexp``: of the attention to all keys."""
        self._grad, self._output = grad, output
        # What a query that saw nothing gives weight to is zero.
        fill = platform.operator("masked_fill")
        self._logsumexp = fill(logsumexp, logsumexp == NOTHING, math.inf)
        self._of_query: _Sum | None = None

    def add(self, operands: Operands, blocks: Sequence[Block]) -> tuple[Any, Any]:
        """Adds the gradients from these keys; returns those of these keys and values, in the dtype of merging."""
        dtype = exact_dtype(operands.query)
        if self._of_query is None:
            self._of_query = _Sum(operands.query, dtype)
        of_key, of_value = _Sum(operands.key, dtype), _Sum(operands.value, dtype)
        for block in blocks:
            found = list(self._of_block(operands.of_block(block), block))
            of_value.add(block.row, block.keys, found.pop())
            of_key.add(block.row, block.keys, found.pop())
            self._of_query.add(block.row, block.queries, found.pop())
        return of_key.result(), of_value.result()

    def _of_block(self, given: Operands, block: Block) -> tuple[Any, Any, Any]:
        """The gradients of one block's query, key and value."""
        where = place(block.row, block.queries)
        grad, output = self._grad[where], self._output[where]
        logsumexp = self._logsumexp[where]
        is_causal = block.is_causal and given.mask is None
        found = platform.fused_attention_gradients(
            grad,
            *given[:3],
            output,
            logsumexp,
            given.mask,
            is_causal,
            given.scale,
        )
        if found is not None:
            return found
        dtype = exact_dtype(given.query)
        grad, query = grad.to(dtype), given.query.to(dtype)
        scores = _scores(given, block, is_causal)
        weights = platform.operator("exp")(scores - logsumexp[..., None])
        grad_rows = _by_groups(grad, given)
        of_weights = _matmul(grad_rows, _transposed(given.value.to(dtype)))
        owed = platform.operator("sum")(grad * output.to(dtype), -1, keepdim=True)
        of_scores = weights * (of_weights.reshape(weights.shape) - owed) * _scale(given)
        of_scores, weights = (
            _by_groups(of_scores, given),
            _by_groups(weights, given),
        )
        of_query = _matmul(of_scores, given.key.to(dtype)).reshape(query.shape)
        of_key = _matmul(_transposed(of_scores), _by_groups(query, given))
        return of_query, of_key, _matmul(_transposed(weights), grad_rows)

    def of_query(self, query: Any) -> Any:
        """The gradient of the queries, in their dtype."""
        total = self._of_query or _Sum(query, query.dtype)
        return total.result().to(query.dtype)


class _Sum:
    """A sum like another tensor that grows by parts of it; a first part that is all of it is not copied."""

    def __init__(self, like: Any, dtype: Any) -> None:
        self._like, self._dtype = like, dtype
        self._total: Any = None

    def add(self, row: int | None, span: Span, part: Any) -> None:
        """Adds a part that nobody else has."""
        part = part.to(self._dtype)
        is_whole = row is None and span[1] == self._like.shape[2]
        if is_whole and self._total is None:
            self._total = part
        elif is_whole:
            self._total = self._total + part
        else:
            total, where = self.result(), place(row, span)
            total[where] = total[where] + part

    def result(self) -> Any:
        """The sum; zeros if nothing was added."""
        if self._total is None:
            shape, device = tuple(self._like.shape), self._like.device
            self._total = platform.zeros(shape, dtype=self._dtype, device=device)
        return self._total
