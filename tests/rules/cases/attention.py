# SPDX-License-Identifier: Apache-2.0
"""Calls of attention."""

from functools import partial

from rules.framework import F
from rules.operators import OpCase

R1, R2 = "...[-1]", "...[-2] ...[-1]"


def attend(*qkv, mask=None, **how):
    return F.scaled_dot_product_attention(
        *qkv, **({} if mask is None else {"attn_mask": mask}), **how
    )


def op(
    name, shapes, shards, sizes=("uneven",), carries=2, call=attend, bools=(), **how
):
    return OpCase(
        name, partial(call, **how), shapes, shards, carries, bools=bools, sizes=sizes
    )


def masked(q, k, v, mask, **how):
    return attend(q, k, v, mask=mask, **how)


CASES = [
    op("attention", "2ab3 2a53 2a54", R2 + " s e", ("even", "uneven")),
    op("attention of three dims", "ab3 a53 a53", R1 + " s e", scale=0.3),
    op("attention of two dims", "b3 53 5a", "s e"),
    op("attention of five dims", "22a33 22a43 22a43", "...[-3] ...[-2] ...[-1] s e"),
    op("attention, one batch for all", "2ab3 1a53 1a53", R2 + " s e"),
    op(
        "attention, causal",
        "2ab3 2ab3 2ab4",
        R2 + " s e",
        ("uneven", "empty"),
        is_causal=True,
    ),
    op("attention, causal, fewer keys", "2ac3 2a33 2a33", R2 + " s e", is_causal=True),
    op("attention, causal, more keys", "2a33 2ac3 2ac3", R2 + " s e", is_causal=True),
    op("attention, masked", "2ab3 2a53 2a53 b5", R2 + " s e", call=masked),
    op("attention, masked by heads", "2ab3 2a53 2a53 1ab5", R2 + " s e", call=masked),
    op(
        "attention, the same for all queries",
        "2ab3 2a53 2a53 2115",
        R2 + " s e",
        call=masked,
    ),
    op(
        "attention, permitted",
        "2ab3 2a53 2a53 2ab5",
        R2 + " s e",
        call=masked,
        bools=(3,),
    ),
    op(
        "attention, permitted by keys",
        "2ab3 2a53 2a53 2115",
        R2 + " s e",
        call=masked,
        bools=(3,),
    ),
    op("attention, by a row", "2ab3 2a53 2a53 15", R2 + " s e", call=masked),
    op(
        "attention, grouped",
        "28a3 2453 2454",
        R1 + " h s e",
        ("even",),
        enable_gqa=True,
    ),
    op(
        "attention, grouped unevenly",
        "29a3 2353 2353",
        R1 + " h s e",
        enable_gqa=True,
        is_causal=True,
    ),
    op("attention, one key head", "2ba3 2153 2153", R1 + " g s e", enable_gqa=True),
    op(
        "attention, grouped, masked",
        "28a3 2453 2453 18a5",
        R1 + " h s e",
        call=masked,
        enable_gqa=True,
    ),
    op(
        "attention, grouped, one mask",
        "28a3 2453 2453 21a5",
        R1 + " h s e",
        call=masked,
        enable_gqa=True,
    ),
    op(
        "attention, grouped, a mask of two dims",
        "28a3 2453 2453 a5",
        R1 + " h s e",
        call=masked,
        enable_gqa=True,
    ),
]
