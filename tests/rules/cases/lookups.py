# SPDX-License-Identifier: Apache-2.0
"""Calls that read tables by indices."""

from rules.framework import F, its, torch
from rules.operators import OpCase

R1, R2 = "...[-1]", "...[-2] ...[-1]"


def op(name, call, shapes, shards=None, carries=None, sizes=("uneven",), **more):
    return OpCase(name, call, shapes, shards, carries, sizes=sizes, **more)


CASES = [
    op(
        "embedding",
        F.embedding,
        "ab ca",
        R2 + " v d",
        2,
        ("even", "uneven", "empty"),
        ints={0: "c"},
    ),
    op(
        "embedding, padding",
        lambda i, w: F.embedding(i, w, padding_idx=1),
        "bb 3a",
        R2 + " v d",
        2,
        ints={0: 3},
    ),
    op(
        "embedding, last as padding",
        lambda i, w: F.embedding(i, w, -1),
        "9 5a",
        R1 + " v d",
        2,
        ints={0: 5},
    ),
    op("embedding of one index", F.embedding, ". ca", "v d", 2, ints={0: "c"}),
    op(
        "index_select",
        lambda x, i: x.index_select(1, i),
        "abc 6",
        R2 + " v j",
        2,
        ints={1: "b"},
    ),
    op(
        "index_select of the last",
        lambda x, i: torch.index_select(x, -1, i),
        "ab 5",
        "...[-1] v j",
        2,
        ints={1: "b"},
    ),
    op(
        "index_select of booleans",
        lambda x, i: x.index_select(0, i),
        "ab 5",
        R1 + " j",
        0,
        bools=(0,),
        ints={1: "a"},
    ),
    op("gather", lambda x, i: x.gather(1, i), "abc a6c", "d0 v d2 j", 2, ints={1: "b"}),
    op(
        "gather, less of it",
        lambda x, i: torch.gather(x, 0, i, sparse_grad=False),
        "ab 32",
        "v j",
        2,
        ints={1: "a"},
    ),
    op("one_hot", lambda x: F.one_hot(x, 5), "ab", R2, 0, ints={0: 5}),
    op(
        "one_hot of one", lambda x: F.one_hot(x, num_classes=4), ".", "", 0, ints={0: 4}
    ),
    op("bucketize", lambda x, b: torch.bucketize(x, b, right=True), "ab 4", R2, 0),
    op(
        "searchsorted",
        lambda s, x: torch.searchsorted(s, x, side="right"),
        "4 ab",
        R2,
        0,
    ),
    op("searchsorted in rows", torch.searchsorted, "a4 ab", R1 + " m", 0),
]

COMPOSITES = [
    op(
        "index_select of integers",
        lambda x, i: x.index_select(0, i),
        "ab 5",
        ints={0: 9, 1: "a"},
    ),
    op(
        "embedding of torch",
        lambda i, w: torch.embedding(w, i, 2),
        "ab 4a",
        ints={0: 4},
    ),
    op("take", torch.take, "ab c3", ints={1: 9}),
    op("take from the end", lambda x, i: x.take(i - 4), "ab c", ints={1: 4}),
    op(
        "take_along_dim",
        lambda x, i: torch.take_along_dim(x, i, 1),
        "ab a3",
        ints={1: "b"},
    ),
    op(
        "take_along_dim, stretched",
        lambda x, i: its(x).take_along_dim(i, dim=-1),
        "ab 14",
        ints={1: "b"},
    ),
    op("take_along_dim of all", torch.take_along_dim, "ab c", ints={1: 9}),
    op(
        "take_along_dim from the end",
        lambda x, i: torch.take_along_dim(x, i - 5, 1),
        "ab a3",
        ints={1: 5},
    ),
]
