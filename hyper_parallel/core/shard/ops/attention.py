# SPDX-License-Identifier: Apache-2.0
"""Attention: batch, heads, queries and the dims of the values may be cut; every query sees all keys.

sdpa              "... s d!, ... t! d!, ... t! e -> ... s e"
grouped heads     "... (h g) s d!, ... h t! d!, ... h t! e -> ... (h g) s e"
causal            the same: a shard of the queries knows where it begins, and leaves out the keys that come later
dropout           the same on copies of a shard, others on other shards
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hyper_parallel.core.dtensor.random import seed_of_piece
from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.ops.staged_reductions import nothing
from hyper_parallel.core.shard.rule import Rule
from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform

platform = get_platform()


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    dropout_p: float,
    enable_gqa: bool,
    **_: Any,
) -> RuleForCall:
    heads, groups = ("(h g)", "h") if enable_gqa else ("", "")
    # A mask may lack the first dims, and has ones where it is the same for all.
    mask = f"... {heads} s t!" if attn_mask is None else _last(attn_mask, heads)
    of_value = (
        "e!" if dropout_p else "e"
    )  # what is dropped is the same for all dims of a value
    text = f"... {heads} s d!, ... {groups} t! d!, ... {groups} t! {of_value}, {mask} -> ... {heads} s {of_value}"
    return RuleForCall(
        Rule(text, linear=((2,),), broadcast="all"),
        operands=[query, key, value, attn_mask],
    )


def _last(mask: Any, heads: str) -> str:
    dims = [*([heads] if heads else []), "s", "t!"]
    ndim = len(mask.shape)
    return " ".join(["...", *dims] if ndim >= len(dims) else dims[len(dims) - ndim :])


def _attention_of_shard(
    here: ShardContext, query: Any, key: Any, value: Any, dropout_p: float, **more: Any
) -> Any:
    # A seed is drawn for an empty shard too: all generators stay in step.
    draws = (
        platform.seeded(seed_of_piece(here.plan.results[0], here.piece))
        if dropout_p
        else nullcontext()
    )
    if 0 in here.shape():
        return nothing(here, query, key, value, more["attn_mask"])
    if more["is_causal"] and here.is_cut("s"):
        start, stop = (
            here.offset("s"),
            min(here.offset("s") + here.size("s"), here.whole("t")),
        )
        key, value = key[..., :stop, :], value[..., :stop, :]
        seen = platform.ones(
            (here.size("s"), stop),
            dtype=platform.str_to_dtype("bool"),
            device=query.device,
        )
        more |= {"attn_mask": seen.tril(start), "is_causal": False}
    with draws, _alike_on_all_ranks(here, query, key, value):
        return here.function(query, key, value, dropout_p=dropout_p, **more)


def _alike_on_all_ranks(
    here: ShardContext, *operands: Any
) -> AbstractContextManager[Any]:
    """Where some rank has no query, what it returns can be differentiated twice; so that of the others must be."""
    is_empty = here.plan.results[0].is_empty_somewhere(here.plan.shapes[0])
    recorded = is_empty and any(map(platform.is_recorded, operands))
    return platform.attention_by_operators() if recorded else nullcontext()


def _attention_as_it_is(
    here: ShardContext, dropout_p: float, is_causal: bool, **_: Any
) -> Callable[..., Any] | None:
    """Where nothing is dropped and every query knows its place."""
    return None if dropout_p or (is_causal and here.is_cut("s")) else here.function


operator(
    "scaled_dot_product_attention",
    "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False",
    _attention,
    local=_attention_of_shard,
    ready=_attention_as_it_is,
    overridable=True,
)
