# SPDX-License-Identifier: Apache-2.0
"""What MindSpore's operators are called in the rules, and how their arguments are named.

``mint.add``, ``ops.add``, ``Tensor.add`` and ``x + y`` arrive at a distributed tensor as the operators that they run:
``AddExt``, ``AddScalar`` or ``Add``. The table says for each what the rules call it. What is in no table runs on whole
tensors. The other way round, ``operator(name)`` gives a function that takes its arguments as the rules name them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mindspore
from mindspore import Tensor, mint, ops
from mindspore.mint.nn import functional as F  # noqa: N812 - everyone's name for it

from hyper_parallel.platform.containers import leaves
from hyper_parallel.platform.mindspore import private
from hyper_parallel.platform.mindspore.cpu.empty_shards import kernels
from hyper_parallel.platform.mindspore.cpu.empty_shards.kernels import FINE
from hyper_parallel.platform.mindspore.cpu.functions.table import FUNCTIONS, ON_NPU
from hyper_parallel.platform.platform import OpName, Platform

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
    ("addcmul", "AddcmulExt", "input, tensor1, tensor2, value"),
    ("addcdiv", "AddcdivExt", "input, tensor1, tensor2, value"),
    ("clamp", "ClampScalar ClampTensor", "input, min, max"),
    ("where", "Select", "condition, input, other"),
    ("masked_fill", "MaskedFill MaskedFillScalar MaskedFillTensor", "input, mask, value"),
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
    ("cdist", "Cdist", "input, other, p"),
    ("linalg_det", "MatrixDeterminant", "A"),
    ("linalg_slogdet", "LogMatrixDeterminant", "A"),
    # windows
    ("conv1d", "Conv1DExt", "input, weight, bias, stride, padding, dilation, groups"),
    ("conv2d", "Conv2DExt Conv2DPadding", "input, weight, bias, stride, padding, dilation, groups"),
    ("conv3d", "Conv3DExt", "input, weight, bias, stride, padding, dilation, groups"),
    ("avg_pool1d", "AvgPool1D", "input, kernel_size, stride, padding, ceil_mode, count_include_pad"),
    ("avg_pool2d", "AvgPool2D", "input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override"),
    ("adaptive_avg_pool1d", "AdaptiveAvgPool1D", "input, output_size"),
    ("adaptive_avg_pool2d", "AdaptiveAvgPool2DExt", "input, output_size"),
    ("adaptive_max_pool2d_with_indices", "AdaptiveMaxPool2D", "input, output_size"),
    ("im2col", "Im2ColExt", "input, kernel_size, dilation, padding, stride"),
    ("col2im", "Col2ImExt", "input, output_size, kernel_size, dilation, padding, stride"),
    ("pixel_shuffle", "PixelShuffle", "input, upscale_factor"),
    # reductions
    ("sum", "SumExt", "input, dim, keepdim, dtype"),
    ("nansum", "Nansum", "input, dim, keepdim, dtype"),
    ("mean", "MeanExt", "input, dim, keepdim, dtype"),
    ("prod", "ProdExt", "input, dim, keepdim, dtype"),
    ("max", "Max MaxDim", "input, dim, keepdim"),
    ("min", "Min MinDim", "input, dim, keepdim"),
    ("amax", "ReduceMax AMax", "input, dim, keepdim"),
    ("amin", "ReduceMin AMin", "input, dim, keepdim"),
    ("any", "Any AnyExt", "input, dim, keepdim"),
    ("argmax", "ArgMaxExt", "input, dim, keepdim"),
    ("argmin", "ArgMinExt", "input, dim, keepdim"),
    ("var", "Var", "input, dim, correction, keepdim"),
    ("softmax", "Softmax", "input, dim"),
    ("log_softmax", "LogSoftmax", "input, dim"),
    # views and joins
    ("reshape", "Reshape", "input, shape"),
    ("view", "View", "input, shape"),
    ("view", "ViewDtype", "input, dtype"),
    ("transpose", "TransposeExtView", "input, dim0, dim1"),
    ("permute", "Transpose TransposeView", "input, dims"),
    ("t", "TExt", "input"),
    ("unsqueeze", "ExpandDims ExpandDimsView DeprecatedUnsqueeze", "input, dim"),
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
    ("repeat_interleave", "RepeatInterleaveInt DeprecatedRepeatInterleave", "input, repeats, dim, output_size"),
    ("constant_pad_nd", "ConstantPadND", "input, pad, value"),
    ("diag", "Diag", "input"),
    ("trace", "TraceExt", "input"),
    ("flip", "ReverseV2", "input, dims"),
    ("cat", "Concat", "input, dim"),
    ("stack", "StackExt", "input, dim"),
    ("tril", "TrilExt", "input, diagonal"),
    ("triu", "Triu", "input, diagonal"),
    # lookups
    ("gather", "GatherD", "input, dim, index"),
    ("index_select", "IndexSelect", "input, dim, index"),
    ("embedding", "Embedding", "input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq"),
    ("scatter_add", "ScatterAddExt", "input, dim, index, src"),
    ("index_add", "IndexAddExt", "input, dim, index, source, alpha"),
    ("masked_select", "MaskedSelect", "input, mask"),
    ("masked_scatter", "MaskedScatter", "input, mask, source"),
    # transforms
    ("fft_irfft", "IRFFT", "input, n, dim, norm"),
    ("fft_irfft2", "IRFFT2", "input, s, dim, norm"),
    ("fft_irfftn", "IRFFTN", "input, s, dim, norm"),
    ("fft_hfft", "HFFT", "input, n, dim, norm"),
    ("fft_hfft2", "HFFT2", "input, s, dim, norm"),
    ("fft_hfftn", "HFFTN", "input, s, dim, norm"),
    ("fft_fftshift", "FFTShift", "input, dim"),
    ("fft_ifftshift", "IFFTShift", "input, dim"),
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
    "input_x": "input",
    "tensor": "input",
    "tensors": "input",
    "inputs": "input",
    "axis": "dim",
    "keep_dims": "keepdim",
    "keepdims": "keepdim",
    "split_size_or_sections": "split_size",
    "y": "other",
}


class Operation:
    """An operator of MindSpore as it reaches a distributed tensor: one object for each, whoever calls it."""

    def __init__(
        self, name: str, run: Callable[..., Any], attributes: Mapping[str, Any]
    ) -> None:
        self.name, self._run, self.attributes = name, run, attributes
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return kernels.run(
            self.name, self._run, args, kwargs, is_fine=self.name in FINE
        )

    def __repr__(self) -> str:
        return f"<MindSpore's {self.name}>"


_OPERATIONS: dict[tuple[str, Any], Operation] = {}


def operation(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[Operation, Any, Any]:
    """(operator, arguments, keywords) of what ``__fallback__`` gets, which is a new object at each call."""
    if len(args) == 3 and isinstance(args[0], mindspore.ops.Primitive):
        primitive, name, args = args
        made = _known(
            name,
            str(primitive),
            lambda *given: func(primitive, name, given),
            primitive.attrs,
        )
    else:
        made = _known(func.name, type(func), func, {})
    return made, args, kwargs or {}


def _known(
    name: str, kind: Any, run: Callable[..., Any], attributes: Mapping[str, Any]
) -> Operation:
    if (name, kind) not in _OPERATIONS:
        _OPERATIONS[name, kind] = Operation(name, run, attributes)
    return _OPERATIONS[name, kind]


# --- what the rules ask for

_OF_NUMPY = {"axis": "dim", "axis0": "dim0", "axis1": "dim1", "keepdims": "keepdim"}
getitem = FUNCTIONS["getitem"]  # of a plain tensor
_ROOMS = (F, mint, ops, Tensor)
# Other names of operators, as PyTorch has them too.
_SAME_AS = {
    "absolute": "abs",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctan2": "atan2",
    "arctanh": "atanh",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "expit": "sigmoid",
    "gammaln": "lgamma",
    "logsigmoid": "log_sigmoid",
    "moveaxis": "movedim",
    "multiply": "mul",
    "negative": "neg",
    "pinverse": "pinv",
    "psi": "digamma",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
}
_SPELLED: dict[Any, str] = {}  # functions of ours, by what the rules call them
_FINE_NAMES = {
    NAMES[spelled][0] for spelled in FINE if spelled in NAMES
} | FUNCTIONS.keys()  # these ask for themselves


@functools.cache
def op_name_of(func: Any) -> OpName:
    """What a function or an operator of MindSpore is called."""
    if isinstance(func, Operation):
        name, inplace = func.name, func.name.startswith("Inplace")
        if inplace:
            name = name.removeprefix("Inplace")
        if name in NAMES:
            found, parameters = NAMES[name]
            return OpName(found, inplace, parameters)
        return OpName(func.name, inplace, None)
    name = getattr(func, "__name__", type(func).__name__)
    known = _SPELLED.get(func) or next(
        (key for key, one in FUNCTIONS.items() if one is func), None
    )
    inplace = known is None and name.endswith("_") and not name.endswith("__")
    bare = name.removesuffix("_") if inplace else name.removesuffix("_ext")
    return OpName(known or bare, inplace, _parameters(func, is_ours=known in FUNCTIONS))


def _parameters(func: Any, is_ours: bool) -> tuple[str, ...] | None:
    try:
        found = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in found):
        return None
    names = [parameter.name for parameter in found]
    usual = names if is_ours else [_PARAMETERS.get(name, name) for name in names]
    return tuple(
        name if known in names else known
        for name, known in zip(names, usual, strict=True)
    )


@functools.cache
def function(name: str) -> Callable[..., Any]:
    """The function of MindSpore that an operator's name stands for, with its arguments as the rules name them."""
    name = _SAME_AS.get(name, name)
    rooms = (getattr(room, name, None) for room in _ROOMS)
    has_kernel = name in ON_NPU and mindspore.get_context("device_target") == "Ascend"
    found = (None if has_kernel else FUNCTIONS.get(name)) or next(
        (one for one in rooms if callable(one)), None
    )
    if found is None:
        raise AttributeError(f"MindSpore has no operator {name!r}")
    return _guarded(name, found)


def _guarded(name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
    """The function; by its rule for distributed tensors, by shapes alone on meta, and what is right for empty ones."""
    is_fine = name in _FINE_NAMES

    @functools.wraps(usual)
    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs and name in FUNCTIONS:
            kwargs = {_OF_NUMPY.get(key, key): value for key, value in kwargs.items()}
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        kind = next(
            (type(tensor) for tensor in tensors if hasattr(tensor, "_layout")), None
        )
        if kind is not None:
            return kind.dispatch(run, args, kwargs)
        if any(tensor.is_meta for tensor in tensors):
            with private.device_context()("meta"):
                return usual(*args, **kwargs)
        return kernels.run(name, usual, args, kwargs, is_fine=is_fine)

    _SPELLED[run] = name
    return run


class Operators(Platform):
    """The part of the contract that is about names."""

    def get_op_name(self, func: Any) -> str:
        if not callable(func):
            raise TypeError(
                f"get_op_name: expected an operator, got {type(func).__name__}"
            )
        return op_name_of(func).name

    def op_name_of(self, func: Any) -> OpName:
        return op_name_of(func)

    def canonical_kwargs(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        return {_PARAMETERS.get(name, name): value for name, value in keywords.items()}

    def operator(self, name: str) -> Callable[..., Any]:
        return function(name)
