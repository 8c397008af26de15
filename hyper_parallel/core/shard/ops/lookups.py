# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002, A006 - operands have the names that torch gives them
"""Tables read by indices: a shard of the table reads what it has, gives zeros for the rest, and the shards add up.

embedding   "..., v@ d -> ... d"        index_select   "... {dim=v}@, j -> ... {dim=j}"
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.shard.arguments import OperatorError
from hyper_parallel.core.shard.here import Here
from hyper_parallel.core.shard.ops.operator import Ruled, operator
from hyper_parallel.core.shard.ops.views import positions
from hyper_parallel.core.shard.rule import Rule, lookup
from hyper_parallel.platform import get_platform

platform = get_platform()

OUT_OF_RANGE = -1  # torch refuses it wherever it reads


def read_own(
    here: Here, factor: str, table: Any, dim: int, index: Any, read: Callable[[Any, Any], Any], mask_dims: int = 0
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
    rows = platform.operator("where")(mine, index - start, platform.operator("where")(known, 0, OUT_OF_RANGE))
    found = read(table, rows)
    return found.masked_fill(~mine.reshape(tuple(mine.shape) + (1,) * mask_dims), 0)


def _row_of_zeros(table: Any, dim: int) -> Any:
    return table.sum(dim, keepdim=True)  # of no rows


# --- embedding


def _embedding(max_norm: Any, scale_grad_by_freq: bool, sparse: bool, **_: Any) -> Any:
    if max_norm is not None:
        raise OperatorError("embedding: max_norm changes the weight while it is read; not for distributed tensors")
    if sparse:
        raise OperatorError("embedding: sparse gradients are not for distributed tensors; use sparse=False")
    if scale_grad_by_freq:
        return None  # it counts the indices of the whole batch
    return lookup("..., v@ d -> ... d")


def _embed_shard(here: Here, input: Any, weight: Any, padding_idx: int | None, **_: Any) -> Any:
    """A padding index that is another rank's row is none here."""
    if padding_idx is not None:
        padding_idx = (padding_idx + here.whole("v") if padding_idx < 0 else padding_idx) - here.offset("v")
        padding_idx = padding_idx if 0 <= padding_idx < here.size("v") else None
    return read_own(here, "v", weight, 0, input, lambda table, rows: here.function(rows, table, padding_idx), 1)


operator(
    "embedding",
    "input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False",
    _embedding,
    local=_embed_shard,
)

# --- index_select, gather, take_along_dim


def _index_select(input: Any, dim: int, index: Any) -> Any:
    if not input.shape or not index.shape:
        return None
    (at,) = positions(dim, len(input.shape))
    return Ruled(lookup("... {dim=v}@, j -> ... {dim=j}"), {"dim": at})


def _select_shard(here: Here, input: Any, dim: int, index: Any) -> Any:
    after = len(input.shape) - 1 - dim % len(input.shape)
    return read_own(here, "v", input, dim, index, lambda table, rows: here.function(table, dim, rows), after)


def _gather(input: Any, dim: int, index: Any, **_: Any) -> Any:
    """Where the index is shorter than the table along another dim, it reads the first ones: both are whole there."""
    if not input.shape or len(index.shape) != len(input.shape):
        return None
    (at,) = positions(dim, len(input.shape))
    table, rows = [], []
    for i, (have, asked) in enumerate(zip(input.shape, index.shape, strict=True)):
        alike = i != at and have == asked
        table.append("v@" if i == at else f"d{i}" if alike else f"t{i}!")
        rows.append("j" if i == at else f"d{i}" if alike else f"i{i}!")
    return lookup(f"{' '.join(table)}, {' '.join(rows)} -> {' '.join(rows)}")


def _gather_rule(input: Any, dim: int, index: Any, **more: Any) -> Any:
    rule = _gather(input, dim, index, **more)
    return None if rule is None else Ruled(rule, operands=[input, index])


def _gather_shard(here: Here, input: Any, dim: int, index: Any, sparse_grad: bool) -> Any:
    return read_own(here, "v", input, dim, index, lambda table, rows: here.function(table, dim, rows))


operator("index_select", "input, dim, index", _index_select, local=_select_shard)
operator("gather", "input, dim, index, *, sparse_grad=False", _gather_rule, local=_gather_shard)

# --- classes and borders


def _one_hot(input: Any, num_classes: int) -> Any:
    if num_classes == -1:
        return None  # the largest class decides
    return Ruled(Rule("... -> ... c!"), {"c": num_classes})


def _searchsorted(sorted_sequence: Any, input: Any, sorter: Any, **_: Any) -> Any:
    given = [sorted_sequence, input, sorter]
    if len(sorted_sequence.shape) == 1:
        return Ruled(Rule("n!, ..., n! -> ..."), operands=given)
    return Ruled(Rule("... n!, ... m, ... n! -> ... m", broadcast="none"), operands=given)


operator("one_hot", "input, num_classes=-1", _one_hot)
operator("bucketize", "input, boundaries, *, out_int32=False, right=False", Rule("..., n! -> ..."))
operator(
    "searchsorted", "sorted_sequence, input, *, out_int32=False, right=False, side=None, sorter=None", _searchsorted
)
