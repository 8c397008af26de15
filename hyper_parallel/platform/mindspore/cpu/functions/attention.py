# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A001, A002 - operands have the names that the rules give them
"""Attention as a softmax between two products: there is no kernel for it on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor

from hyper_parallel.platform.mindspore.cpu.functions.shared import (
    matmul,
    mint,
    numbers,
    ops,
    refuse,
    rows,
)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    refuse("scaled_dot_product_attention", dropout_p=dropout_p or None)
    if enable_gqa:  # each head of the keys is for a group of queries
        heads = np.repeat(np.arange(key.shape[-3]), query.shape[-3] // key.shape[-3])
        key, value = rows(key, heads, -3), rows(value, heads, -3)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = matmul(query * numbers(query, factor), mint.transpose(key, -1, -2))
    if is_causal:
        attn_mask = Tensor(np.tri(scores.shape[-2], scores.shape[-1], dtype=bool))
    if attn_mask is not None and attn_mask.dtype == mindspore.bool_:
        scores = scores.masked_fill(mint.logical_not(attn_mask), float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return matmul(safe_softmax(scores, -1), value)


def safe_softmax(input: Any, dim: int, dtype: Any = None) -> Any:
    """Softmax; zeros where every score is minus infinity, as of a query that may see no key."""
    input = input if dtype is None else input.astype(dtype)
    nothing = ops.stop_gradient(mint.amax(input, dim, keepdim=True)) == float("-inf")
    found = ops.softmax(input.masked_fill(nothing, 0.0), axis=dim)
    return found.masked_fill(nothing, 0.0)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": _attention,
    "_safe_softmax": safe_softmax,
}
