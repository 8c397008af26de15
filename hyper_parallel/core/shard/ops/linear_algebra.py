# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A001, A002, A006, N803 - operands have the names that torch gives them
"""Linear algebra: a matrix is whole, a batch of them may be cut, and so may the columns that a system is solved for.

inv   "... r! c! -> ... r! c!"       svd    "... r! c! -> ... r! k!, ... k!, ... k! c!" with k the smaller size
kron  "a b, c d -> (a c) (b d)"      solve  "... r! c!, ... r! n -> ... r! n", linear in the right side
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.ops.pointwise import is_inexact
from hyper_parallel.core.shard.ops.views import ints, moved
from hyper_parallel.core.shard.rule import Rule, einsum, reduction
from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import REDUCE_OPS

platform = get_platform()
call = platform.operator

# --- one matrix: r rows, c columns, k the smaller of both, p as many as rows, q as many as columns

MATRIX = "... r! c!"
SAME, NUMBER = f"{MATRIX} -> {MATRIX}", f"{MATRIX} -> ..."
PIVOTED, EIGEN = f"{SAME}, ... k!", f"{MATRIX} -> ... c!, {MATRIX}"
REDUCED_QR, FULL_QR = (
    f"{MATRIX} -> ... r! k!, ... k! c!",
    f"{MATRIX} -> ... r! p!, ... r! c!",
)
TABLE = [
    ("linalg_cholesky", "input, *, upper=False", SAME),
    ("cholesky cholesky_inverse", "input, upper=False", SAME),
    ("linalg_cholesky_ex", "input, *, upper=False, check_errors=False", f"{SAME}, ..."),
    ("linalg_inv", "A", SAME),
    ("linalg_inv_ex", "A, *, check_errors=False", f"{SAME}, ..."),
    ("inverse matrix_exp linalg_matrix_exp", "input", SAME),
    ("matrix_power linalg_matrix_power", "input, n", SAME),
    ("pinverse", "input, rcond=1e-15", f"{MATRIX} -> ... c! r!"),
    ("linalg_det", "A", NUMBER),
    ("det logdet", "input", NUMBER),
    ("linalg_slogdet", "A", f"{NUMBER}, ..."),
    ("slogdet", "input", f"{NUMBER}, ..."),
    ("linalg_cond", "input, p=None", NUMBER),
    ("linalg_lu_factor", "A, *, pivot=True", PIVOTED),
    ("linalg_lu_factor_ex", "A, *, pivot=True, check_errors=False", f"{PIVOTED}, ..."),
    ("linalg_ldl_factor", "input, *, hermitian=False", PIVOTED),
    (
        "linalg_ldl_factor_ex",
        "input, *, hermitian=False, check_errors=False",
        f"{PIVOTED}, ...",
    ),
    ("geqrf", "input", PIVOTED),
    ("linalg_eig", "input", EIGEN),
    ("linalg_eigh", "input, UPLO='L'", EIGEN),
    ("linalg_eigvals", "input", f"{MATRIX} -> ... c!"),
    ("linalg_eigvalsh", "input, UPLO='L'", f"{MATRIX} -> ... c!"),
    ("linalg_svdvals", "A, *, driver=None", f"{MATRIX} -> ... k!"),
]


def _of_matrix(text: str, matrix: Any, **settings: Any) -> RuleForCall | None:
    if len(matrix.shape) < 2:
        return None  # torch says what is wrong with it
    rows, columns = matrix.shape[-2:]
    return RuleForCall(
        Rule(text, **settings), {"k": min(rows, columns), "p": rows, "q": columns}
    )


def _first(text: str) -> Callable[..., Any]:
    def rule(**arguments: Any) -> Any:
        return _of_matrix(
            text, arguments["input"] if "input" in arguments else arguments["A"]
        )

    return rule


for _names, _parameters, _text in TABLE:
    operator(_names, _parameters, _first(_text))


def _lu(A: Any, pivot: bool) -> Any:
    return (
        _of_matrix(f"{MATRIX} -> ... r! p!, ... r! k!, ... k! c!", A) if pivot else None
    )


def _lu_of_old(input: Any, pivot: bool, get_infos: bool) -> Any:
    found = call("linalg_lu_factor_ex")(input, pivot=pivot, check_errors=not get_infos)
    return tuple(found) if get_infos else tuple(found)[:2]


def _lu_unpack(LU_data: Any, unpack_data: bool, unpack_pivots: bool, **_: Any) -> Any:
    """What is not asked for is an empty tensor, whatever the batch."""
    text = f"{MATRIX}, ... k! -> ... r! p!, ... r! k!, ... k! c!"
    return (
        _of_matrix(text, LU_data, broadcast="none")
        if unpack_data and unpack_pivots
        else None
    )


def _linalg_qr(A: Any, mode: str) -> Any:
    text = {"reduced": REDUCED_QR, "complete": FULL_QR}.get(mode)
    return _of_matrix(text, A) if text is not None else None


def _linalg_svd(A: Any, full_matrices: bool, **_: Any) -> Any:
    sizes = (
        "... r! p!, ... k!, ... q! c!"
        if full_matrices
        else "... r! k!, ... k!, ... k! c!"
    )
    return _of_matrix(f"{MATRIX} -> {sizes}", A)


def _svd(input: Any, some: bool, compute_uv: bool) -> Any:
    sizes = (
        "... r! k!, ... k!, ... c! k!"
        if some and compute_uv
        else "... r! p!, ... k!, ... c! q!"
    )
    return _of_matrix(f"{MATRIX} -> {sizes}", input)


def _with_tolerance(result: str) -> Callable[..., Any]:
    """A tolerance may be a tensor: one for each matrix."""

    def rule(input: Any, hermitian: bool, **tolerances: Any) -> Any:  # noqa: ARG001 - as it is called
        if len(input.shape) < 2:
            return None
        return RuleForCall(
            Rule(f"{MATRIX}, ..., ..., ... -> {result}"),
            operands=[input, *tolerances.values()],
        )

    return rule


operator("linalg_lu", "A, *, pivot=True", _lu)
operator("lu", "input, pivot=True, get_infos=False", handler=_lu_of_old)
operator(
    "lu_unpack", "LU_data, LU_pivots, unpack_data=True, unpack_pivots=True", _lu_unpack
)
operator("linalg_qr", "A, mode='reduced'", _linalg_qr)
operator(
    "qr",
    "input, some=True",
    lambda input, some: _of_matrix(REDUCED_QR if some else FULL_QR, input),
)
operator("linalg_svd", "A, full_matrices=True, *, driver=None", _linalg_svd)
operator("svd", "input, some=True, compute_uv=True", _svd)
operator(
    "linalg_pinv",
    "input, rcond=None, hermitian=False, *, atol=None, rtol=None",
    _with_tolerance("... c! r!"),
)
operator(
    "linalg_matrix_rank",
    "input, tol=None, hermitian=False, *, atol=None, rtol=None",
    _with_tolerance("..."),
)

# --- systems of equations: a column of the right side needs no other

COLUMNS, ROWS = "... r! n", "... n r!"


def _linear_in(number: int, text: str, broadcast: str = "rest") -> Rule:
    return Rule(text, linear=((number,),), broadcast=broadcast)


def _solve(name: str) -> Callable[..., Any]:
    def with_batch(A: Any, B: Any, **more: Any) -> Any:
        return call(name)(A, B.unsqueeze(0), **more)

    def rule(A: Any, B: Any, left: bool, **_: Any) -> Any:
        batch, several = tuple(A.shape[:-2]), len(A.shape) == len(B.shape) + 1
        are_vectors = len(B.shape) == 1 or (
            several and tuple(B.shape) == tuple(A.shape[:-1])
        )
        if several and not are_vectors:
            return with_batch  # or a shard of A may look as if B were a vector for each of its matrices
        right = "... r!" if are_vectors else COLUMNS if left else ROWS
        if name == "linalg_solve":
            return _linear_in(1, f"{MATRIX}, {right} -> {right}")
        # It says for each matrix of A how it went, not for each system.
        alike = len(B.shape) == 1 or batch == tuple(
            B.shape[: len(B.shape) - (1 if are_vectors else 2)]
        )
        return Rule(f"{MATRIX}, {right} -> {right}, ...") if alike else None

    return rule


def _either_side(number: int, left_side: str) -> Callable[..., Any]:
    """The rule for solving A X = B or X A = B, with B the operand of that number."""

    def rule(left: bool, **_: Any) -> Rule:
        right = COLUMNS if left else ROWS
        return _linear_in(number, f"{left_side}, {right} -> {right}")

    return rule


def _ormqr(left: bool, **_: Any) -> Rule:
    product = "... i! n" if left else "... n i!"
    return _linear_in(2, f"{MATRIX}, ... t!, {product} -> {product}", broadcast="none")


operator("linalg_solve", "A, B, *, left=True", _solve("linalg_solve"))
operator(
    "linalg_solve_ex",
    "A, B, *, left=True, check_errors=False",
    _solve("linalg_solve_ex"),
)
operator(
    "linalg_solve_triangular",
    "input, B, *, upper, left=True, unitriangular=False",
    _either_side(1, MATRIX),
)
operator(
    "linalg_lu_solve",
    "LU, pivots, B, *, left=True, adjoint=False",
    _either_side(2, f"{MATRIX}, ... r!"),
)
operator(
    "lu_solve",
    "input, LU_data, LU_pivots",
    _linear_in(0, f"{COLUMNS}, {MATRIX}, ... r! -> {COLUMNS}"),
)
operator(
    "linalg_ldl_solve",
    "LD, pivots, B, *, hermitian=False",
    _linear_in(2, f"{MATRIX}, ... r!, {COLUMNS} -> {COLUMNS}"),
)
operator(
    "cholesky_solve",
    "input, input2, upper=False",
    _linear_in(0, f"{COLUMNS}, {MATRIX} -> {COLUMNS}"),
)
operator(
    "triangular_solve",
    "input, A, upper=True, transpose=False, unitriangular=False",
    Rule(f"{COLUMNS}, {MATRIX} -> {COLUMNS}, {MATRIX}"),
)
operator(
    "orgqr", "input, input2", Rule(f"{MATRIX}, ... t! -> {MATRIX}", broadcast="none")
)
operator(
    "linalg_householder_product",
    "input, tau",
    Rule(f"{MATRIX}, ... t! -> {MATRIX}", broadcast="none"),
)
operator("ormqr", "input, input2, input3, left=True, transpose=False", _ormqr)


def _tensorinv(input: Any, ind: int) -> Any:
    shape = tuple(input.shape)
    flat = input.reshape((math.prod(shape[:ind]), -1))
    return call("inverse")(flat).reshape((*shape[ind:], *shape[:ind]))


def _tensorsolve(input: Any, other: Any, dims: Any) -> Any:
    if dims is not None:
        last = range(len(input.shape))[-len(ints(dims)) :]
        input = input.movedim(ints(dims), tuple(last))
    flat = input.reshape((math.prod(other.shape), -1))
    return call("linalg_solve")(flat, other.reshape(-1)).reshape(
        tuple(input.shape[len(other.shape) :])
    )


operator("linalg_tensorinv", "input, ind=2", handler=_tensorinv)
operator("linalg_tensorsolve", "input, other, dims=None", handler=_tensorsolve)

# --- products


def _cross(input: Any, other: Any, dim: Any) -> Any:  # noqa: ARG001 - an operand
    if dim is None:
        return _cross_of_three
    return einsum("... {dim}!, ... {dim}! -> ... {dim}!")


def _cross_of_three(input: Any, other: Any, **_: Any) -> Any:
    """The first dim of size three in the whole; a shard may have another one."""
    at = next((i for i, size in enumerate(input.shape) if size == 3), None)
    if at is None:
        raise RuntimeError("no dimension of size 3 in input")
    return call("cross")(input, other, at)


def _vecdot(x: Any, y: Any, dim: int) -> Any:
    if dim >= 0 and len(x.shape) != len(y.shape):
        return None
    return einsum("... {dim}, ... {dim} -> ...", broadcast="all")


def _kron(input: Any, other: Any) -> Rule:
    ndim = max(len(input.shape), len(other.shape))
    outer, inner = (
        {ndim - len(one.shape) + i: f"{letter}{i}" for i in range(len(one.shape))}
        for letter, one in (("a", input), ("b", other))
    )
    both = [
        f"({outer[i]} {inner[i]})" if i in outer and i in inner else (outer | inner)[i]
        for i in range(ndim)
    ]
    return einsum(
        f"{' '.join(outer.values())}, {' '.join(inner.values())} -> {' '.join(both)}",
        broadcast="none",
    )


def _trace(here: ShardContext, input: Any) -> Any:
    """The diagonal of the whole begins elsewhere in a shard."""
    return call("sum")(
        call("diagonal")(input, here.offset("r") - here.offset("c"), 0, 1)
    )


operator("cross", "input, other, dim=None", _cross)
operator("linalg_cross", "input, other, *, dim=-1", _cross)
operator("linalg_vecdot", "x, y, *, dim=-1", _vecdot)
operator("kron", "input, other", _kron)
operator("trace", "input", reduction("sum", "r c ->"), local=_trace)

# --- many from few


def _vander(x: Any, N: Any, **_: Any) -> Any:
    return (
        RuleForCall(
            Rule("... -> ... powers!"), {"powers": x.shape[-1] if N is None else N}
        )
        if x.shape
        else None
    )


def _vander_of_shard(here: ShardContext, x: Any, N: Any, **more: Any) -> Any:  # noqa: ARG001 - as it is called
    return here.function(x, N=here.whole("powers"), **more)


def _block_diag(input: Sequence[Any]) -> Any:
    texts = [
        " ".join([f"r{i}!", f"c{i}!"][2 - len(one.shape) :])
        for i, one in enumerate(input)
    ]
    shapes = [(1, 1, *one.shape)[-2:] for one in input]
    rule = Rule(
        f"{', '.join(texts)} -> rows! columns!",
        linear=(tuple(range(len(input))),),
        carries=REDUCE_OPS,
        broadcast="none",
    )
    rows, columns = (sum(sizes) for sizes in zip(*shapes, strict=True))
    return RuleForCall(rule, {"rows": rows, "columns": columns}, list(input))


def _cartesian_prod(input: Sequence[Any]) -> Any:
    if len(input) == 1:
        return input[0]
    grids = call("meshgrid")(*input, indexing="ij")
    return call("stack")([grid.reshape(-1) for grid in grids], 1)


def _combinations(input: Any, r: int, with_replacement: bool) -> Any:
    if len(input.shape) != 1 or r < 1:
        return None
    count = math.comb(input.shape[0] + (r - 1) * with_replacement, r)
    return moved(["all!"], ["chosen!", "each!"], chosen=count, each=r)


operator("vander", "x, N=None, increasing=False", _vander, local=_vander_of_shard)
operator("linalg_vander", "x, *, N=None", _vander, local=_vander_of_shard)
operator("block_diag", "*input", _block_diag)
operator("cartesian_prod", "*input", handler=_cartesian_prod)
operator("combinations", "input, r=2, with_replacement=False", _combinations)

# --- the largest singular values, from products with a few vectors that are drawn alike on every rank


def _svd_lowrank(A: Any, q: int | None, niter: int | None, M: Any) -> Any:
    matrix = (A if M is None else A - M).reduce_partial()
    is_wide = matrix.shape[-2] < matrix.shape[-1]
    matrix = matrix.mH if is_wide else matrix
    basis = _basis(matrix, 6 if q is None else q, 2 if niter is None else niter)
    left, values, right = call("linalg_svd")(basis.mH @ matrix, full_matrices=False)
    left, right = basis @ left, right.mH
    return (right, values, left) if is_wide else (left, values, right)


def _basis(matrix: Any, q: int, rounds: int) -> Any:
    """Columns that span about what the matrix maps to."""
    drawn = matrix.new_empty((matrix.shape[-1], q)).normal_()
    basis, _ = call("linalg_qr")(matrix @ drawn)
    for _ in range(rounds):
        across, _ = call("linalg_qr")(matrix.mH @ basis)
        basis, _ = call("linalg_qr")(matrix @ across)
    return basis


def _pca_lowrank(A: Any, q: int | None, center: bool, niter: int) -> Any:
    least = min(A.shape[-2:])
    if q is not None and not 0 <= q <= least:
        raise ValueError(
            f"q(={q}) must be non-negative integer and not greater than min(m, n)={least}"
        )
    if niter < 0:
        raise ValueError(f"niter(={niter}) must be non-negative integer")
    mean = call("mean")(A, -2, True) if center else None
    return _svd_lowrank(A, min(6, least) if q is None else q, niter, mean)


operator("svd_lowrank", "A, q=6, niter=2, M=None", handler=_svd_lowrank)
operator("pca_lowrank", "A, q=None, center=True, niter=2", handler=_pca_lowrank)

# --- how rows vary together


def _cov(input: Any, correction: int, fweights: Any, aweights: Any) -> Any:
    """From sums over the observations, which may be cut."""
    rows = input.reshape((1, -1)) if len(input.shape) < 2 else input
    rows = rows if is_inexact(rows.dtype) else rows.to(platform.str_to_dtype("float32"))
    weights = [one for one in (fweights, aweights) if one is not None]
    weight = math.prod(weights[1:], start=weights[0]) if weights else None
    count = rows.shape[1] if weight is None else _sum(weight)
    off = rows - _sum(rows if weight is None else rows * weight, 1, True) / count
    freedom = count - correction
    if aweights is not None and correction:
        freedom = count - _sum(weight * aweights) * correction / count
    freedom = max(0.0, freedom) if weight is None else freedom.clamp(min=0)
    found = call("matmul")(off, (off if weight is None else off * weight).mH) / freedom
    return found.reshape(()) if found.shape[0] == 1 else found


def _sum(input: Any, *dims: Any) -> Any:
    return call("sum")(input, *dims).reduce_partial()


def _corrcoef(input: Any) -> Any:
    is_complex = platform.dtype_kind(input.dtype) == "complex"
    return None if is_complex else _correlation


def _correlation(input: Any) -> Any:
    together = call("cov")(input).reduce_partial()
    if not together.shape:
        return together / together
    deviations = call("sqrt")(together.diagonal())
    return (together / deviations.unsqueeze(1) / deviations).clamp(-1, 1)


operator("cov", "input, *, correction=1, fweights=None, aweights=None", handler=_cov)
operator("corrcoef", "input", _corrcoef)
