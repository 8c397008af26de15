# SPDX-License-Identifier: Apache-2.0
"""Calls that join, split, copy and place elements."""

from rules.framework import F, its, torch
from rules.operators import OpCase

R1, R2 = "...[-1]", "...[-2] ...[-1]"


def op(name, call, shapes, shards=None, carries=None, sizes=("uneven",), **more):
    return OpCase(name, call, shapes, shards, carries, sizes=sizes, **more)


CASES = [
    op("cat", torch.cat, "[ab,cb]", R1, 5),
    op("cat along the last dim", lambda xs: torch.cat(xs, dim=-1), "[ab,ac,a1]", R1, 5),
    op("cat of one", lambda xs: torch.concat(xs, 1), "[abc]", R2, 5),
    op("cat of rows", lambda xs: torch.concatenate(xs, axis=0), "[a,0,b]", "", 5),
    op("stack", lambda xs: torch.stack(xs, 1), "[ab,ab]", R2, 5),
    op("stack scalars", torch.stack, "[.,.,.]", "", 5),
    op("split", lambda x: x.split(2, 1), "a6", R1, 5),
    op("split unevenly", lambda x: torch.split(x, 4), "9a", R1, 5),
    op("split by sizes", lambda x: torch.split(x, [1, 0, 5], dim=-1), "ba6", R2, 5),
    op("split_with_sizes", lambda x: its(x).split_with_sizes([2, 3]), "5a", R1, 5),
    op("split nothing", lambda x: x.split(2, 1), "a0", R1, 5),
    op("chunk", lambda x: x.chunk(4, 1), "a6", R1, 5),
    op("chunk nothing", lambda x: x.chunk(2, 0), "0a", R1, 5),
    op("tensor_split", lambda x: x.tensor_split(3, 1), "a7", R1, 5),
    op(
        "tensor_split at",
        lambda x: torch.tensor_split(x, (1, 4, 9), dim=0),
        "7a",
        R1,
        5,
    ),
    op("unbind", lambda x: x.unbind(1), "a3b", R2, 5),
    op("repeat", lambda x: its(x).repeat(1, 3), "ab", "d0", 5),
    op("repeat to more dims", lambda x: its(x).repeat((2, 1, 2, 1)), "a3c", "d0 d2", 5),
    op("repeat to nothing", lambda x: its(x).repeat(0, 1), "ab", "d1", 5),
    op("tile", lambda x: x.tile((2,)), "ab", "d0", 5),
    op("tile to more dims", lambda x: torch.tile(x, (3, 1, 1)), "ab", "d0 d1", 5),
    op("repeat_interleave", lambda x: x.repeat_interleave(2, 1), "ab", "d0 d1", 5),
    op(
        "repeat_interleave, told",
        lambda x: torch.repeat_interleave(x, 3, 0, output_size=12),
        "4b",
        "d0 d1",
        5,
    ),
    op("roll", lambda x: its(x).roll(1, 0), "ab", "d1", 5),
    op("roll two", lambda x: torch.roll(x, (1, -2), (0, 2)), "abc", "d1", 5),
    op("roll all", lambda x: its(x).roll(3), "ab", "", 5),
    op("flip", lambda x: its(x).flip(0, -1), "abc", "d1", 5),
    op("flip by a tuple", lambda x: torch.flip(x, (1,)), "ab", "d0", 5),
    op("fliplr", torch.fliplr, "ab", "d0", 5),
    op("flipud", torch.flipud, "ab", "d1", 5),
    op("rot90", lambda x: torch.rot90(x, 1, [0, 2]), "abc", "d1", 5),
    op("rot90 twice", lambda x: x.rot90(2, (1, 2)), "abc", "d0", 5),
    op("pad", lambda x: F.pad(x, (1, 2)), "ab", "d0", 5),
    op("pad two dims", lambda x: F.pad(x, (0, 0, 1, 0), value=0.0), "abc", "d0 d2", 5),
    op("pad by a value", lambda x: F.pad(x, (1, 1), "constant", 2.5), "ab", "d0", 0),
    op("pad by less", lambda x: F.pad(x, (-1, 0)), "ab", "d0", 5),
    op("pad reflect", lambda x: F.pad(x, (1, 2), mode="reflect"), "a34", "d0", 5),
    op("pad replicate", lambda x: F.pad(x, (1, 2), mode="replicate"), "34", "", 5),
    op(
        "pad circular",
        lambda x: F.pad(x, (1, 2, 0, 1), mode="circular"),
        "a234",
        "d0",
        5,
    ),
    op("tril", torch.tril, "abc", "...[-1] r c", 5),
    op("triu", lambda x: x.triu(diagonal=-1), "bc", "r c", 5),
    op("triu above", lambda x: torch.triu(x, 2), "cb", "r c", 5),
    op("diag", torch.diag, "a", "", 5),
    op("diag of a matrix", lambda x: its(x).diag(-1), "ab", "", 5),
    op("diag_embed", torch.diag_embed, "ab", "d0", 5),
    op("diag_embed between", lambda x: torch.diag_embed(x, 1, 0, 2), "abc", "d0 d1", 5),
]

COMPOSITES = [
    op("cat with an empty one", lambda xs: torch.cat(xs, 1), "[ab,0,ac]"),
    op("hstack", torch.hstack, "[ab,ac]"),
    op("hstack of rows", torch.hstack, "[a,b]"),
    op("vstack", torch.vstack, "[b,ab]"),
    op("dstack", torch.dstack, "[ab,ab]"),
    op("column_stack", torch.column_stack, "[a,ab]"),
    op("hsplit", lambda x: torch.hsplit(x, 2), "a6"),
    op("hsplit of a row", lambda x: torch.hsplit(x, [2, 3]), "a"),
    op("vsplit", lambda x: x.vsplit([1, 3]), "ab"),
    op("dsplit", lambda x: x.dsplit(2), "ab4"),
    op("reversed", reversed, "ab"),
    op("diagflat", lambda x: torch.diagflat(x, 1), "ab"),
    op("repeat_interleave of all", lambda x: x.repeat_interleave(3), "ab"),
]
