# SPDX-License-Identifier: Apache-2.0
"""Calls of products."""

import warnings

from rules.framework import F, torch
from rules.operators import OpCase

R1, R2 = "...[-1]", "...[-2] ...[-1]"
ALL = ("even", "uneven", "empty")


def op(name, call, shapes, shards=None, carries=None, sizes=("uneven",), **more):
    return OpCase(name, call, shapes, shards, carries, sizes=sizes, **more)


def chain_matmul(*matrices):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # multi_dot is the name for it now
        return torch.chain_matmul(*matrices)


CASES = [
    op("linear", F.linear, "abc bc b", R2 + " k n", 4, ALL),
    op("linear of a row", F.linear, "c bc b", "k n", 4),
    op("linear without bias", F.linear, "ab cb", R1 + " k n", 4),
    op("mm", torch.mm, "ab bc", "m k n", 4, ALL),
    op("bmm", torch.bmm, "abc acb", "b m k n", 4),
    op("mv", torch.mv, "ab b", "m k", 4),
    op("dot", torch.dot, "b b", "k", 4),
    op("vdot", torch.vdot, "b b", "k", 4),
    op("outer", torch.outer, "a b", "m n", 4),
    op("matmul of vectors", torch.matmul, "b b", "k", 4),
    op("matmul of a row", lambda x, y: x @ y, "b abc", R1 + " k n", 4),
    op("matmul of a column", lambda x, y: x @ y, "abc c", R1 + " m k", 4),
    op("matmul", lambda x, y: x.matmul(y), "ab bc", "m k n", 4),
    op("matmul of batches", torch.matmul, "abc acb", R1 + " m k n", 4),
    op("matmul with one matrix", torch.matmul, "abc cb", R1 + " m k n", 4),
    op("matmul broadcast", torch.matmul, "a1bc bca", R2 + " m k n", 4, ALL),
    op("rmatmul", lambda x, y: x.__rmatmul__(y), "bc ab", "m k n", 4),
    op("rmatmul of a row", lambda x, y: x.__rmatmul__(y), "bc b", "k n", 4),
    op("inner", torch.inner, "abc ac", "l0 l1 r0 k", 4),
    op("inner by a scalar", torch.inner, "ab .", R2, 4),
    op(
        "addmm",
        lambda x, y, z: torch.addmm(x, y, z, beta=0.5, alpha=-2),
        "ac ab bc",
        "m n k",
        4,
    ),
    op("addmm of a row", torch.addmm, "c ab bc", "m n k", 4),
    op(
        "addmm without what is added",
        lambda x, y, z: torch.addmm(x, y, z, beta=0),
        "ac ab bc",
        "m n k",
        4,
    ),
    op(
        "addmv",
        lambda x, y, z: torch.addmv(x, y, z, beta=2, alpha=3),
        "a ab b",
        "m k",
        4,
    ),
    op(
        "addr", lambda x, y, z: torch.addr(x, y, z, beta=2, alpha=3), "ab a b", "m n", 4
    ),
    op(
        "addbmm",
        lambda x, y, z: torch.addbmm(x, y, z, beta=2, alpha=3),
        "bb abc acb",
        "m n b k",
        4,
        ALL,
    ),
    op(
        "baddbmm",
        lambda x, y, z: torch.baddbmm(x, y, z, beta=2, alpha=3),
        "a1b abc acb",
        "b n m k",
        4,
    ),
    op("bilinear", F.bilinear, "ab ac bbc b", R1 + " o", 6),
    op("tensordot", torch.tensordot, "abc bca", "l0 r2 k0 k1", 4),
    op(
        "tensordot over dims",
        lambda x, y: torch.tensordot(x, y, ([2, 0], [-1, 1])),
        "abc bac",
        "l1 r0 k0 k1",
        4,
    ),
    op(
        "tensordot over none",
        lambda x, y: torch.tensordot(x, y, dims=0),
        "ab c",
        "l0 l1 r0",
        4,
    ),
    op(
        "tensordot broadcast",
        lambda x, y: torch.tensordot(x, y, ([1], [0])),
        "a1 bc",
        "l0 r1 k0",
        4,
    ),
    op("multi_dot", lambda *x: torch.linalg.multi_dot(x), "ab bc ca", "k0 k1 k2 k3", 6),
    op(
        "multi_dot of vectors",
        lambda *x: torch.linalg.multi_dot(x),
        "a ab b",
        "k1 k2",
        6,
    ),
    op("ij,jk->ik", lambda *x: torch.einsum("ij,jk->ik", *x), "ab bc", "i j k", 4),
    op("ij,jk", lambda *x: torch.einsum("ij,jk", list(x)), "ab bc", "i j k", 4),
    op("ijk->ki", lambda x: torch.einsum("ijk->ki", x), "abc", "i j k", 2),
    op("i,ij,j->", lambda *x: torch.einsum("i,ij,j->", *x), "a ab b", "i j", 6, ALL),
    op("ii->i", lambda x: torch.einsum("ii->i", x), "bb", "", 2),
    op(
        "...ij,jk broadcast",
        lambda *x: torch.einsum("b...ij,bjk->b...ik", *x),
        "12ac acb",
        "b i j k " + R1,
        4,
    ),
]

COMPOSITES = [op("chain_matmul", chain_matmul, "ab bc ca")]
