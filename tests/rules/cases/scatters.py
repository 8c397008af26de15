# SPDX-License-Identifier: Apache-2.0
"""Calls that write by index."""

import warnings

from rules.cases.indexing import assigned
from rules.framework import detached, its, torch
from rules.operators import OpCase

R1 = "...[-1]"
ALL = ("even", "uneven", "empty")
KINDS = ("mean", "prod", "amax", "amin")


def op(name, call, shapes, shards=None, carries=None, sizes=("uneven",), **more):
    return OpCase(name, call, shapes, shards, carries, sizes=sizes, **more)


def reduce_rows(kind, include_self=True):
    def call(x, i, y):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it may change
            return torch.index_reduce(x, 0, i, y, kind, include_self=include_self)

    return call


def reduce_by(kind, include_self=True):
    return lambda x, i, y: its(x).scatter_reduce(
        0, i, y, reduce=kind, include_self=include_self
    )


CASES = [
    op(
        "index_put",
        lambda x, i, v: its(x).index_put((i,), v),
        "abc 3 3bc",
        "d1 d2",
        2,
        ints={1: 1},
    ),
    op(
        "index_put, added",
        lambda x, i, v: its(x).index_put((i,), v, True),
        "ab 34 b",
        "d1",
        2,
        ALL,
        ints={1: "a"},
    ),
    op(
        "index_put, two",
        lambda x, i, j, v: its(x).index_put((i, j), v),
        "abc 3 1 3c",
        "d2",
        2,
        ints={1: 1, 2: 1},
    ),
    op(
        "index_add",
        lambda x, i, y: its(x).index_add(1, i, y, alpha=2),
        "ab c ac",
        R1 + " j",
        2,
        ALL,
        ints={1: "b"},
    ),
    op(
        "index_add to rows",
        lambda x, i, y: torch.index_add(x, 0, i, y),
        "ab 9 9b",
        R1 + " j",
        2,
        ALL,
        ints={1: "a"},
    ),
    op(
        "index_fill",
        lambda x, i: its(x).index_fill(0, i, 2.5),
        "ab 2",
        R1,
        0,
        ALL,
        ints={1: "a"},
    ),
    op(
        "index_fill by zero",
        lambda x, i: torch.index_fill(x, 0, i, 0),
        "ab 2",
        R1,
        2,
        ints={1: "a"},
    ),
    op(
        "index_fill by a scalar",
        lambda x, i, v: its(x).index_fill(-1, i, v),
        "ab 2 .",
        R1,
        2,
        ints={1: "b"},
    ),
    op(
        "index_copy",
        lambda x, i, y: its(x).index_copy(0, i, y),
        "ab 1 1b",
        R1,
        2,
        ALL,
        ints={1: "a"},
    ),
    *[
        op(f"index_reduce, {k}", reduce_rows(k), "ab 9 9b", R1, 0, ALL, ints={1: "a"})
        for k in KINDS
    ],
    op(
        "index_reduce without itself",
        reduce_rows("prod", False),
        "ab 9 9b",
        R1,
        0,
        ints={1: "a"},
    ),
    op(
        "scatter",
        lambda x, i, y: its(x).scatter(1, i, y),
        "ab 31 31",
        "",
        2,
        ints={1: 3},
    ),
    op(
        "scatter alike",
        lambda x, i, y: its(x).scatter(1, i, y),
        "abc a1c a1c",
        "d0 d2",
        2,
        ints={1: "b"},
    ),
    op(
        "scatter a number",
        lambda x, i: its(x).scatter(1, i, 2.5),
        "ab a3",
        "d0",
        0,
        ALL,
        ints={1: 2},
    ),
    op(
        "scatter_add",
        lambda x, i, y: its(x).scatter_add(0, i, y),
        "ab 7b 7b",
        "d1 j",
        2,
        ALL,
        ints={1: 3},
    ),
    *[
        op(f"scatter_reduce, {k}", reduce_by(k), "ab 7b 7b", "d1", 0, ALL, ints={1: 3})
        for k in ("sum", *KINDS)
    ],
    op(
        "scatter_reduce without itself",
        reduce_by("prod", False),
        "ab 7b 7b",
        "d1",
        0,
        ints={1: 3},
    ),
    op(
        "select_scatter",
        lambda x, y: x.select_scatter(y, 1, -1),
        "abc ac",
        "...[-2] ...[-1]",
        5,
    ),
    op(
        "slice_scatter",
        lambda x, y: torch.slice_scatter(x, y, 1, 1, 4),
        "abc a3c",
        "...[-2] ...[-1]",
        5,
    ),
]


def masked(x, mask, y):
    return x.masked_scatter(mask, y)


COMPOSITES = [
    op(
        "scatter_add of more",
        lambda x, i, y: its(x).scatter_add(0, i, detached(y)),
        "ab 4b 7b",
        ints={1: 3},
    ),
    op(
        "scatter of less",
        lambda x, i, y: its(x).scatter(0, i, detached(y)),
        "ab 12 3b",
        ints={1: "a"},
    ),
    op(
        "index_put, from the end",
        lambda x, i, v: its(x).index_put((i - 1,), v, True),
        "ab 4 4b",
        ints={1: 2},
    ),
    op(
        "index_add_",
        assigned(lambda x, i, y: x.index_add_(0, i, y)),
        "ab 4 4b",
        ints={1: "a"},
    ),
    op(
        "index_put_",
        assigned(lambda x, i, y: x.index_put_((i,), y, accumulate=True)),
        "ab 4 4b",
        ints={1: "a"},
    ),
    op("scatter_", assigned(lambda x, i: x.scatter_(1, i, 2.5)), "ab a3", ints={1: 2}),
    op(
        "scatter by keywords",
        lambda x, i: its(x).scatter(dim=0, index=i, value=2.5),
        "ab 3b",
        ints={1: "a"},
    ),
    op(
        "scatter, added",
        lambda x, i: its(detached(x)).scatter(0, i, 2.5, reduce="add"),
        "ab 3b",
        ints={1: "a"},
    ),
    op(
        "index_add of a scalar",
        lambda x, i, y: its(x).index_add(0, i, y),
        ". 1 .",
        ints={1: 1},
    ),
    op(
        "index_add by a scalar",
        lambda x, i, y: its(x).index_add(1, i, y),
        "ab . a1",
        ints={1: "b"},
    ),
    op(
        "index_copy of scalars",
        lambda x, i, y: its(x).index_copy(0, i, y),
        ". . .",
        ints={1: 1},
    ),
    op(
        "index_put by a mask",
        lambda x, m, v: its(x).index_put((m,), v),
        "abc ab .",
        bools=(1,),
    ),
    op(
        "put",
        lambda x, i, y: its(x).put(i, y, accumulate=True),
        "ab c3 c3",
        sizes=ALL,
        ints={1: "a"},
    ),
    op(
        "put from the end",
        lambda x, i, y: torch.put(x, i - 2, y),
        "ab 1 1",
        ints={1: 4},
    ),
    op("masked_scatter", masked, "ab ab cc", sizes=("even", "uneven"), bools=(1,)),
    op("masked_scatter, stretched", masked, "ab b cc", bools=(1,)),
    op(
        "masked_scatter_",
        assigned(lambda x, m, y: x.masked_scatter_(m, y)),
        "ab a1 cc",
        bools=(1,),
    ),
]
