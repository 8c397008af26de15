# SPDX-License-Identifier: Apache-2.0
"""Calls of reductions."""

from math import inf

from rules.framework import IS_TORCH, detached, its, torch
from rules.operators import OpCase

R1, R2 = "...[-1]", "...[-2] ...[-1]"
ONE, TWO, ALL_DIMS = R2 + " {dim}", R1 + " {dim}[0] {dim}[1]", "{dim}[0] {dim}[1]"
ALL = ("even", "uneven", "empty")


def op(name, call, shapes, shards=None, carries=None, sizes=("uneven",), **more):
    return OpCase(name, call, shapes, shards, carries, sizes=sizes, **more)


CASES = [
    op("sum", torch.sum, "ab", ALL_DIMS, 2, ALL),
    op("sum of a scalar", lambda x: x.sum(0), ".", "", 2),
    op("sum over a dim", lambda x: x.sum(1), "abc", ONE, 2),
    op("sum over two", lambda x: torch.sum(x, (2, -3), keepdim=True), "abc", TWO, 2),
    op("sum over none named", lambda x: x.sum((), True), "ab", ALL_DIMS, 2),
    op(
        "sum by numpy's names",
        lambda x: torch.sum(x, axis=-1, keepdims=True),
        "ab",
        R1 + " {dim}",
        2,
    ),
    op("sum of ints", lambda x: x.sum(1), "ab", R1 + " {dim}", 0, ints={0: 9}),
    op(
        "sum of ints as floats",
        lambda x: x.sum(0, dtype=torch.float64),
        "ab",
        R1 + " {dim}",
        0,
        ints={0: 9},
    ),
    op("sum of bools", lambda x: x.sum(), "ab", ALL_DIMS, 0, bools=(0,)),
    op("prod", torch.prod, "ab", ALL_DIMS, 1),
    op("prod over a dim", lambda x: x.prod(1, keepdim=True), "abc", ONE, 1),
    op("mean", torch.mean, "ab", ALL_DIMS, 2, ALL),
    op("mean over a dim", lambda x: x.mean(-1, keepdim=True), "abc", ONE, 2),
    op("mean over two", lambda x: x.mean((0, 1)), "abc", TWO, 2),
    op(
        "mean of ints",
        lambda x: x.mean(0, dtype=torch.float64),
        "ab",
        R1 + " {dim}",
        0,
        ints={0: 9},
    ),
    op("nansum", lambda x: x.nansum(1), "ab", R1 + " {dim}", 0),
    op(
        "count_nonzero",
        lambda x: torch.count_nonzero(x, (0, 1)),
        "abc",
        TWO,
        0,
        ints={0: 2},
    ),
    op("count_nonzero of all", torch.count_nonzero, "ab", ALL_DIMS, 0, bools=(0,)),
    op("nanmean", lambda x: its(x).nanmean(1, keepdim=True), "abc", R2, 0),
    op("amax", lambda x: x.amax(1), "abc", R2, 0, ALL),
    op("amax of all", torch.amax, "ab", "", 0),
    op("amax over two", lambda x: its(x).amax((0, -1), keepdim=True), "abc", R1, 0),
    op("amax of ints", lambda x: x.amax(0), "ab", R1, 0, ints={0: 9}),
    op("amin", lambda x: x.amin(0, True), "ab", R1, 0),
    op("amin of bools", lambda x: its(x).amin(1), "ab", R1, 0, bools=(0,)),
    op("aminmax", torch.aminmax, "ab", "", 0),
    op(
        "aminmax over a dim",
        lambda x: torch.aminmax(x, dim=1, keepdim=True),
        "ab",
        R1,
        0,
    ),
    op("max of all", torch.max, "ab", "", 0),
    op("max over a dim", lambda x: torch.max(x, 1), "abc", R2, 0, ALL),
    op("max of ints", lambda x: x.max(0, keepdim=True), "ba", R1, 0, ints={0: 3}),
    op("max of two", torch.max, "ab b", R2, 0),
    op("min of all", lambda x: x.min(), "ab", "", 0),
    op("min over a dim", lambda x: x.min(dim=-1), "ab", R1, 0),
    op("min of two", lambda x, y: torch.min(x, other=y), "ab ab", R2, 0),
    op("argmax", torch.argmax, "ab", "", 0),
    op("argmax over a dim", lambda x: x.argmax(1, keepdim=True), "abc", R2, 0),
    op("argmin", lambda x: x.argmin(0), "ba", R1, 0, ints={0: 3}),
    op("all", torch.all, "ab", "", 0, bools=(0,)),
    op("all over a dim", lambda x: x.all(1), "abc", R2, 0, ints={0: 5}),
    # MindSpore takes none for all, which go in stages.
    op(
        "all over none",
        lambda x: x.all(()),
        "ab",
        R2 if IS_TORCH else "",
        0,
        ints={0: 2},
    ),
    op("any", lambda x: x.any(), "ab", "", 0, bools=(0,)),
    op(
        "any over two",
        lambda x: torch.any(x, (0, 1), keepdim=True),
        "abc",
        R1,
        0,
        bools=(0,),
    ),
    op("logsumexp", lambda x: x.logsumexp(1), "abc", R2, 0),
    op(
        "logsumexp over two",
        lambda x: torch.logsumexp(x, (0, 2), keepdim=True),
        "abc",
        R1,
        0,
    ),
    op("var", torch.var, "ab", "", 0),
    op(
        "var over a dim",
        lambda x: its(x).var(1, unbiased=False, keepdim=True),
        "abc",
        R2,
        0,
    ),
    op("var of the population", lambda x: its(x).var(False), "ab", "", 0),
    op("std", lambda x: x.std(dim=(0, 2)), "abc", R1, 0),
    op(
        "std corrected",
        lambda x: torch.std(x, dim=0, correction=2, keepdim=True),
        "ba",
        R1,
        0,
    ),
    op("var_mean", lambda x: torch.var_mean(x, 1), "ab", R1, 0),
    op(
        "std_mean",
        lambda x: torch.std_mean(x, dim=0, correction=0, keepdim=True),
        "ab",
        R1,
        0,
    ),
    op("vector_norm", torch.linalg.vector_norm, "ab", "", 0),
    op(
        "vector_norm over a dim",
        lambda x: torch.linalg.vector_norm(x, 3.0, 1, keepdim=True),
        "abc",
        R2,
        0,
        ALL,
    ),
    op("vector_norm 1", lambda x: torch.linalg.vector_norm(x, 1, (0, 1)), "abc", R1, 0),
    op(
        "vector_norm 0.5",
        lambda x: torch.linalg.vector_norm(x, 0.5, dim=0),
        "ab",
        R1,
        0,
    ),
    op("vector_norm -1", lambda x: torch.linalg.vector_norm(x, -1.0, 0), "ab", R1, 0),
    op("vector_norm inf", lambda x: torch.linalg.vector_norm(x, inf, 1), "ab", R1, 0),
    op("vector_norm -inf", lambda x: torch.linalg.vector_norm(x, -inf), "ab", "", 0),
    op("norm", torch.norm, "ab", "", 0),
    op("norm over two", lambda x: x.norm(dim=(0, 1), keepdim=True), "abc", R1, 0),
    op("norm 1", lambda x: x.norm(1, -1), "ab", R1, 0),
    op("norm nuclear", lambda x: torch.norm(x, "nuc", (1, 2)), "abc", R1, 0),
    op("linalg.norm", torch.linalg.norm, "abc", "", 0),
    op("linalg.norm of rows", lambda x: torch.linalg.norm(x, 1, 0), "ab", R1, 0),
    op("linalg.norm of a matrix", lambda x: torch.linalg.norm(x, 1), "ab", "", 0),
    op("matrix_norm", torch.linalg.matrix_norm, "abc", R1, 0),
    op("matrix_norm 1", lambda x: torch.linalg.matrix_norm(x, 1), "abc", R1, 0),
    op("cumsum", lambda x: x.cumsum(1), "abc", R2, 2),
    op("cumprod", lambda x: torch.cumprod(x, dim=0), "ab", R1, 0),
    op("cummax", lambda x: x.cummax(0), "ab", R1, 0),
    op("cummin", lambda x: x.cummin(-1), "ab", R1, 0),
    op("logcumsumexp", lambda x: x.logcumsumexp(1), "ab", R1, 0),
    op("median", torch.median, "ab", "", 0),
    op("median over a dim", lambda x: x.median(1, keepdim=True), "abc", R2, 0),
    op("nanmedian", lambda x: x.nanmedian(0), "ab", R1, 0),
    op("mode", lambda x: x.mode(), "ab", R1, 0, ints={0: 2}),
    op("kthvalue", lambda x: its(x).kthvalue(2, 0), "ab", R1, 0),
    op("quantile", lambda x: its(x).quantile(0.3, 1), "abc", R2, 0),
]


def ties(x, z):
    """The values of z with the gradient of x."""
    return x - detached(x) + z.to(torch.float64)


COMPOSITES = [
    op("sum that rounds", lambda x: detached(x).sum(0, dtype=torch.int32), "ab"),
    op("cumsum that rounds", lambda x: detached(x).cumsum(0, dtype=torch.int32), "ab"),
    op("dist", lambda x, y: torch.dist(x, y, 3.0), "ab b"),
    op("amax of ties", lambda x, z: torch.amax(ties(x, z), 0), "cb cb", ints={1: 3}),
    op(
        "amin of ties",
        lambda x, z: torch.amin(ties(x, z), (0, 1), keepdim=True),
        "abc abc",
        ints={1: 3},
    ),
    op("max of ties", lambda x, z: ties(x, z).max(), "ab ab", ints={1: 3}),
    op("max of ties over a dim", lambda x, z: ties(x, z).max(0), "cb cb", ints={1: 3}),
    op(
        "vector_norm inf of ties",
        lambda x, z: torch.linalg.vector_norm(ties(x, z), inf),
        "ab ab",
        ints={1: 3},
    ),
    op(
        "vector_norm of zeros",
        lambda x, z: torch.linalg.vector_norm(ties(x, z), dim=0),
        "ca ca",
        ints={1: 2},
    ),
    op(
        "vector_norm 0",
        lambda z: torch.linalg.vector_norm(z.to(torch.float64), 0, 0),
        "abc",
        ints={0: 3},
    ),
    op(
        "vector_norm wide",
        lambda z: torch.linalg.vector_norm(z.to(torch.float32), dtype=torch.float64),
        "ab",
        ints={0: 9},
    ),
    op("std of what is alike", lambda x, z: ties(x, z).std(0), "ca ca", ints={1: 1}),
    op(
        "quantiles",
        lambda x, q: its(x).quantile(q / 2, 1, keepdim=True),
        "abc 3",
        positive=(1,),
    ),
    op(
        "quantiles of all",
        lambda x, q: torch.quantile(x, q / 2, interpolation="nearest"),
        "ab 3",
        positive=(1,),
    ),
]
