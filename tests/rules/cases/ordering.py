# SPDX-License-Identifier: Apache-2.0
"""Calls that put in order and that count."""

from rules.framework import detached, its, torch
from rules.operators import OpCase

R1, R2 = "...[-1]", "...[-2] ...[-1]"
ALL = ("even", "uneven", "empty")


def op(name, call, shapes, shards=None, carries=None, sizes=ALL, **more):
    return OpCase(name, call, shapes, shards, carries, sizes=sizes, **more)


CASES = [
    op("sort", torch.sort, "abc", R2, 0),
    op("sort, descending", lambda x: x.sort(1, True), "abc", R2, 0),
    op(
        "sort, stable",
        lambda x: torch.sort(x, stable=True, dim=0),
        "ab",
        R1,
        0,
        ints={0: 3},
    ),
    op("sort of a scalar", lambda x: its(x).sort(), ".", "", 0),
    op("sort of aten", lambda x: torch.ops.aten.sort.default(x, 0, True), "ab", R1, 0),
    op("argsort", lambda x: x.argsort(dim=0), "ab", R1, 0),
    op(
        "argsort, stable",
        lambda x: torch.argsort(x, dim=-1, descending=True, stable=True),
        "ab",
        R1,
        0,
        ints={0: 3},
    ),
    op("msort", torch.msort, "abc", R2, 0),
    op("msort of a scalar", torch.msort, ".", "", 0),
    op("topk", lambda x: x.topk(2), "ab", R1, 0),
    op(
        "topk, smallest",
        lambda x: torch.topk(x, k=1, dim=0, largest=False, sorted=True),
        "cab",
        R2,
        0,
    ),
    op("topk of none", lambda x: its(x).topk(0, 1), "abc", R2, 0),
    op("topk of a scalar", lambda x: its(x).topk(1), ".", "", 0),
]


def best(x, *args, **kwargs):
    """The values, and what the indices point to: which of several that are equal is found is not said."""
    values, indices = torch.topk(x, *args, **kwargs)
    return values, x.gather(kwargs.get("dim", -1), indices)


def spread(x):
    """Integers as values with gaps and ends, some of which are not numbers."""
    x = x.to(torch.float64)
    return (
        x.masked_fill(x == 1, float("nan"))
        .masked_fill(x == 2, float("-inf"))
        .masked_fill(x == 3, float("inf"))
    )


COMPOSITES = [
    op("topk of many", lambda x: best(x, 1, dim=0), "cb"),
    op("topk of many, smallest", lambda x: best(x, 2, dim=-1, largest=False), "a9"),
    op("topk of even pieces", lambda x: torch.topk(x, 2, dim=1), "ac", sizes=("even",)),
    op("topk of ties", lambda x: best(x, 2, dim=1), "ab", ints={0: 3}),
    op(
        "topk of what is no number",
        lambda x: spread(x).topk(1, 0)[0],
        "ca",
        ints={0: 5},
    ),
    op(
        "topk of no number, smallest",
        lambda x: spread(x).topk(2, 0, largest=False)[0],
        "8a",
        ints={0: 5},
    ),
    op("topk, not in order", lambda x: x.topk(2, 0, sorted=False)[0].sort(0)[0], "8b"),
    op("histc", lambda x: torch.histc(detached(x), 5), "ab"),
    op("histc between", lambda x: detached(x).histc(bins=4, min=-1, max=1.5), "abc"),
    op("histc of what is alike", lambda x: (detached(x) * 0 + 2).histc(4), "ab"),
    op("bincount", torch.bincount, "a", ints={0: 5}),
    op("bincount, longer", lambda x: x.bincount(minlength=9), "b", ints={0: 5}),
    op(
        "bincount, weighted",
        lambda x, w: torch.bincount(x, detached(w), 3),
        "b b",
        ints={0: 4},
    ),
    op("histogram", lambda x: torch.histogram(detached(x), 4), "ab"),
    op(
        "histogram in a range",
        lambda x: detached(x).histogram(3, range=(-1.0, 1.0)).hist,
        "abc",
    ),
    op(
        "histogram, weighted",
        lambda x, w: torch.histogram(detached(x), 4, weight=detached(w), density=True),
        "ab ab",
    ),
    op(
        "histogram with edges",
        lambda x, e: torch.histogram(detached(x), detached(e).sort()[0]),
        "ab 4",
    ),
]
