# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002 - operands have the names that the rules give them
"""Operators on tensors without elements, where MindSpore's kernels leave the result unset, or end the process.

A shard may be empty, and its sum is zero. Where an operand is empty, a few operators have a function here, those that
look at each element by itself or at none do what they always do, and for all others only the shape of the result is
asked for: it is empty too, or it is an error. Backward does not run kernels there either: what is empty gives its
operands a gradient of zeros. It does run, though: other ranks communicate in it, and wait for this one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.common.device import DeviceCtx

from hyper_parallel.platform.containers import leaves, tree_map
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.mindspore import private

Function: Any = private.function()


def has_empty(args: Sequence[Any]) -> bool:
    """Whether some tensor among the arguments has no elements."""
    return any(
        0 in arg.shape
        if isinstance(arg, Tensor)
        else isinstance(arg, (list, tuple)) and has_empty(arg)
        for arg in args
    )


def filled(shape: Sequence[int], value: float, dtype: Any) -> Any:
    """A tensor of one value; of no elements, an empty one."""
    return ops.full(tuple(shape), value, dtype=dtype)


def _reduction(identity: float, *, counts: bool = False) -> Callable[..., Any]:
    """``counts``: integers and booleans add up to the longest integers."""

    def reduce(
        input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None
    ) -> Any:
        ndim = len(input.shape)
        given = (dim,) if isinstance(dim, int) else dim or range(ndim)
        dims = {d % max(ndim, 1) for d in given}
        kept = [
            1 if d in dims else size
            for d, size in enumerate(input.shape)
            if keepdim or d not in dims
        ]
        longest = mindspore.int64 if counts and not has_gradient(input) else input.dtype
        return filled(kept, identity, dtype or longest)

    return reduce


def _found(
    input: Any, dim: Any = None, keepdim: bool = False, other: Any = None
) -> Any:
    """The extremes along a dim that has some elements, and their places: there are none of both. Or those of two."""
    other = dim if isinstance(dim, Tensor) else other
    if other is not None:
        return filled(_broadcast(input.shape, other.shape), 0, input.dtype)
    if dim is None:
        raise ValueError(f"max, min: shape {tuple(input.shape)} has no elements")
    if not input.shape[dim]:
        raise ValueError(
            f"max, min: dim {dim} of shape {tuple(input.shape)} has no elements"
        )
    values = _reduction(0)(input, dim, keepdim)
    return values, filled(values.shape, 0, mindspore.int64)


def _place(dtype: Any) -> Callable[..., Any]:
    """The place of an extreme along a dim that has some elements, of which there is none."""

    def find(input: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None or not input.shape[dim]:
            raise ValueError(
                f"argmax, argmin: shape {tuple(input.shape)} has no elements along dim {dim}"
            )
        return _reduction(0)(input, dim, keepdim, dtype)

    return find


def _item(input: Any, index: Any) -> Any:
    held = np.broadcast_to(np.zeros((), bool), input.shape)  # of any size, in no memory
    plain = tree_map(
        lambda one: one.asnumpy() if isinstance(one, Tensor) else one, index
    )
    return filled(held[plain].shape, 0, input.dtype)


def _put_nothing(input: Any, index: Any, value: Any) -> Any:  # noqa: ARG001 - nowhere
    return (
        keep_in_graph(input.copy(), [value])
        if isinstance(value, Tensor) and private.requires_grad(value)
        else input
    )


def _narrow(input: Any, dim: int, start: int, length: int) -> Any:
    return _item(
        input,
        (slice(None),) * (dim % len(input.shape)) + (slice(start, start + length),),
    )


def _split(input: Any, split_size: Any, dim: int = 0) -> Any:
    whole = input.shape[dim]
    if isinstance(split_size, int):
        split_size = (
            [min(split_size, whole - at) for at in range(0, whole, split_size)]
            if whole
            else [0]
        )
    starts = itertools.accumulate(split_size, initial=0)
    return tuple(
        _narrow(input, dim, start, size)
        for start, size in zip(starts, split_size, strict=False)
    )


def _one_hot(input: Any, num_classes: int = -1) -> Any:
    return filled((*input.shape, num_classes), 0, mindspore.int64)


def _scattered(input: Any, *_: Any, **__: Any) -> Any:  # nothing is put anywhere
    return input.copy()


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
    pairs = zip(
        (1,) * (longer - len(one)) + tuple(one),
        (1,) * (longer - len(other)) + tuple(other),
        strict=True,
    )
    return tuple(b if a == 1 else a for a, b in pairs)


# Views, and operators that look at each element by itself: their kernels have nothing to do.
FINE = frozenset(
    """
    Abs Add AddExt AddScalar BroadcastTo BroadcastToView Cast Ceil ChunkView ClampScalar Concat Copy Cos
    DiagonalView Div Divs EqScalar Equal Erf Exp ExpandAs ExpandDims ExpandDimsView Expm1 FlattenExt Floor FloorDiv
    Greater GreaterEqual GreaterEqualScalar GreaterScalar IsFinite IsInf IsNan Less LessEqual LessEqualScalar LessScalar
    Log Log1p LogicalAnd LogicalNot LogicalOr MaskedFill MaskedFillScalar MaskedFillTensor Mul Muls NarrowView NeScalar
    Neg NotEqual Pow PowScalarTensor PowTensorScalar ReLU
    Reciprocal Reshape Rsqrt Select SiLU Sigmoid Sign Sin SplitTensorView SplitWithSizeView Sqrt Square Squeeze
    StopGradient Sub SubExt SubScalar TExt Tanh ToDtype Transpose TransposeExtView TransposeView View
    """.split()  # noqa: SIM905 - a list of so many would take a page
)


# Their results owe nothing to what the operand holds: nobody's backward leads through them.
_CONSTANT = frozenset(
    """
    FullLike OnesLike OnesLikeExt RandLikeExt RandnLike StopGradient ZerosLike ZerosLikeExt detach empty_like full_like
    ones_like rand_like randn_like stop_gradient zeros_like
    """.split()  # noqa: SIM905 - like the one above
)


def run(
    name: str,
    usual: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    is_fine: bool,
) -> Any:
    """What an operator gives, whether its operands and results have elements or not."""
    given = (*args, *kwargs.values()) if kwargs else args
    is_empty = has_empty(given)
    if is_empty and name in ON_EMPTY:
        return _settled(name, ON_EMPTY[name](*args, **kwargs), given)
    if is_fine or not is_empty:
        found = usual(*args, **kwargs)
        return _settled(name, found, given) if _lacks_elements(found) else found
    with DeviceCtx("meta"):
        found = usual(
            *tree_map(_on_meta, tuple(args)), **tree_map(_on_meta, dict(kwargs))
        )
    return _settled(name, tree_map(lambda value: _off_meta(name, value), found), given)


def _lacks_elements(found: Any) -> bool:
    return (
        0 in found.shape
        if isinstance(found, Tensor)
        else isinstance(found, (tuple, list)) and has_empty(found)
    )


class _Tied(Function):
    """A result, as if made from operands to which its gradient does not go."""

    @staticmethod
    def forward(ctx: Any, result: Any, *operands: Any) -> Any:
        ctx.operands = [(x.shape, x.dtype) for x in operands]
        return result.copy()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return (grad, *(filled(shape, 0, dtype) for shape, dtype in ctx.operands))


def keep_in_graph(result: Any, operands: Sequence[Any]) -> Any:
    """The result, recorded as made from all of the operands, which get zeros from it."""
    operands = [getattr(x, "_plain", x) for x in operands if has_gradient(x)]
    return (
        _Tied.apply(result, *operands) if operands and has_gradient(result) else result
    )


def _settled(name: str, found: Any, args: Sequence[Any]) -> Any:
    """The results, of which the operands get zeros as gradients wherever they are empty or owe nothing to them."""
    operands = [x for x in leaves(tuple(args)) if isinstance(x, Tensor)]
    kind = next(
        (type(x) for x in operands if hasattr(x, "_plain")), None
    )  # one that is told of operators

    def settle(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        plain = getattr(value, "_plain", value)
        made = filled(value.shape, 0, value.dtype) if 0 in value.shape else plain
        made = made if name in _CONSTANT else keep_in_graph(made, operands)
        return made if kind is None else kind(made)

    return tree_map(settle, found)


def has_gradient(tensor: Any) -> bool:
    """Whether there is one of tensors of this dtype."""
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _on_meta(value: Any) -> Any:
    return (
        mint.empty(tuple(value.shape), dtype=value.dtype)
        if isinstance(value, Tensor)
        else value
    )


def _off_meta(name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if 0 not in value.shape:
        raise coded(
            NotImplementedError,
            "HP314",
            f"MindSpore's {name} is not known to be right where a shard is empty: its result has the shape "
            f"{tuple(value.shape)}; take a mesh that leaves every rank something of the tensor",
        )
    return filled(value.shape, 0, value.dtype)


# By the operator of MindSpore and by the name in the rules.
ON_EMPTY: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("SumExt", "sum"), _reduction(0, counts=True)),
    **dict.fromkeys(("MeanExt", "mean"), _reduction(math.nan)),
    **dict.fromkeys(("ProdExt", "prod"), _reduction(1, counts=True)),
    **dict.fromkeys(("Nansum", "nansum"), _reduction(0, counts=True)),
    **dict.fromkeys(("MaxDim", "MinDim", "max", "min"), _found),
    **dict.fromkeys(("ArgMaxExt", "argmax", "argmin"), _place(mindspore.int64)),
    "ArgMinExt": _place(mindspore.int32),  # as its kernel has it
    **dict.fromkeys(
        ("Digamma", "digamma"), lambda x: filled(x.shape, 0, x.dtype)
    ),  # which refuses the shape
    "getitem": _item,
    "setitem": _put_nothing,
    **dict.fromkeys(("Narrow", "NarrowView", "narrow"), _narrow),
    **dict.fromkeys(
        (
            "SplitTensor",
            "SplitTensorView",
            "SplitWithSize",
            "SplitWithSizeView",
            "split",
        ),
        _split,
    ),
    **dict.fromkeys(("OneHotExt", "one_hot"), _one_hot),
    **dict.fromkeys(("Scatter", "scatter", "ScatterAddExt", "scatter_add"), _scattered),
    **dict.fromkeys(
        (
            "MatMulExt",
            "BatchMatMulExt",
            "Mm",
            "Mv",
            "Dot",
            "matmul",
            "bmm",
            "mm",
            "mv",
            "dot",
        ),
        _matmul,
    ),
    **dict.fromkeys(("Dense", "linear"), _linear),
}
