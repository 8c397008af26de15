# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002, A006 - operands have the names that the rules give them
"""What MindSpore's operators are called in the rules, and how their arguments are named.

``mint.add``, ``ops.add``, ``Tensor.add`` and ``x + y`` arrive at a distributed tensor as the operators that they run:
``AddExt``, ``AddScalar`` or ``Add``. The table says for each what the rules call it. What is in no table runs on whole
tensors. The other way round, ``operator(name)`` gives a function that takes its arguments as the rules name them.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mindspore
from mindspore import Tensor, mint, ops
from mindspore.mint.nn import functional as F  # noqa: N812 - everyone's name for it

from hyper_parallel.platform.mindspore.empty import FINE, has_empty, run_on_empty
from hyper_parallel.platform.platform import Called, Platform

# The name in the rules; the operators of MindSpore; what each of their arguments is, in their order.
_TABLE = [
    # element by element
    ("abs", "Abs", "input"),
    ("acos", "ACos AcosExt", "input"),
    ("acosh", "Acosh AcoshExt", "input"),
    ("angle", "Angle", "input"),
    ("asin", "Asin AsinExt", "input"),
    ("asinh", "Asinh AsinhExt", "input"),
    ("atan", "Atan AtanExt", "input"),
    ("atanh", "Atanh", "input"),
    ("bitwise_not", "BitwiseNot", "input"),
    ("ceil", "Ceil", "input"),
    ("conj", "Conj", "input"),
    ("cos", "Cos", "input"),
    ("cosh", "Cosh", "input"),
    ("erf", "Erf", "input"),
    ("erfc", "Erfc", "input"),
    ("erfinv", "Erfinv", "input"),
    ("exp", "Exp", "input"),
    ("exp2", "Exp2", "input"),
    ("expm1", "Expm1", "input"),
    ("floor", "Floor", "input"),
    ("frac", "Frac", "input"),
    ("imag", "Imag ImagView", "input"),
    ("isfinite", "IsFinite", "input"),
    ("isinf", "IsInf", "input"),
    ("isnan", "IsNan", "input"),
    ("isneginf", "IsNegInf", "input"),
    ("log", "Log", "input"),
    ("log10", "Log10", "input"),
    ("log1p", "Log1p", "input"),
    ("log2", "Log2", "input"),
    ("log_sigmoid", "LogSigmoid", "input"),
    ("logical_not", "LogicalNot", "input"),
    ("neg", "Neg", "input"),
    ("real", "Real RealView", "input"),
    ("reciprocal", "Reciprocal Inv", "input"),
    ("relu", "ReLU", "input"),
    ("relu6", "ReLU6", "input"),
    ("round", "Round", "input, decimals"),
    ("rsqrt", "Rsqrt", "input"),
    ("selu", "SeLU SeLUExt", "input"),
    ("sigmoid", "Sigmoid", "input"),
    ("sign", "Sign", "input"),
    ("silu", "SiLU", "input"),
    ("sin", "Sin", "input"),
    ("sinc", "Sinc", "input"),
    ("sinh", "Sinh", "input"),
    ("softsign", "Softsign", "input"),
    ("sqrt", "Sqrt", "input"),
    ("square", "Square", "input"),
    ("tan", "Tan", "input"),
    ("tanh", "Tanh", "input"),
    ("trunc", "Trunc", "input"),
    ("hardswish", "HSwish", "input"),
    ("hardsigmoid", "HSigmoid", "input"),
    ("mish", "Mish MishExt", "input"),
    ("elu", "Elu EluExt", "input, alpha"),
    ("gelu", "GeluExt GeLU FastGeLU", "input, approximate"),
    ("hardshrink", "HShrink", "input, lambd"),
    ("softshrink", "SoftShrink", "input, lambd"),
    ("hardtanh", "Hardtanh", "input, min_val, max_val"),
    ("leaky_relu", "LeakyReLUExt", "input, negative_slope"),
    ("softplus", "SoftplusExt", "input, beta, threshold"),
    ("threshold", "Threshold", "input, threshold, value"),
    ("glu", "GLU", "input, dim"),
    ("nan_to_num", "NanToNum", "input, nan, posinf, neginf"),
    ("add", "AddExt AddScalar Add", "input, other, alpha"),
    ("sub", "SubExt SubScalar Sub", "input, other, alpha"),
    ("mul", "Mul Muls", "input, other"),
    ("div", "Div Divs RealDiv DivMod DivMods", "input, other, rounding_mode"),
    ("pow", "Pow PowTensorScalar PowScalarTensor", "input, exponent"),
    ("eq", "Equal EqScalar", "input, other"),
    ("ne", "NotEqual NeScalar", "input, other"),
    ("lt", "Less LessScalar", "input, other"),
    ("le", "LessEqual LessEqualScalar", "input, other"),
    ("gt", "Greater GreaterScalar", "input, other"),
    ("ge", "GreaterEqual GreaterEqualScalar", "input, other"),
    ("maximum", "Maximum", "input, other"),
    ("minimum", "Minimum", "input, other"),
    ("fmod", "FmodScalar FmodTensor", "input, other"),
    ("remainder", "RemainderTensorTensor RemainderTensorScalar RemainderScalarTensor FloorMod", "input, other"),
    ("floor_divide", "FloorDiv FloorDivScalar", "input, other"),
    ("logical_and", "LogicalAnd", "input, other"),
    ("logical_or", "LogicalOr", "input, other"),
    ("logical_xor", "LogicalXor", "input, other"),
    ("bitwise_and", "BitwiseAnd BitwiseAndScalar BitwiseAndTensor", "input, other"),
    ("bitwise_or", "BitwiseOr BitwiseOrScalar BitwiseOrTensor", "input, other"),
    ("bitwise_xor", "BitwiseXor BitwiseXorScalar BitwiseXorTensor", "input, other"),
    ("bitwise_left_shift", "LeftShift", "input, other"),
    ("bitwise_right_shift", "RightShift", "input, other"),
    ("atan2", "Atan2 Atan2Ext", "input, other"),
    ("logaddexp", "LogAddExp", "input, other"),
    ("logaddexp2", "LogAddExp2", "input, other"),
    ("nextafter", "NextAfter", "input, other"),
    ("xlogy", "Xlogy XLogYScalarOther XLogYScalarSelf", "input, other"),
    ("gcd", "Gcd", "input, other"),
    ("polar", "Polar", "abs, angle"),
    ("complex", "Complex", "real, imag"),
    ("isclose", "IsClose", "input, other, rtol, atol, equal_nan"),
    ("prelu", "PReLU", "input, weight"),
    ("lerp", "Lerp LerpScalar", "input, end, weight"),
    ("addcmul", "AddcmulExt", "input, tensor1, tensor2, value"),
    ("addcdiv", "AddcdivExt", "input, tensor1, tensor2, value"),
    ("clamp", "ClampScalar ClampTensor", "input, min, max"),
    ("where", "Select", "condition, input, other"),
    ("masked_fill", "MaskedFill MaskedFillScalar", "input, mask, value"),
    ("to", "ToDtype Cast", "input, dtype"),
    ("copy", "Copy", "input, src, non_blocking"),
    ("zeros_like", "ZerosLike ZerosLikeExt", "input, dtype"),
    ("ones_like", "OnesLike OnesLikeExt", "input, dtype"),
    ("full_like", "FullLike", "input, fill_value, dtype"),
    # products
    ("linear", "Dense", "input, weight, bias"),
    ("matmul", "MatMulExt", "input, other"),
    ("bmm", "BatchMatMulExt", "input, mat2"),
    ("mm", "Mm", "input, mat2"),
    ("mv", "Mv", "input, vec"),
    ("dot", "Dot", "input, tensor"),
    ("vdot", "Vdot", "input, other"),
    ("outer", "Outer", "input, vec2"),
    ("addmm", "Addmm", "input, mat1, mat2, beta, alpha"),
    ("addmv", "Addmv", "input, mat, vec, beta, alpha"),
    ("addbmm", "Addbmm", "input, batch1, batch2, beta, alpha"),
    ("baddbmm", "Baddbmm", "input, batch1, batch2, beta, alpha"),
    # reductions
    ("sum", "SumExt", "input, dim, keepdim, dtype"),
    ("nansum", "Nansum", "input, dim, keepdim, dtype"),
    ("mean", "MeanExt", "input, dim, keepdim, dtype"),
    ("prod", "ProdExt", "input, dim, keepdim, dtype"),
    ("max", "Max MaxDim", "input, dim, keepdim"),
    ("min", "Min MinDim", "input, dim, keepdim"),
    ("amax", "ReduceMax AMax", "input, dim, keepdim"),
    ("amin", "ReduceMin AMin", "input, dim, keepdim"),
    ("all", "ReduceAll", "input, dim, keepdim"),
    ("any", "Any AnyExt", "input, dim, keepdim"),
    ("argmax", "ArgMaxExt", "input, dim, keepdim"),
    ("argmin", "ArgMinExt", "input, dim, keepdim"),
    ("var", "Var", "input, dim, correction, keepdim"),
    ("std", "Std", "input, dim, correction, keepdim"),
    ("logsumexp", "LogSumExp", "input, dim, keepdim"),
    ("cumsum", "CumsumExt", "input, dim, dtype"),
    ("softmax", "Softmax", "input, dim"),
    ("log_softmax", "LogSoftmax", "input, dim"),
    ("log_softmax", "LogSoftmaxExt", "input, dim, dtype"),
    # views and joins
    ("reshape", "Reshape", "input, shape"),
    ("view", "View", "input, shape"),
    ("transpose", "TransposeExtView", "input, dim0, dim1"),
    ("permute", "Transpose TransposeView", "input, dims"),
    ("t", "TExt", "input"),
    ("unsqueeze", "ExpandDims ExpandDimsView", "input, dim"),
    ("squeeze", "Squeeze", "input, dim"),
    ("flatten", "FlattenExt", "input, start_dim, end_dim"),
    ("expand", "BroadcastTo BroadcastToView", "input, size"),
    ("expand_as", "ExpandAs", "input, other"),
    ("narrow", "Narrow NarrowView", "input, dim, start, length"),
    ("split", "SplitTensor SplitTensorView SplitWithSize SplitWithSizeView", "input, split_size, dim"),
    ("chunk", "Chunk ChunkView", "input, chunks, dim"),
    ("select", "SelectExtView", "input, dim, index"),
    ("unbind", "UnstackExtView", "input, dim"),
    ("diagonal", "Diagonal DiagonalView", "input, offset, dim1, dim2"),
    ("tile", "Tile", "input, dims"),
    ("repeat", "Repeat", "input, repeats"),
    ("flip", "ReverseV2", "input, dims"),
    ("cat", "Concat", "input, dim"),
    ("stack", "StackExt", "input, dim"),
    ("tril", "TrilExt", "input, diagonal"),
    ("triu", "Triu", "input, diagonal"),
    # lookups
    ("gather", "GatherD", "input, dim, index"),
    ("index_select", "IndexSelect", "input, dim, index"),
    ("embedding", "Embedding", "input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq"),
    ("scatter", "Scatter", "input, dim, index, src, reduce"),
    ("scatter_add", "ScatterAddExt", "input, dim, index, src"),
    ("index_add", "IndexAddExt", "input, dim, index, source, alpha"),
    ("masked_select", "MaskedSelect", "input, mask"),
    # norms and losses
    ("layer_norm", "LayerNormExt", "input, normalized_shape, weight, bias, eps"),
    ("group_norm", "GroupNorm", "input, num_groups, weight, bias, eps"),
    ("mse_loss", "MSELossExt", "input, target, reduction"),
    ("l1_loss", "L1LossExt", "input, target, reduction"),
    ("kl_div", "KLDiv", "input, target, reduction, log_target"),
]  # fmt: skip

NAMES = {
    spelled: (name, tuple(parameters.split(", ")))
    for name, spellings, parameters in _TABLE
    for spelled in spellings.split()
}

# Parameters that have several names.
_PARAMETERS = {
    "self": "input",
    "x": "input",
    "tensor": "input",
    "tensors": "input",
    "axis": "dim",
    "keep_dims": "keepdim",
    "keepdims": "keepdim",
    "split_size_or_sections": "split_size",
    "y": "other",
}


class Operation:
    """An operator of MindSpore as it reaches a distributed tensor: one object for each, whoever calls it."""

    def __init__(self, name: str, run: Callable[..., Any], attributes: Mapping[str, Any]) -> None:
        self.name, self._run, self.attributes = name, run, attributes
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if has_empty(args):
            return run_on_empty(self.name, self._run, args, kwargs, is_fine=self.name in FINE)
        return self._run(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<MindSpore's {self.name}>"


_OPERATIONS: dict[tuple[str, Any], Operation] = {}


def operation(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> tuple[Operation, Any, Any]:
    """(operator, arguments, keywords) of what ``__fallback__`` gets, which is a new object at each call."""
    if len(args) == 3 and isinstance(args[0], mindspore.ops.Primitive):
        primitive, name, args = args
        made = _known(name, str(primitive), lambda *given: func(primitive, name, given), primitive.attrs)
    else:
        made = _known(func.name, type(func), func, {})
    return made, args, kwargs or {}


def _known(name: str, kind: Any, run: Callable[..., Any], attributes: Mapping[str, Any]) -> Operation:
    if (name, kind) not in _OPERATIONS:
        _OPERATIONS[name, kind] = Operation(name, run, attributes)
    return _OPERATIONS[name, kind]


# --- what the rules ask for


def getitem(input: Any, index: Any) -> Any:
    """``input[index]`` of a plain tensor."""
    if 0 not in input.shape:
        return Tensor.__getitem__(input, index)
    # Backward of an int fails where there is nothing, that of a slice does not.
    items = index if isinstance(index, tuple) else (index,)
    wide = tuple(slice(i, i + 1 or None) if type(i) is int else i for i in items)
    found = Tensor.__getitem__(input, wide)
    if wide == items:
        return found
    if any(i is Ellipsis for i in items):
        left = len(found.shape) - sum(i is not Ellipsis for i in items)
        at = next(n for n, i in enumerate(items) if i is Ellipsis)
        items = (*items[:at], *(slice(None),) * left, *items[at + 1 :])
    dropped = {n for n, i in enumerate(items) if type(i) is int}
    return found.reshape([size for n, size in enumerate(found.shape) if n not in dropped])


def setitem(input: Any, index: Any, value: Any) -> Any:
    """``input[index] = value`` of a plain tensor."""
    Tensor.__setitem__(input, index, value)
    return input


def _to(input: Any, *args: Any, dtype: Any = None, **_: Any) -> Any:
    wanted = (
        dtype if dtype is not None else next((arg for arg in args if isinstance(arg, type(mindspore.float32))), None)
    )
    if wanted is None and args and isinstance(args[0], Tensor):
        wanted = args[0].dtype
    return input if wanted is None or input.dtype == wanted else input.astype(wanted)


def _softmax(input: Any, dim: int, dtype: Any = None) -> Any:
    return ops.softmax(input if dtype is None else input.astype(dtype), axis=dim)


def _log_softmax(input: Any, dim: int, dtype: Any = None) -> Any:
    return ops.log_softmax(input if dtype is None else input.astype(dtype), axis=dim)


def _variance(input: Any, dim: Any = None, *, correction: float = 1, keepdim: bool = False) -> Any:
    dims = tuple(range(len(input.shape))) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    count = math.prod(input.shape[d] for d in dims)
    off = input - mint.mean(input, dims, keepdim=True)
    return mint.sum(off * off, dims, keepdim) / max(count - correction, 0)


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,  # noqa: ARG001 - of max_norm
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise NotImplementedError("embedding: MindSpore has no max_norm, scale_grad_by_freq or sparse on this device")
    rows = ops.gather(weight, input, 0)
    if padding_idx is None:
        return rows
    return mint.where(mint.unsqueeze(input != padding_idx, -1), rows, ops.stop_gradient(rows))


def _sort(input: Any, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    if stable:
        raise NotImplementedError("sort: MindSpore's does not say that it is stable; sort by a second key")
    return ops.sort(input, dim, descending)


def _layer_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    begin = len(input.shape) - len(normalized_shape)
    weight = ops.ones(tuple(normalized_shape), input.dtype) if weight is None else weight
    bias = ops.zeros(tuple(normalized_shape), input.dtype) if bias is None else bias
    return ops.LayerNorm(begin, begin, eps)(input, weight, bias)[0]


# Where the function of that name has no CPU kernel, takes its arguments in another order, or has another name.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getitem": getitem,
    "setitem": setitem,
    "to": _to,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "logsumexp": lambda input, dim, keepdim=False: ops.logsumexp(input, dim, keepdim),
    "embedding": _embedding,
    "zeros_like": ops.zeros_like,
    "ones_like": ops.ones_like,
    "full_like": ops.full_like,
    "tril": ops.tril,
    "detach": ops.stop_gradient,
    "clone": lambda input: input.copy(),
    "stack": lambda input, dim=0: ops.stack(input, dim),
    "argmax": lambda input, dim=None, keepdim=False: ops.argmax(input, dim, keepdim),
    "argmin": lambda input, dim=None, keepdim=False: ops.argmin(input, dim, keepdim),
    "topk": lambda input, k, dim=-1, largest=True, sorted=True: ops.topk(input, k, dim, largest, sorted),
    "sort": _sort,
    "var": _variance,
    "std": lambda input, dim=None, *, correction=1, keepdim=False: mint.sqrt(
        _variance(input, dim, correction=correction, keepdim=keepdim)
    ),
    "layer_norm": _layer_norm,
    "index_select": lambda input, dim, index: ops.gather(input, index.astype(mindspore.int32), dim),
    "one_hot": lambda input, num_classes=-1: ops.one_hot(input, num_classes).astype(mindspore.int64),
    "cumsum": lambda input, dim, dtype=None: ops.cumsum(input, dim, dtype),
    "gelu": lambda input, approximate="none": ops.gelu(input, approximate=approximate),
    "mse_loss": ops.mse_loss,
    "l1_loss": ops.l1_loss,
    "addcmul": lambda input, tensor1, tensor2, *, value=1: ops.addcmul(input, tensor1, tensor2, value),
    "addcdiv": lambda input, tensor1, tensor2, *, value=1: ops.addcdiv(input, tensor1, tensor2, value),
    "floor_divide": lambda input, other: input // other,
}

_ROOMS = (F, mint, ops, Tensor)
_SPELLED: dict[Any, str] = {}  # functions of ours, by what the rules call them
_FINE_NAMES = {NAMES[spelled][0] for spelled in FINE if spelled in NAMES} | {"getitem", "setitem", "clone"}


@functools.cache
def called(func: Any) -> Called:
    """What a function or an operator of MindSpore is called."""
    if isinstance(func, Operation):
        name, inplace = func.name, func.name.startswith("Inplace")
        if inplace:
            name = name.removeprefix("Inplace")
        if name in NAMES:
            found, parameters = NAMES[name]
            return Called(found, inplace, parameters)
        return Called(func.name, inplace, None)
    name = getattr(func, "__name__", type(func).__name__)
    known = _SPELLED.get(func) or next((key for key, one in _FUNCTIONS.items() if one is func), None)
    return Called(known or name.removesuffix("_ext"), False, _parameters(func))


def _parameters(func: Any) -> tuple[str, ...] | None:
    try:
        found = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in found):
        return None
    return tuple(_PARAMETERS.get(parameter.name, parameter.name) for parameter in found)


@functools.cache
def function(name: str) -> Callable[..., Any]:
    """The function of MindSpore that an operator's name stands for, with its arguments as the rules name them."""
    rooms = (getattr(room, name, None) for room in _ROOMS)
    found = _FUNCTIONS.get(name) or next((one for one in rooms if callable(one)), None)
    if found is None:
        raise AttributeError(f"MindSpore has no operator {name!r}")
    return _guarded(name, found)


def _guarded(name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
    """The function where no operand is empty; where one is, what is right then."""
    is_fine = name in _FINE_NAMES

    @functools.wraps(usual)
    def run(*args: Any, **kwargs: Any) -> Any:
        if has_empty(args):
            return run_on_empty(name, usual, args, kwargs, is_fine=is_fine)
        return usual(*args, **kwargs)

    _SPELLED[run] = name
    return run


class Operators(Platform):
    """The part of the contract that is about names."""

    def get_op_name(self, func: Any) -> str:
        if not callable(func):
            raise TypeError(f"get_op_name: expected an operator, got {type(func).__name__}")
        return called(func).name

    def called(self, func: Any) -> Called:
        return called(func)

    def named(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        return {_PARAMETERS.get(name, name): value for name, value in keywords.items()}

    def operator(self, name: str) -> Callable[..., Any]:
        return function(name)
