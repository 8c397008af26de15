# SPDX-License-Identifier: Apache-2.0
"""Attention of distributed tensors whose sequence is sharded: an override of the attention operator.

    with attention_method("ring"):
        loss = model(batch)              scaled_dot_product_attention passes keys and values around

Without the context, and for calls that it does not know how to do, the operator's own rule gathers keys and values. All
ways give the same numbers.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hyper_parallel.core.context_parallel.blocks import (
    Documents,
    Visibility,
    documents_of_ids,
    documents_of_lengths,
)
from hyper_parallel.core.context_parallel.division import Division, check_heads
from hyper_parallel.core.context_parallel.engine import Task, attend
from hyper_parallel.core.context_parallel.masks import own_mask, place_masks
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.geometry import Spans
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.modes import MODES, Override, override
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()
OPERATOR = "scaled_dot_product_attention"
METHODS = ("allgather", "ring", "ulysses")


@dataclass(frozen=True)
class Method:
    """How keys travel, and what is visible beside what each call says.

    ``degree``: how many neighbours exchange heads; None is all ranks. ``documents``: for each row of the batch, and
    ``size`` the length of its sequence.
    """

    keys: str = "allgather"
    degree: int | None = 1
    window: tuple[int | None, int | None] = (None, None)
    documents: Documents | None = None
    size: int | None = None

    def division(
        self,
        ranks: Sequence[int],
        index: int,
        queries: tuple[Spans, ...],
        keys: tuple[Spans, ...],
    ) -> Division:
        """The division of these ranks by this method."""
        degree = len(ranks) if self.degree is None or len(ranks) == 1 else self.degree
        rotates = self.keys == "ring"
        return Division(tuple(ranks), index, queries, keys, degree, rotates)

    def sight(self, is_causal: bool) -> Visibility:
        """What a query sees."""
        before, after = self.window
        if is_causal:
            after = 0 if after is None else min(0, after)
        return Visibility(before, after, self.documents)

    @property
    def hides(self) -> bool:
        """Whether something is hidden that the calls of the operator do not say."""
        return self.documents is not None or self.window != (None, None)


def attention_method(
    method: str = "allgather",
    *,
    ulysses_degree: int | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    document_ids: Any = None,
    cu_seqlens: Any = None,
) -> AbstractContextManager[None]:
    """A context in which attention on a sharded sequence is computed by this method: "allgather", "ring" or "ulysses".

    ``ulysses_degree``: with "allgather" and "ring", so many neighbours exchange heads, and keys travel between such
    groups only. ``window``: how many positions before its own a query sees, or (before, after). ``document_ids``: for
    each row of the batch and position the number of its document, negative for padding; ``cu_seqlens``: instead, where
    documents begin and end, the same for all rows. A query sees its own document only. Within models and styles with a
    method of their own, that method sees to the window and the documents.
    """
    how = make_method(method, ulysses_degree)
    how = replace(how, window=_check_window(window))
    if document_ids is not None and cu_seqlens is not None:
        raise coded(
            ValueError,
            "HP804",
            "attention_method: document_ids and cu_seqlens say the same; pass one of them",
        )
    if document_ids is not None:
        rows = _as_lists(document_ids)
        documents, sizes = documents_of_ids(rows), {len(row) for row in rows}
        if len(sizes) != 1:
            raise coded(
                ValueError,
                "HP804",
                "attention_method: document_ids must have a number for each position of each row, (batch, sequence)",
            )
        how = replace(how, documents=documents, size=sizes.pop())
    if cu_seqlens is not None:
        borders = [int(border) for border in _as_array(cu_seqlens).reshape(-1)]
        documents = documents_of_lengths(borders, max(borders, default=0))
        how = replace(how, documents=documents)
    return using(how)


def using(method: Method) -> AbstractContextManager[None]:
    """A context in which attention on a sharded sequence is computed like this."""
    [(name, how)] = override_of(method).items()
    context: AbstractContextManager[None] = override(name, how)
    return context


def override_of(method: Method) -> dict[str, Override]:
    """What a method does to the attention operator."""
    call = functools.partial(_call, method)
    return {OPERATOR: Override(place_plain=place_masks, call=call)}


def overrides_with(method: Method) -> Mapping[str, Override]:
    """What holds in this thread, with attention by a method.

    A window and documents that an outer context has given stay: they say what is computed, and not how.
    """
    call = MODES.overrides.get(OPERATOR, Override()).call
    if isinstance(call, functools.partial) and call.func is _call:
        [outer] = call.args
        given = {"window": outer.window, "documents": outer.documents}
        method = replace(method, size=outer.size, **given)
    return {**MODES.overrides, **override_of(method)}


def make_method(name: str, ulysses_degree: int | None = None) -> Method:
    """The method of that name."""
    if name not in METHODS:
        raise coded(
            ValueError,
            "HP802",
            f"context parallel: unknown method {name!r}; expected one of {', '.join(map(repr, METHODS))}",
        )
    if ulysses_degree is not None and (
        not isinstance(ulysses_degree, int) or ulysses_degree < 1
    ):
        raise coded(
            ValueError,
            "HP802",
            f"context parallel: ulysses_degree must be a positive int, got {ulysses_degree!r}",
        )
    if name == "ulysses":
        return Method("allgather", ulysses_degree)
    return Method(name, ulysses_degree or 1)


def _check_window(window: Any) -> tuple[int | None, int | None]:
    pair = window if isinstance(window, tuple) else (window, None)
    is_valid = len(pair) == 2 and all(
        one is None or (isinstance(one, int) and one >= 0) for one in pair
    )
    if not is_valid:
        raise coded(
            ValueError,
            "HP804",
            f"attention_method: window must be a number of positions, or (before, after), got {window!r}",
        )
    return pair


def _as_array(values: Any) -> Any:
    if platform.is_tensor(values):
        values = values.full_tensor() if isinstance(values, DTensor) else values
        return platform.tensor_to_numpy(values)
    return np.asarray(values)


def _as_lists(values: Any) -> list[list[int]]:
    rows = _as_array(values)
    lists: list[list[int]] = (rows if rows.ndim > 1 else rows[None]).tolist()
    return lists


# --- calls of the operator


def _call(
    method: Method,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention by a method; NotImplemented where the operator's own rule does as well."""
    operands = (query, key, value)
    if not all(isinstance(one, DTensor) for one in operands) or not query.shape[-1]:
        return NotImplemented
    axes = query._layout.dim_axes[-2]
    shared = (
        -3 if enable_gqa else -2
    )  # dims up to here are alike, for nothing is broadcast
    has_heads = query.shape[:shared] == key.shape[:shared]
    takes_mask = _takes_mask(attn_mask, is_causal)
    if len(query.shape) > 4:  # more dims of a batch than masks and documents have
        takes_mask = attn_mask is None and method.documents is None
    if not (has_heads and takes_mask and _fit(operands, axes)):
        return _leave_to_rule(method, query, key)
    if dropout_p and _is_on_one_rank(query, axes):
        return _leave_to_rule(method, query, key)
    if dropout_p:
        raise coded(
            NotImplementedError,
            "HP805",
            f"{OPERATOR}: dropout_p={dropout_p} within a context parallel method would draw other numbers than one "
            "device; set the model's attention dropout to 0, or leave the method out: the operator's own rule drops",
        )
    return _attend(method, operands, axes, attn_mask, is_causal, scale)


def _takes_mask(mask: DTensor | None, is_causal: bool) -> bool:
    """Whether a mask is one that needs no gradient, and the only thing that the call hides keys by."""
    return mask is None or not (is_causal or platform.is_recorded(mask._local))


def _leave_to_rule(method: Method, query: DTensor, key: DTensor) -> Any:
    """What the operator's own rule may do, since it knows all of the call."""
    if not method.hides:
        return NotImplemented
    raise coded(
        NotImplementedError,
        "HP805",
        f"{OPERATOR}: a window or documents were given, which are known only where queries, keys and values of up to "
        "4 dims are sharded alike along the sequence, and each rank has the heads of keys of its queries; but the "
        f"query of shape {tuple(query.shape)} is in {query.layout} and the key of shape {tuple(key.shape)} in "
        f"{key.layout}; give the call a mask instead, or leave out what it has beside them",
    )


def _attend(
    method: Method,
    operands: Sequence[DTensor],
    axes: tuple[int, ...],
    attn_mask: DTensor | None,
    is_causal: bool,
    scale: float | None,
) -> DTensor:
    query, key, value = operands
    division = _divide(
        method, axes, query._layout, tuple(query.shape), key._layout, tuple(key.shape)
    )
    if method.documents is not None:
        method = _for_rows(method, query, key)
    mask = None
    if attn_mask is not None:
        mask = own_mask(attn_mask, query, axes, division)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    q, k, v = (_as_four_dims(one._local) for one in operands)
    output = attend(q, k, v, Task(division, method.sight(is_causal), factor, mask))
    local = query._local.shape
    output = output.reshape((*local[:-1], output.shape[-1]))
    return DTensor(output, query._layout, (*query.shape[:-1], value.shape[-1]))


def _as_four_dims(shard: Any) -> Any:
    """(batch, heads, sequence, head_dim), however many dims of the batch there are."""
    shape = tuple(shard.shape)
    if len(shape) == 4:
        return shard
    heads = shape[-3] if len(shape) > 2 else 1
    batch = math.prod(shape[:-3])
    return shard.reshape((batch, heads, *shape[-2:]))


def _is_on_one_rank(query: DTensor, axes: Sequence[int]) -> bool:
    sizes = query._layout.mesh_shape
    return all(sizes[axis] == 1 for axis in axes)


def _fit(operands: Sequence[Any], axes: tuple[int, ...]) -> bool:
    """Whether the shards of a rank are those that attention on it needs, but for the sequence of the keys."""
    layouts = [one._layout for one in operands]
    first, ndim = layouts[0], len(operands[0].shape)
    if not axes or any(
        one.mesh is not first.mesh or one.ndim != ndim for one in layouts
    ):
        return False
    return (
        layouts[1] is layouts[2]
        and all(_lies_like(one, first, axes) for one in layouts)
        and (ndim < 3 or _heads_fit(first, operands))
    )


def _lies_like(layout: Layout, query: Layout, axes: Sequence[int]) -> bool:
    """Whether it is sharded along the sequence by the same axes, and lies in the same way on all others."""
    if layout.is_partial() or layout.dim_axes[-1]:
        return False
    if set(layout.dim_axes[-2]) != set(axes):
        return False
    pairs = enumerate(zip(layout.placements, query.placements, strict=True))
    return all(one == other for axis, (one, other) in pairs if axis not in axes)


def _heads_fit(layout: Layout, operands: Sequence[Any]) -> bool:
    """Whether each rank has the heads of keys of its heads of queries."""
    heads, of_keys = operands[0].shape[-3], operands[1].shape[-3]
    parts = math.prod(layout.mesh_shape[axis] for axis in layout.dim_axes[-3])
    return (
        heads == of_keys or parts == 1 or (heads % parts == 0 and of_keys % parts == 0)
    )


@functools.lru_cache(maxsize=1024)
def _divide(
    method: Method,
    axes: tuple[int, ...],
    query: Layout,
    of_query: tuple[int, ...],
    key: Layout,
    of_key: tuple[int, ...],
) -> Division:
    mesh = query.mesh
    ranks = mesh.ranks_along(axes)
    both = (query, of_query), (key, of_key)

    def spans_of(dim: int, ranks: Sequence[int]) -> list[tuple[Spans, ...]]:
        """For queries and for keys, where each of these ranks has its part."""
        places = [mesh.coordinate_of(rank) for rank in ranks]
        return [
            tuple(layout.spans_of(shape, place)[dim] for place in places)
            for layout, shape in both
        ]

    queries, keys = spans_of(-2, ranks)
    division = method.division(ranks, ranks.index(mesh.rank), queries, keys)
    if division.degree > 1 and len(of_query) > 2:
        # Those of all ranks: where one refuses, the others would wait for it.
        with_heads = mesh.ranks_along(query.dim_axes[-3]) or [mesh.rank]
        counts = zip(*spans_of(-3, with_heads), strict=True)
        check_heads(counts, division.degree)
    return division


def _for_rows(method: Method, query: DTensor, key: DTensor) -> Method:
    """The method with the documents of this rank's rows of the batch."""
    documents = method.documents
    assert documents is not None
    _check_length(method, documents, query.shape[-2], key.shape[-2])
    has_batch = len(query.shape) > 3
    own, whole = (query._local.shape[0], query.shape[0]) if has_batch else (1, 1)
    if len(documents) in (1, own):
        return method
    if len(documents) == whole:
        spans = query._layout.spans_of(tuple(query.shape))[0]
        rows = [documents[start : start + size] for start, size in spans]
        return replace(method, documents=tuple(itertools.chain(*rows)))
    raise coded(
        ValueError,
        "HP804",
        f"{OPERATOR}: documents of {len(documents)} rows were given for a batch of {whole}, of which this rank has "
        f"{own}",
    )


def _check_length(
    method: Method, documents: Documents, queries: int, keys: int
) -> None:
    """Raises a ValueError if documents do not describe sequences of this length."""
    last = max((run[1] for row in documents for run in row), default=0)
    fits = queries == method.size if method.size is not None else last <= queries
    if not fits or queries != keys:
        raise coded(
            ValueError,
            "HP804",
            f"{OPERATOR}: documents of {method.size or last} positions were given, but there are {queries} queries and "
            f"{keys} keys",
        )
