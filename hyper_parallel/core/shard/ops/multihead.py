# SPDX-License-Identifier: Apache-2.0
"""Attention with its projections, by the operators that it is made of: each part is cut as its own rule allows.

Batches are free. Where the rows of the projections are cut, so are the heads, and the columns of the last projection:

query l n e  ->  linear  l n (h d)  ->  n h l d  ->  attention  n h l d  ->  l n (h d)  ->  linear, summed over h
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.dtensor.placement_types import Replicate
from hyper_parallel.core.shard.ops.operator import operator
from hyper_parallel.platform import get_platform

platform = get_platform()
call = platform.operator


def _multihead(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    out_proj_weight: Any,
    out_proj_bias: Any,
    dropout_p: float,
    training: bool,
    need_weights: bool,
    average_attn_weights: bool,
    **more: Any,
) -> Any:
    is_batched = len(query.shape) == 3
    if not is_batched:
        query, key, value = _batches_of_one(query, key, value)
    length, batch, width = query.shape
    _require(
        width == embed_dim_to_check,
        f"an embedding of {embed_dim_to_check}, got {width}",
    )
    _require(
        width % num_heads == 0,
        f"an embedding that {num_heads} heads divide, got {width}",
    )
    mask, is_causal = _mask(query, key, num_heads, need_weights=need_weights, **more)
    q, k, v, mask = _heads(
        _projected(query, key, value, **more), (batch, num_heads), mask, **more
    )
    dropped = dropout_p if training else 0.0
    weights = None
    if need_weights:
        weights = _weights(q, k, mask, dropped)
        found = call("matmul")(weights, v)
        weights = call("mean")(weights, 1) if average_attn_weights else weights
        weights = weights if is_batched else weights.squeeze(0)
    else:
        found = call("scaled_dot_product_attention")(q, k, v, mask, dropped, is_causal)
    joined = found.permute(2, 0, 1, 3).reshape(length, batch, width)
    result = call("linear")(joined, out_proj_weight, out_proj_bias)
    return (result if is_batched else result.squeeze(1)), weights


def _require(condition: bool, expected: str) -> None:
    if not condition:
        raise ValueError(f"multi_head_attention_forward: expected {expected}")


def _batches_of_one(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """The same object stays the same one: it is then projected once."""
    made = {id(x): x.unsqueeze(1) for x in (query, key, value)}
    return made[id(query)], made[id(key)], made[id(value)]


# --- masks: added to the scores, of which they have the dims n h l s or ones


def _mask(
    query: Any,
    key: Any,
    heads: int,
    attn_mask: Any,
    key_padding_mask: Any,
    is_causal: bool,
    need_weights: bool,
    **_: Any,
) -> tuple[Any, bool]:
    """What is added to the scores, and whether the attention itself leaves out what comes later."""
    _require(
        not is_causal or attn_mask is not None,
        "an attn_mask with is_causal, which is a hint about it",
    )
    (length, batch, _width), keys = query.shape, key.shape[0]
    if is_causal and key_padding_mask is None and not need_weights:
        return None, True
    mask = None
    if attn_mask is not None:
        wanted = (
            (length, keys)
            if len(attn_mask.shape) == 2
            else (batch * heads, length, keys)
        )
        _require(
            tuple(attn_mask.shape) == wanted,
            f"an attn_mask of shape {wanted}, got {tuple(attn_mask.shape)}",
        )
        shape = (
            (1, 1, length, keys) if len(wanted) == 2 else (batch, heads, length, keys)
        )
        mask = _added(attn_mask, query).reshape(shape)
    if key_padding_mask is not None:
        padding = _added(key_padding_mask, query).reshape(batch, 1, 1, keys)
        mask = padding if mask is None else mask + padding
    return mask, False


def _added(mask: Any, query: Any) -> Any:
    """A mask as numbers to be added: booleans forbid where they are true."""
    if platform.is_floating_point(mask):
        return mask
    return call("zeros_like")(mask, dtype=query.dtype).masked_fill(mask, -math.inf)


# --- projections


def _projected(
    query: Any,
    key: Any,
    value: Any,
    in_proj_weight: Any,
    in_proj_bias: Any,
    use_separate_proj_weight: bool,
    q_proj_weight: Any,
    k_proj_weight: Any,
    v_proj_weight: Any,
    **_: Any,
) -> list[Any]:
    weights = [q_proj_weight, k_proj_weight, v_proj_weight]
    if not use_separate_proj_weight:
        weights = _thirds(in_proj_weight, query)
    biases = [None] * 3 if in_proj_bias is None else _thirds(in_proj_bias, query)
    return [
        call("linear")(x, w, b)
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    ]


def _thirds(packed: Any, query: Any) -> list[Any]:
    """The projections that are packed in one tensor; where its rows are cut, and no batch is, theirs are."""
    pairs = zip(packed.placements, query.placements, strict=True)
    placements = [
        p if p.is_shard(0) and not q.is_shard() else Replicate() for p, q in pairs
    ]
    parts = call("chunk")(packed, 3)
    if all(p.is_replicate() for p in placements):
        return list(parts)
    return [part.redistribute(None, placements) for part in parts]


# --- heads


def _heads(
    projected: Sequence[Any],
    batches: tuple[int, int],
    mask: Any,
    bias_k: Any,
    bias_v: Any,
    static_k: Any,
    static_v: Any,
    add_zero_attn: bool,
    **_: Any,
) -> tuple[Any, Any, Any, Any]:
    """Queries, keys and values as n h l d, with the keys that are appended to every sequence."""
    _require((bias_k is None) == (bias_v is None), "bias_k and bias_v together")
    query, *others = projected
    if bias_k is not None:
        _require(
            static_k is None and static_v is None, "no bias for keys that are given"
        )
        rows = [bias.expand(1, batches[0], -1) for bias in (bias_k, bias_v)]
        others = [call("cat")([x, row]) for x, row in zip(others, rows, strict=True)]
    given = zip(others, (static_k, static_v), strict=True)
    key, value = (
        _split(x, batches) if fixed is None else fixed.unflatten(0, batches)
        for x, fixed in given
    )
    if add_zero_attn:
        key, value = (call("pad")(x, (0, 0, 0, 1)) for x in (key, value))
    more = int(bias_k is not None) + int(add_zero_attn)
    return (
        _split(query, batches),
        key,
        value,
        call("pad")(mask, (0, more)) if more and mask is not None else mask,
    )


def _split(x: Any, batches: tuple[int, int]) -> Any:
    return x.unflatten(-1, (batches[1], x.shape[-1] // batches[1])).permute(1, 2, 0, 3)


def _weights(query: Any, key: Any, mask: Any, dropout_p: float) -> Any:
    """How much of each value a query takes."""
    scores = call("matmul")(
        query * math.sqrt(1.0 / query.shape[-1]), key.transpose(-2, -1)
    )
    weights = call("softmax")(scores if mask is None else scores + mask, -1)
    return call("dropout")(weights, dropout_p) if dropout_p else weights


operator(
    "multi_head_attention_forward",
    "query, key, value, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v, add_zero_attn, "
    "dropout_p, out_proj_weight, out_proj_bias, training=True, key_padding_mask=None, need_weights=True, "
    "attn_mask=None, use_separate_proj_weight=False, q_proj_weight=None, k_proj_weight=None, v_proj_weight=None, "
    "static_k=None, static_v=None, average_attn_weights=True, is_causal=False",
    handler=_multihead,
)
