# SPDX-License-Identifier: Apache-2.0
"""Calls of linear algebra."""

import functools
import warnings

from rules.cases.removed import unless_removed
from rules.framework import detached, its, torch
from rules.operators import OpCase

linalg = torch.linalg

R1, R2 = "...[-1]", "...[-2] ...[-1]"
ALL = ("even", "uneven", "empty")


def op(
    name, call, shapes, shards=None, carries=None, sizes=("uneven", "empty"), **more
):
    return OpCase(name, call, shapes, shards, carries, sizes=sizes, **more)


def old(call):
    """A call that torch advises against, once."""

    @functools.wraps(call)
    def quiet(*operands):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call(*operands)

    return quiet


def lone(name, call):
    """A call of one matrix that must have positive eigenvalues: of one element, in a batch."""
    return op(name, call, "ab11", R2, 0, positive=(0,))


CASES = [
    lone("cholesky", linalg.cholesky),
    *unless_removed(
        "cholesky", lone("cholesky of torch", old(lambda x: x.cholesky(True)))
    ),
    lone("cholesky_ex", lambda x: linalg.cholesky_ex(x, upper=True)),
    lone("cholesky_inverse", torch.cholesky_inverse),
    lone("logdet", torch.logdet),
    op("inv", linalg.inv, "a33", R1, 0, ALL),
    op("inv by its name", lambda x: linalg.inv(A=x), "33", "", 0),
    op("inverse", lambda x: x.inverse(), "ab22", R2, 0),
    op("inv_ex", linalg.inv_ex, "a33", R1, 0),
    op("matrix_exp", linalg.matrix_exp, "a33", R1, 0),
    op("matrix_exp of torch", torch.matrix_exp, "a22", R1, 0),
    op("matrix_power", lambda x: linalg.matrix_power(x, 3), "a33", R1, 0),
    op("matrix_power, inverted", lambda x: its(x).matrix_power(-2), "a33", R1, 0),
    op("det", linalg.det, "a33", R1, 0),
    op("det of torch", torch.det, "ab22", R2, 0),
    op("slogdet", linalg.slogdet, "a33", R1, 0),
    op("slogdet of torch", lambda x: x.slogdet(), "a33", R1, 0),
    op("cond", linalg.cond, "a34", R1, 0),
    op("eigh", linalg.eigh, "a33", R1, 0),
    op("eigvalsh", lambda x: linalg.eigvalsh(x, "U"), "a33", R1, 0),
    op("svd", lambda x: linalg.svd(x, full_matrices=False), "a34", R1, 0),
    op("svd of torch", torch.svd, "a43", R1, 0),
    op("svdvals", linalg.svdvals, "ab23", R2, 0),
    op("qr", linalg.qr, "a43", R1, 0),
    op("qr, complete", lambda x: linalg.qr(x, "complete"), "a33", R1, 0),
    *unless_removed("qr", op("qr of torch", old(torch.qr), "a33", R1, 0)),
    op("lu", linalg.lu, "a34", R1, 0),
    op("lu of high matrices", linalg.lu, "a43", R1, 0),
    op("lu_factor", linalg.lu_factor, "a43", R1, 0),
    op("lu_factor_ex", linalg.lu_factor_ex, "a33", R1, 0),
    op("pinv", linalg.pinv, "a34", R1, 0),
    op("pinv, cut off", lambda x: linalg.pinv(x, rtol=0.01), "a43", R1, 0),
    op("pinverse", lambda x: its(x).pinverse(), "a34", R1, 0),
    op("matrix_rank", linalg.matrix_rank, "a34", R1, 0),
    op("matrix_rank, cut off", lambda x: linalg.matrix_rank(x, 0.5), "a33", R1, 0),
    op("solve", linalg.solve, "a33 a3b", R1 + " n", 2, ALL),
    op(
        "solve from the right",
        lambda a, b: linalg.solve(a, b, left=False),
        "a33 ab3",
        R1 + " n",
        2,
    ),
    op("solve for a vector", linalg.solve, "33 3", "", 2),
    op("solve for vectors", linalg.solve, "ab33 ab3", R2, 2),
    op("solve for one vector", linalg.solve, "a33 3", R1, 2),
    op("solve one for many", linalg.solve, "33 a3b", R1 + " n", 2),
    op("solve_ex", linalg.solve_ex, "a33 a3b", R1, 0),
    op(
        "solve_triangular",
        lambda a, b: linalg.solve_triangular(a, b, upper=True),
        "a33 a3b",
        R1 + " n",
        2,
    ),
    op(
        "solve_triangular from the right",
        lambda a, b: linalg.solve_triangular(
            a, b, upper=False, left=False, unitriangular=True
        ),
        "33 ab3",
        R1 + " n",
        2,
    ),
    op(
        "triangular_solve",
        old(lambda b, a: torch.triangular_solve(b, a, transpose=True)),
        "a3b a33",
        R1,
        0,
    ),
    op("cholesky_solve", torch.cholesky_solve, "a3b a33", R1 + " n", 2),
    op("householder_product", linalg.householder_product, "a43 a3", R1, 0),
    op("vander in a batch", linalg.vander, "ab", R2, 0),
    op("vander of few", lambda x: linalg.vander(x, N=3), "ab", R2, 0),
    op("cross", linalg.cross, "ab3 ab3", R2, 4),
    op("cross along a dim", lambda x, y: torch.cross(x, y, dim=1), "a3b a3b", R2, 4),
    op("cross with one", lambda x, y: linalg.cross(x, y, dim=0), "3ab 31b", R2, 4),
    op("vecdot", linalg.vecdot, "abc abc", R2 + " {dim}", 4, ALL),
    op(
        "vecdot with one",
        lambda x, y: linalg.vecdot(x, y, dim=0),
        "ab a1",
        "{dim} ...[-1]",
        4,
    ),
    op("kron", torch.kron, "ab c3", "a0 a1", 4, ALL),
    op("kron of few dims", torch.kron, "a bc", "b0 a0", 4),
    op("trace", torch.trace, "ab", "r c", 2, ALL),
    op("trace of a high matrix", lambda x: x.trace(), "ba", "r c", 2),
    op("block_diag", torch.block_diag, "ab 3 . c2", "", 5),
    op("combinations", torch.combinations, "b", "", 5),
    op(
        "combinations, again and again",
        lambda x: torch.combinations(x, 3, with_replacement=True),
        "a",
        "",
        5,
    ),
]


def positive_definite(x):
    """Symmetric matrices with eigenvalues above one."""
    return x @ x.mT + torch.diag_embed(torch.ones_like(x[..., 0]))


COMPOSITES = [
    op("vander", lambda x: torch.vander(detached(x), increasing=True), "b"),
    op("vander of torch, few", lambda x: torch.vander(detached(x), 3), "b"),
    op("cond of a norm", lambda x: linalg.cond(detached(x), "fro"), "a33"),
    op(
        "pinv, cut off for each",
        lambda x, t: linalg.pinv(x, atol=detached(t)),
        "a33 a",
        positive=(1,),
    ),
    op(
        "matrix_rank, cut off for each",
        lambda x, t: linalg.matrix_rank(x, t, hermitian=True),
        "a33 a",
        positive=(1,),
    ),
    op("cholesky of matrices", lambda x: linalg.cholesky(positive_definite(x)), "a33"),
    op(
        "cholesky_ex of matrices",
        lambda x: linalg.cholesky_ex(positive_definite(x)),
        "a33",
    ),
    op(
        "cholesky_inverse of matrices",
        lambda x: torch.cholesky_inverse(linalg.cholesky(positive_definite(x))),
        "a33",
    ),
    op("logdet of matrices", lambda x: torch.logdet(positive_definite(x)), "a33"),
    op(
        "ldl_factor", lambda x: linalg.ldl_factor(detached(positive_definite(x))), "a33"
    ),
    op(
        "ldl_solve",
        lambda x, b: linalg.ldl_solve(
            *linalg.ldl_factor(detached(positive_definite(x))), detached(b)
        ),
        "a33 a3b",
    ),
    op("eig, absolute", lambda x: linalg.eig(x)[0].abs().sum(-1), "a33"),
    op("eigvals, absolute", lambda x: linalg.eigvals(x).abs().sum(-1), "a33"),
    op("svd, full", lambda x: linalg.svd(detached(x)), "a34"),
    op("svd of torch, full", lambda x: its(detached(x)).svd(some=False), "a43"),
    op("svd of torch, values", lambda x: x.svd(compute_uv=False)[1], "a43"),
    op("lu of torch", old(torch.lu), "a33"),
    op("lu of torch with how it went", old(lambda x: x.lu(get_infos=True)), "a33"),
    op("lu_unpack", lambda x: torch.lu_unpack(*linalg.lu_factor(x)), "a43"),
    op("lu_solve", lambda x, b: linalg.lu_solve(*linalg.lu_factor(x), b), "a33 a3b"),
    op(
        "lu_solve from the right",
        lambda x, b: linalg.lu_solve(*linalg.lu_factor(x), b, left=False),
        "a33 ab3",
    ),
    op(
        "lu_solve of torch", old(lambda x, b: b.lu_solve(*linalg.lu_factor(x))), "33 3b"
    ),
    op("solve for what may look like vectors", linalg.solve, "422 22"),
    op(
        "solve for what may look like vectors, left",
        lambda a, b: linalg.solve(a, b, left=False),
        "a33 73",
    ),
    op("geqrf", lambda x: torch.geqrf(detached(x)), "a43"),
    op(
        "ormqr",
        lambda x, c: torch.ormqr(*torch.geqrf(detached(x)), detached(c)),
        "a43 a4b",
    ),
    op(
        "ormqr from the right",
        lambda x, c: torch.ormqr(
            *torch.geqrf(detached(x)), detached(c), left=False, transpose=True
        ),
        "a43 ab4",
    ),
    op("orgqr", lambda x: torch.orgqr(*torch.geqrf(detached(x))), "a43"),
    op("cross of the first three", old(torch.cross), "63 63"),
    op("cross of the first three among many", old(torch.cross), "a3b a3b"),
    op("tensorinv", linalg.tensorinv, "2332"),
    op("tensorinv, other dims", lambda x: linalg.tensorinv(x, ind=1), "623"),
    op("tensorsolve", linalg.tensorsolve, "2332 23"),
    op(
        "tensorsolve, other dims",
        lambda a, b: linalg.tensorsolve(a, b, dims=(0,)),
        "623 23",
    ),
    op("cartesian_prod", torch.cartesian_prod, "a b 3"),
    op("cartesian_prod of one", torch.cartesian_prod, "a"),
    op("svd_lowrank", lambda x: torch.svd_lowrank(x, q=3)[1], "a37"),
    op(
        "svd_lowrank of a high matrix",
        lambda x, m: torch.svd_lowrank(x, 3, M=m)[1],
        "73 13",
    ),
    op("pca_lowrank", lambda x: torch.pca_lowrank(x, 2)[1], "a35"),
    op("cov", torch.cov, "ab", sizes=("even", "uneven")),
    op("cov of one row", lambda x: x.cov(correction=0), "b"),
    op(
        "cov, weighted",
        lambda x, f, w: x.cov(fweights=f + 1, aweights=w),
        "5b b b",
        ints={1: 4},
        positive=(2,),
    ),
    op(
        "cov of how often",
        lambda x, f: torch.cov(x, fweights=f + 1),
        "5b b",
        ints={1: 4},
    ),
    op(
        "cov of integers",
        lambda x: its(torch.cov(x).double()).round(decimals=3),
        "ab",
        ints={0: 9},
        sizes=("uneven",),
    ),
    op("corrcoef", torch.corrcoef, "ab", sizes=("even", "uneven")),
    op("corrcoef of one row", torch.corrcoef, "b"),
]
