# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002 - operands have the names that the rules give them
"""Operators on tensors without elements, where MindSpore's kernels leave the result unset, or end the process.

A shard may be empty, and its sum is zero. Where an operand is empty, a few operators have a function here, those that
look at each element by itself or at none do what they always do, and for all others only the shape of the result is
asked for: it is empty too, or it is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mindspore
from mindspore import Tensor, mint, ops
from mindspore.common.device import DeviceCtx

from hyper_parallel.platform.containers import tree_map


def has_empty(args: Sequence[Any]) -> bool:
    """Whether some tensor among the arguments has no elements."""
    return any(
        0 in arg.shape if isinstance(arg, Tensor) else isinstance(arg, (list, tuple)) and has_empty(arg) for arg in args
    )


def filled(shape: Sequence[int], value: float, dtype: Any) -> Any:
    """A tensor of one value; of no elements, an empty one."""
    return ops.full(tuple(shape), value, dtype=dtype)


def _reduction(identity: float) -> Callable[..., Any]:
    def reduce(input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
        ndim = len(input.shape)
        given = range(ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
        dims = {d % max(ndim, 1) for d in given}
        kept = [1 if d in dims else size for d, size in enumerate(input.shape) if keepdim or d not in dims]
        return filled(kept, identity, dtype or input.dtype)

    return reduce


def _found(input: Any, dim: int, keepdim: bool = False) -> Any:
    """The extremes along a dim that has some elements, and their places: there are none of both."""
    if not input.shape[dim]:
        raise ValueError(f"max, min: dim {dim} of shape {tuple(input.shape)} has no elements")
    values = _reduction(0)(input, dim, keepdim)
    return values, filled(values.shape, 0, mindspore.int64)


def _matmul(input: Any, other: Any) -> Any:
    left, right = tuple(input.shape), tuple(other.shape)
    rows = left[-2:-1] if len(left) > 1 else ()
    columns = right[-1:] if len(right) > 1 else ()
    batches = _broadcast(left[:-2], right[:-2])
    return filled((*batches, *rows, *columns), 0, input.dtype)


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    made = filled((*input.shape[:-1], *weight.shape[:-1]), 0, input.dtype)
    return made if bias is None or 0 in made.shape else made + bias


def _broadcast(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    longer = max(len(one), len(other))
    pairs = zip((1,) * (longer - len(one)) + tuple(one), (1,) * (longer - len(other)) + tuple(other), strict=True)
    return tuple(b if a == 1 else a for a, b in pairs)


# Views, and operators that look at each element by itself: their kernels have nothing to do.
FINE = frozenset(
    """
    Abs Add AddExt AddScalar BroadcastTo BroadcastToView Cast Ceil ChunkView ClampScalar ClampTensor Concat Copy Cos
    DiagonalView Div Divs Equal Erf Exp ExpandAs ExpandDims ExpandDimsView Expm1 FlattenExt Floor FloorDiv Greater
    GreaterEqual IsFinite IsInf IsNan Less LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr MaskedFill
    MaskedFillScalar Maximum Minimum Mul Muls NarrowView Neg NotEqual Pow PowScalarTensor PowTensorScalar ReLU
    Reciprocal Reshape Rsqrt Select SiLU Sigmoid Sign Sin SplitTensorView SplitWithSizeView Sqrt Square Squeeze
    StopGradient Sub SubExt SubScalar TExt Tanh ToDtype Transpose TransposeExtView TransposeView View
    """.split()  # noqa: SIM905 - a list of so many would take a page
)


def run_on_empty(
    name: str, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, is_fine: bool
) -> Any:
    """What an operator gives when an operand is empty."""
    if name in ON_EMPTY:
        return ON_EMPTY[name](*args, **kwargs)
    if is_fine:
        return run(*args, **kwargs)
    with DeviceCtx("meta"):
        found = run(*tree_map(_on_meta, tuple(args)), **tree_map(_on_meta, dict(kwargs)))
    return tree_map(lambda value: _off_meta(name, value), found)


def _on_meta(value: Any) -> Any:
    return mint.empty(tuple(value.shape), dtype=value.dtype) if isinstance(value, Tensor) else value


def _off_meta(name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if 0 not in value.shape:
        raise NotImplementedError(
            f"MindSpore's {name} is not known to be right where a shard is empty: its result has the shape "
            f"{tuple(value.shape)}; take a mesh that leaves every rank something of the tensor"
        )
    return filled(value.shape, 0, value.dtype)


# By the operator of MindSpore and by the name in the rules.
ON_EMPTY: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("SumExt", "sum"), _reduction(0)),
    **dict.fromkeys(("MeanExt", "mean"), _reduction(math.nan)),
    **dict.fromkeys(("ProdExt", "prod"), _reduction(1)),
    **dict.fromkeys(("MaxDim", "MinDim", "max", "min"), _found),
    **dict.fromkeys(("MatMulExt", "BatchMatMulExt", "Mm", "Mv", "Dot", "matmul", "bmm", "mm", "mv", "dot"), _matmul),
    **dict.fromkeys(("Dense", "linear"), _linear),
}
