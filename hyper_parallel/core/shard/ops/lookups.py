# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002 - operands have the names that torch gives them
"""Tables read by indices: a shard of the table reads what it has, gives zeros for the rest, and the shards add up.

embedding   "..., v@ d -> ... d"        index_select   "... {dim=v}@, j -> ... {dim=j}"
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.shard.arguments import OperatorError
from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.ops.views import positions
from hyper_parallel.core.shard.rule import Rule, lookup
from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()

OUT_OF_RANGE = -1  # torch refuses it wherever it reads


def read_own(
    here: ShardContext,
    factor: str,
    table: Any,
    dim: int,
    index: Any,
    read: Callable[[Any, Any], Any],
    mask_dims: int = 0,
) -> Any:
    """``read(table, index)`` of a table of which this rank has some rows along a dim; zeros for the others' rows.

    ``mask_dims``: the number of dims that the result has after those of the index.
    """
    if not here.is_cut(factor):
        return read(table, index)
    start, size, whole = here.offset(factor), here.size(factor), here.whole(factor)
    known = (index >= 0) & (index < whole)
    if size == 0:
        # There is no row to read in place of the others', but the graph must be the same as on the other ranks.
        if not bool(known.all()):
            raise IndexError(f"index out of range of a table of {whole} rows")
        return read(platform.cat([table, _row_of_zeros(table, dim)], dim), index * 0)
    mine = (index >= start) & (index < start + size)
    # A row that nobody has stays out of range, so that it is an error here as it is on one device.
    rows = platform.operator("where")(
        mine, index - start, platform.operator("where")(known, 0, OUT_OF_RANGE)
    )
    found = read(table, rows)
    return found.masked_fill(~mine.reshape(tuple(mine.shape) + (1,) * mask_dims), 0)


def _row_of_zeros(table: Any, dim: int) -> Any:
    return platform.operator("sum")(table, dim, keepdim=True).to(
        table.dtype
    )  # of no rows


def read_by(text: str, table: Any) -> Rule:
    """The rule for a table; booleans do not add up, so that theirs is whole."""
    if table.dtype == platform.str_to_dtype("bool"):
        return Rule(text.replace("@", "!"), broadcast="none")
    return lookup(text)


# --- embedding


def _embedding(max_norm: Any, scale_grad_by_freq: bool, sparse: bool, **_: Any) -> Any:
    if max_norm is not None:
        raise coded(
            OperatorError,
            "HP312",
            "embedding: max_norm changes the weight while it is read; not for distributed tensors",
        )
    if sparse:
        raise coded(
            OperatorError,
            "HP312",
            "embedding: sparse gradients are not for distributed tensors; use sparse=False",
        )
    if scale_grad_by_freq:
        return None  # it counts the indices of the whole batch
    return lookup("..., v@ d -> ... d")


def _embed_shard(
    here: ShardContext, input: Any, weight: Any, padding_idx: int | None, **_: Any
) -> Any:
    """A padding index that is another rank's row is none here."""
    if padding_idx is not None:
        padding_idx = (
            padding_idx + here.whole("v") if padding_idx < 0 else padding_idx
        ) - here.offset("v")
        padding_idx = padding_idx if 0 <= padding_idx < here.size("v") else None
    return read_own(
        here,
        "v",
        weight,
        0,
        input,
        lambda table, rows: here.function(rows, table, padding_idx),
        1,
    )


operator(
    "embedding",
    "input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False",
    _embedding,
    local=_embed_shard,
    order_free=True,
)


def _weight_first(weight: Any, indices: Any, padding_idx: int, **more: Any) -> Any:
    return platform.operator("embedding")(
        indices, weight, padding_idx if padding_idx >= 0 else None, **more
    )


operator(
    "embedding_of_weight",
    "weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False",
    handler=_weight_first,
)

# --- index_select, gather, take_along_dim


def _index_select(input: Any, index: Any, **_: Any) -> Any:
    if not input.shape or not index.shape:
        return None
    return RuleForCall(
        read_by("... {dim=v}@, j -> ... {dim=j}", input), operands=[input, index]
    )


def _select_shard(here: ShardContext, input: Any, dim: int, index: Any) -> Any:
    after = len(input.shape) - 1 - dim % len(input.shape)
    return read_own(
        here,
        "v",
        input,
        dim,
        index,
        lambda table, rows: here.function(table, dim, rows),
        after,
    )


def _gather(input: Any, dim: int, index: Any, **_: Any) -> Any:
    """Where the index is shorter than the table along another dim, it reads the first ones: both are whole there."""
    if not input.shape or len(index.shape) != len(input.shape):
        return None
    (at,) = positions(dim, len(input.shape))
    alike = [
        i != at and have == asked
        for i, (have, asked) in enumerate(zip(input.shape, index.shape, strict=True))
    ]
    table = " ".join(
        "v@" if i == at else f"d{i}" if same else f"t{i}!"
        for i, same in enumerate(alike)
    )
    rows = " ".join(
        "j" if i == at else f"d{i}" if same else f"i{i}!"
        for i, same in enumerate(alike)
    )
    return RuleForCall(
        read_by(f"{table}, {rows} -> {rows}", input), operands=[input, index]
    )


def _gather_shard(
    here: ShardContext, input: Any, dim: int, index: Any, **_: Any
) -> Any:
    return read_own(
        here,
        "v",
        input,
        dim,
        index,
        lambda table, rows: here.function(table, dim, rows),
    )


def _take_along_dim(input: Any, indices: Any, dim: int | None) -> Any:
    """gather, with dims of size one stretched; an index below zero counts from the end."""
    size = math.prod(input.shape) if dim is None else input.shape[dim]
    indices = platform.operator("where")(indices < 0, indices + size, indices)
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    (at,) = positions(dim, len(input.shape))
    pairs = list(zip(input.shape, indices.shape, strict=True))
    common = [asked if have == 1 else have for have, asked in pairs]
    table, rows = (
        [pair[k] if i == at else common[i] for i, pair in enumerate(pairs)]
        for k in (0, 1)
    )
    return input.expand(table).gather(at, indices.expand(rows))


def _take(input: Any, index: Any) -> Any:
    """The elements of the flat tensor; an index below zero counts from the end."""
    flat = input.reshape(-1)
    rows = platform.operator("where")(index < 0, index + flat.shape[0], index).reshape(
        -1
    )
    return flat.index_select(0, rows).reshape(tuple(index.shape))


operator("index_select", "input, dim, index", _index_select, local=_select_shard)
operator(
    "gather", "input, dim, index, *, sparse_grad=False", _gather, local=_gather_shard
)
operator("take_along_dim", "input, indices, dim=None", handler=_take_along_dim)
operator("take", "input, index", handler=_take)

# --- classes and borders


def _one_hot(input: Any, num_classes: int) -> Any:
    if num_classes == -1:
        return _one_hot_of_all if 0 not in input.shape else None
    return RuleForCall(Rule("... -> ... c!"), {"c": num_classes})


def _one_hot_of_all(input: Any, **_: Any) -> Any:
    """The largest class of all ranks tells how many there are."""
    return platform.operator("one_hot")(
        input, int(platform.operator("amax")(input)) + 1
    )


def _searchsorted(sorted_sequence: Any, input: Any, sorter: Any, **_: Any) -> Any:
    given = [sorted_sequence, input, sorter]
    if len(sorted_sequence.shape) == 1:
        return RuleForCall(Rule("n!, ..., n! -> ..."), operands=given)
    return RuleForCall(
        Rule("... n!, ... m, ... n! -> ... m", broadcast="none"), operands=given
    )


operator("one_hot", "input, num_classes=-1", _one_hot)
operator(
    "bucketize",
    "input, boundaries, *, out_int32=False, right=False",
    Rule("..., n! -> ..."),
)
operator(
    "searchsorted",
    "sorted_sequence, input, *, out_int32=False, right=False, side=None, sorter=None",
    _searchsorted,
)
