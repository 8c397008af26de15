# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A001, A002, A006 - operands have the names that the rules give them
"""Operators of MindSpore that are several in one, or that the rules know in another form: done by others.

Operators that change a tensor in place change nothing on a CPU, where they return a new tensor in silence. Here the
result is computed beside the target and copied into it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import mindspore
from mindspore import mint, ops

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.mindspore import private
from hyper_parallel.platform.mindspore.operators import NAMES, Operation, function


def adapter_for(operation: Operation) -> Callable[..., Any] | None:
    """What does the work of an operator on distributed tensors; None if a rule does."""
    name = operation.name
    if name in _REWRITTEN:
        return _REWRITTEN[name]
    if name in _BY_ATTRIBUTES:
        return lambda *args: _BY_ATTRIBUTES[name](*args, **operation.attributes)
    if name.startswith("Inplace") and name != "InplaceCopy":
        return lambda target, *args, **kwargs: _changed(
            name.removeprefix("Inplace"), target, args, kwargs
        )
    return None


def by_rule(name: str, *args: Any, **kwargs: Any) -> Any:
    """An operator by the name and with the arguments of the rules."""
    kind = next(type(tensor) for tensor in _leaves(args) if hasattr(tensor, "_layout"))
    return kind.dispatch(function(name), args, kwargs)


def _leaves(tree: Any) -> list[Any]:
    return (
        [leaf for item in tree for leaf in _leaves(item)]
        if isinstance(tree, (list, tuple))
        else [tree]
    )


def _changed(
    name: str, target: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    known = _IN_PLACE.get(name) or NAMES.get(name, (None,))[0]
    if known is None:
        raise coded(
            NotImplementedError,
            "HP313",
            f"Inplace{name}: a distributed tensor is not changed in place by it; assign a result to it",
        )
    if known in _FILLING:
        return by_rule(
            known, target, *args[: _FILLING[known]]
        )  # after them come what MindSpore draws from
    return target.copy_(by_rule(known, target, *args, **kwargs))


# What the rules call an operator in place, where that is not the name of the one that makes a new tensor.
_IN_PLACE = {
    "Addr": "addr",
    "AddsExt": "add",
    "BernoulliScalar": "bernoulli_",
    "Exponential": "exponential_",
    "FillScalar": "fill",
    "FillTensor": "fill",
    "FloorDivide": "floor_divide",
    "FloorDivides": "floor_divide",
    "IndexCopy": "index_copy",
    "IndexPut": "index_put",
    "Normal": "normal_",
    "Random": "random_",
    "ScatterAdd": "scatter_add",
    "Uniform": "uniform_",
    "Zero": "zeros_like",
}
# Those that draw numbers, and how many arguments say which.
_FILLING = {
    "bernoulli_": 1,
    "exponential_": 1,
    "normal_": 2,
    "random_": 2,
    "uniform_": 2,
}


# --- products


def _matmul(
    input: Any, other: Any, transpose_a: bool = False, transpose_b: bool = False
) -> Any:
    left = mint.transpose(input, -1, -2) if transpose_a else input
    right = mint.transpose(other, -1, -2) if transpose_b else other
    return by_rule("matmul", left, right)


def _bias_add(input: Any, bias: Any, data_format: Any = 0) -> Any:  # noqa: ARG001 - channels are dim 1 in both
    return input + (
        bias if input.ndim == 2 else bias.reshape((-1, *(1,) * (input.ndim - 2)))
    )


def _addcmul(input: Any, tensor1: Any, tensor2: Any, value: Any) -> Any:
    return input + tensor1 * tensor2 * value


def _addcdiv(input: Any, tensor1: Any, tensor2: Any, value: Any) -> Any:
    return input + tensor1 / tensor2 * value


def _std(
    input: Any, dim: Any = None, correction: Any = None, keepdim: bool = False
) -> Any:
    """mint's has a correction of one, which it says; the method has none."""
    return by_rule(
        "std",
        input,
        dim,
        correction=0 if correction is None else correction,
        keepdim=keepdim,
    )


# --- lookups


def _gather(input: Any, index: Any, axis: int, batch_dims: int = 0) -> Any:
    if batch_dims:
        raise coded(
            NotImplementedError,
            "HP313",
            "ops.gather: batch_dims is not supported for distributed tensors",
        )
    if axis % input.ndim == 0 and input.ndim == 2:
        return by_rule("embedding", index, input)
    if index.ndim == 1:
        return by_rule("index_select", input, axis, index)
    return input[(slice(None),) * (axis % input.ndim) + (index,)]


def _gather_nd(input: Any, index: Any) -> Any:
    return input[tuple(index[..., i] for i in range(index.shape[-1]))]


def _one_hot(index: Any, depth: int, on: Any, off: Any, axis: int = -1) -> Any:
    if axis != -1:
        raise coded(
            NotImplementedError,
            "HP313",
            "ops.one_hot: distributed tensors get the new dim at the end; take axis=-1",
        )
    found = by_rule("one_hot", index, depth)
    return found.astype(on.dtype) * (on - off) + off


def _strided_slice(input: Any, begin: Any, end: Any, strides: Any, *masks: int) -> Any:
    if any(masks):
        raise coded(
            NotImplementedError,
            "HP313",
            "ops.strided_slice: masks are not supported for distributed tensors; index it",
        )
    return input[tuple(map(slice, begin, end, strides))]


def _slice(input: Any, begin: Any, size: Any) -> Any:
    return input[
        tuple(
            slice(at, None if n == -1 else at + n)
            for at, n in zip(begin, size, strict=True)
        )
    ]


def _split(input: Any, axis: int = 0, output_num: int = 1) -> Any:
    return by_rule("split", input, input.shape[axis] // output_num, axis)


def _scatter(input: Any, dim: int, index: Any, src: Any, reduce: Any = 0) -> Any:
    if reduce not in (0, 1, None):
        raise coded(
            NotImplementedError,
            "HP313",
            "scatter: distributed tensors are written to, or added to; scatter_reduce has others",
        )
    if reduce:
        return by_rule("scatter_add", input, dim, index, src)
    return by_rule(
        "scatter",
        input,
        dim,
        index,
        **{"src" if hasattr(src, "shape") else "value": src},
    )


def _index_fill(input: Any, dim: Any, index: Any, value: Any) -> Any:
    return by_rule("index_fill", input, int(dim), index, value)


def _into(make: Callable[..., Any]) -> Callable[..., Any]:
    """The operator that puts into its target what another makes of it."""
    return lambda target, *args: target.copy_(make(target, *args))


def _searchsorted(
    sorted_sequence: Any, values: Any, sorter: Any, dtype: Any, right: bool
) -> Any:
    is_short = dtype == mindspore.int32
    return by_rule(
        "searchsorted",
        sorted_sequence,
        values,
        out_int32=is_short,
        right=right,
        sorter=sorter,
    )


# --- reductions


def _cumsum(input: Any, axis: Any = None, dtype: Any = None) -> Any:
    """It is the sums that get the dtype, as of plain tensors."""
    found = by_rule("cumsum", input, axis)
    return found if dtype is None else found.astype(dtype)


def _reduced(name: str, parameters: str = "axis keep_dims") -> Callable[..., Any]:
    """``parameters``: those of MindSpore's operator, in their order; what is no dim and no dtype is refused."""

    def reduce(input: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(parameters.split(), args, strict=False)), **kwargs}
        given = {
            key: value
            for key, value in given.items()
            if value is not None and value is not False
        }
        given = {
            key: value for key, value in given.items() if value not in ((), [])
        }  # no dims are all of them
        dims = given.pop("axis", given.pop("dim", None))
        keep = any(
            given.pop(spelled, False)
            for spelled in ("keep_dims", "keepdims", "keepdim")
        )
        dtype = {"dtype": given.pop("dtype")} if "dtype" in given else {}
        if given:
            raise coded(
                NotImplementedError,
                "HP313",
                f"{name}: {', '.join(given)} is not supported for distributed tensors",
            )
        return (
            by_rule(name, input, dims, keep, **dtype)
            if dims is not None or keep
            else by_rule(name, input, **dtype)
        )

    return reduce


def _argument(name: str) -> Callable[..., Any]:
    def find(
        input: Any,
        axis: Any = None,
        kind: Any = None,  # noqa: ARG001
        keepdims: bool = False,
    ) -> Any:
        return by_rule(name, input, axis, keepdims).astype(mindspore.int32)

    return find


def _with_value(name: str) -> Callable[..., Any]:
    """The place first, and then the value."""

    def find(input: Any, axis: int = 0, keep_dims: bool = False) -> Any:
        values, places = by_rule(name, input, axis, keep_dims)
        return places, values

    return find


def _variance(name: str) -> Callable[..., Any]:
    def run(input: Any, axis: Any = None, ddof: int = 0, keepdims: bool = False) -> Any:
        return by_rule(name, input, axis, correction=int(ddof), keepdim=keepdims)

    return run


def _deviation(
    input: Any, axis: Any = (), unbiased: bool = True, keep_dims: bool = False
) -> Any:
    dims = None if axis in (None, (), []) else axis
    return by_rule(
        "std", input, dims, correction=int(unbiased), keepdim=keep_dims
    ), by_rule("mean", input, dims, keep_dims)


def _running(name: str) -> Callable[..., Any]:
    def run(
        input: Any, axis: Any, exclusive: bool = False, reverse: bool = False, **_: Any
    ) -> Any:
        if exclusive or reverse:
            raise coded(
                NotImplementedError,
                "HP313",
                f"ops.{name}: exclusive and reverse are not supported for distributed tensors",
            )
        return by_rule(name, input, int(axis))

    return run


def _ordered(name: str) -> Callable[..., Any]:
    """Values and their places, which are short integers here."""

    def run(input: Any, *args: Any, **kwargs: Any) -> Any:
        values, places = by_rule(name, input, *args, **kwargs)
        return values, places.astype(mindspore.int32)

    return run


def _trace(
    input: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None
) -> Any:
    if (offset, axis1, axis2, dtype) != (0, 0, 1, None) or input.ndim != 2:
        raise coded(
            NotImplementedError,
            "HP313",
            "trace: distributed tensors have that of a matrix; take the sum of a diagonal",
        )
    return by_rule("trace", input)


def _svd(input: Any, full_matrices: bool = False, compute_uv: bool = True) -> Any:
    left, values, right = by_rule("svd", input, not full_matrices, compute_uv)
    return values, left, right


# --- norms and losses


def _layer_norm(
    input: Any,
    weight: Any,
    bias: Any,
    begin: int = -1,
    _: int = -1,
    epsilon: float = 1e-7,
) -> Any:
    return _normalized("layer_norm")(
        input, tuple(input.shape)[begin % input.ndim :], weight, bias, epsilon
    )


def _normalized(name: str) -> Callable[..., Any]:
    """The normalized tensor; the mean and the deviation, which only its own backward needs, are left out."""
    return lambda *args: (by_rule(name, *args), None, None)


def _batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    eps: float,
    momentum: float,
    *_: Any,
) -> Any:
    """The normalized tensor; the running statistics follow. What only its own backward needs is left out."""
    found = by_rule(
        "batch_norm",
        input,
        mean,
        var,
        weight=weight,
        bias=bias,
        training=training,
        momentum=momentum,
        eps=eps,
    )
    return found, None, None, None, None


def _dropout(input: Any, keep_prob: float = 0.5, *_: int) -> Any:
    """Drawn for the piece, as everywhere; the mask, which only its own backward needs, is left out."""
    return by_rule("dropout", input, 1 - keep_prob, True), None


_REDUCTIONS = {0: "sum", 1: "mean", 2: "none"}


def _loss(name: str, parameters: str) -> Callable[..., Any]:
    """A loss whose reduction is a number."""

    def run(*args: Any) -> Any:
        given = dict(zip(parameters.split(), args, strict=True))
        given["reduction"] = _REDUCTIONS[given["reduction"]]
        operands = [given.pop("input"), given.pop("target")]
        return by_rule(
            name,
            *operands,
            **{key: value for key, value in given.items() if value is not None},
        )

    return run


def _nll_loss(
    input: Any, target: Any, weight: Any, reduction: int, ignore_index: int
) -> Any:
    """The loss; the weight of all targets, which only its own backward needs, is left out."""
    if not hasattr(weight, "_layout") and bool(
        (weight == 1).all()
    ):  # which is how no weights are told
        weight = None
    kind = _REDUCTIONS[reduction]
    return by_rule(
        "nll_loss", input, target, weight, ignore_index=ignore_index, reduction=kind
    ), None


# --- windows


def _spatial_option(options: dict[str, Any], name: str, count: int) -> Any:
    """An option of a convolution for its last ``count`` dims; some primitives have it in the plural."""
    plural = f"{name}s"
    return options[plural if plural in options else name][-count:]


def _convolution(count: int) -> Callable[..., Any]:
    def run(
        input: Any,
        weight: Any,
        *,
        pad_mode: str,
        pad: Any,
        group: int,
        data_format: str,
        **more: Any,
    ) -> Any:
        if not data_format.startswith("NC"):
            raise coded(
                NotImplementedError,
                "HP313",
                f"conv{count}d: the channels of distributed tensors are dim 1, not {data_format}",
            )
        stride = _spatial_option(more, "stride", count)
        dilation = _spatial_option(more, "dilation", count)
        sides = [(0, 0)] * count
        if pad_mode == "same":
            sizes = (input.shape[2:], weight.shape[2:], stride, dilation)
            sides = [_same(*each) for each in zip(*sizes, strict=True)]
        elif pad_mode == "pad":
            sides = [tuple(pad[2 * d : 2 * d + 2]) for d in range(count)]
        if any(before != after for before, after in sides):
            reverse = tuple(side for pair in sides[::-1] for side in pair)
            input, sides = by_rule("pad", input, reverse), [(0, 0)] * count
        padding = tuple(before for before, _ in sides)
        return by_rule(
            f"conv{count}d", input, weight, None, stride, padding, dilation, group
        )

    return run


def _same(size: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    """The margins of a dim of which every ``stride``-th element begins a window; the second is the larger one."""
    total = max(
        (-(-size // stride) - 1) * stride + dilation * (kernel - 1) + 1 - size, 0
    )
    return total // 2, total - total // 2


def _max_pool(
    input: Any,
    kernel_size: Any,
    strides: Any,
    pad_mode: Any,
    data_format: Any,
    **_: Any,
) -> Any:
    if str(pad_mode).lower() != "valid" or data_format != "NCHW":
        raise coded(
            NotImplementedError,
            "HP313",
            f"MaxPool: distributed tensors have pad_mode valid, not {pad_mode}; use max_pool2d",
        )
    return by_rule("max_pool2d", input, kernel_size[-2:], strides[-2:])


def _max_pool_with_places(
    input: Any, kernel_size: Any, strides: Any, pads: Any, **more: Any
) -> Any:
    where = {
        "padding": pads[-2:],
        "dilation": more["dilation"][-2:],
        "ceil_mode": more["ceil_mode"],
    }
    return by_rule(
        "max_pool2d",
        input,
        kernel_size[-2:],
        strides[-2:],
        **where,
        return_indices=True,
    )


def _avg_pool(
    input: Any, kernel_size: Any, strides: Any, pad_mode: int, data_format: int
) -> Any:
    if pad_mode != 2 or data_format != 0:  # valid, NCHW
        raise coded(
            NotImplementedError,
            "HP313",
            "AvgPool: distributed tensors have pad_mode valid; use avg_pool2d",
        )
    return by_rule("avg_pool2d", input, kernel_size, strides)


def _padded(
    input: Any,
    paddings: Any,
    value: Any,
    mode: str,
    paddings_contiguous: bool,
    **_: Any,
) -> Any:
    if not paddings_contiguous:
        raise coded(
            NotImplementedError,
            "HP313",
            "PadV3: distributed tensors take the two sides of a dim together",
        )
    sides = paddings.tolist() if hasattr(paddings, "tolist") else paddings
    return by_rule(
        "pad",
        input,
        tuple(sides),
        "replicate" if mode == "edge" else mode,
        **_number("value", value),
    )


def _number(name: str, value: Any) -> dict[str, Any]:
    return {} if value is None else {name: float(value)}


def _resized(mode: str) -> Callable[..., Any]:
    def run(
        input: Any, size: Any, scales: Any, align_corners: bool | None = None
    ) -> Any:
        corners = {} if align_corners is None else {"align_corners": align_corners}
        return by_rule("interpolate", input, size, scales, mode, **corners)

    return run


def _grid_sample(
    input: Any, grid: Any, mode: int, padding: int, align_corners: bool
) -> Any:
    names = ("bilinear", "nearest")[mode], ("zeros", "border", "reflection")[padding]
    return by_rule("grid_sample", input, grid, *names, align_corners)


# --- what concerns the shard alone


def _stop_gradient(input: Any) -> Any:
    return input.layout.tensor(ops.stop_gradient(input.to_local()), tuple(input.shape))


def _type_of(input: Any) -> Any:
    return ops.typeof(input.to_local())


_REWRITTEN: dict[str, Callable[..., Any]] = {
    "MatMul": _matmul,
    "BatchMatMul": _matmul,
    "BiasAdd": _bias_add,
    "Addcmul": _addcmul,
    "Addcdiv": _addcdiv,
    "MatMulExt": lambda input, other: by_rule("matmul", input, other),
    "Cross": lambda input, other, dim: by_rule("cross", input, other, None if dim == -65530 else dim),
    # A CPU lacks these kernels, or they do not take a float64 there.
    "CumsumExt": lambda input, dim, dtype=None: by_rule("cumsum", input, dim, dtype=dtype),
    "Clone": lambda input: by_rule("clone", input),
    "DiagExt": lambda *args: by_rule("diag", *args),
    "LinalgVectorNorm": lambda input, ord, dim, keepdim, dtype: by_rule(
        "vector_norm", input, ord, dim, keepdim, dtype=dtype
    ),
    "LogSoftmaxExt": lambda input, dim, dtype=None: by_rule("log_softmax", input, dim, private.dtype_of(dtype)),
    "Roll": lambda *args: by_rule("roll", *args),
    "LogSumExp": lambda *args, **kwargs: by_rule("logsumexp", *args, **kwargs),
    "MatrixInverseExt": lambda input: by_rule("inverse", input),
    "Logit": lambda input, eps=None: by_rule("logit", input, None if eps is not None and eps < 0 else eps),
    "PReLU": lambda input, weight: by_rule("prelu", input, weight),
    "CholeskySolve": lambda input, input2, upper=False: by_rule("cholesky_solve", input, input2, upper),
    "Svd": _svd,
    "Lerp": lambda *args: by_rule("lerp", *args),
    "LerpScalar": lambda *args: by_rule("lerp", *args),
    "TraceV2": _trace,
    "Gather": _gather,
    "GatherNd": _gather_nd,
    "OneHot": _one_hot,
    "OneHotExt": _one_hot,
    "StridedSlice": _strided_slice,
    "Slice": _slice,
    "Split": _split,
    "Scatter": _scatter,
    "ScatterValue": _scatter,
    "TensorScatterElements": lambda input, index, src, axis, how: _scatter(input, axis, index, src, how),
    "IndexFill": _index_fill,
    "SearchSorted": _searchsorted,
    "ReduceSum": _reduced("sum", "axis keep_dims skip_mode"),
    "ReduceMean": _reduced("mean"),
    "ReduceProd": _reduced("prod"),
    "ReduceAll": _reduced("all"),
    "DeprecatedSum": _reduced("sum", "axis dtype keepdims initial"),
    "DeprecatedMean": _reduced("mean"),
    "DeprecatedProd": _reduced("prod", "axis keep_dims dtype"),
    "DeprecatedMax": _reduced("amax", "axis keepdims initial where return_indices"),
    "DeprecatedMin": _reduced("amin", "axis keepdims initial where return_indices"),
    "DeprecatedAll": _reduced("all"),
    "DeprecatedAny": _reduced("any"),
    "DeprecatedReduceAny": _reduced("any"),
    "Argmax": _argument("argmax"),
    "Argmin": _argument("argmin"),
    "ArgMaxWithValue": _with_value("max"),
    "ArgMinWithValue": _with_value("min"),
    "DeprecatedArgmax": lambda input, axis=None, keepdims=False: by_rule("argmax", input, axis, keepdims),
    "DeprecatedArgmin": lambda input, axis=None, keepdims=False: _argument("argmin")(input, axis, None, keepdims),
    "DeprecatedVar": _variance("var"),
    "DeprecatedStd": _variance("std"),
    "Std": _std,
    "ReduceStd": _deviation,
    "CumSum": _running("cumsum"),
    "CumProd": _running("cumprod"),
    "DeprecatedCumsum": _cumsum,
    "DeprecatedSort": lambda input, axis=-1, descending=False: _ordered("sort")(input, axis, descending),
    "SortExt": _ordered("sort"),
    "ArgSort": lambda *args, **kwargs: by_rule("argsort", *args, **kwargs).astype(mindspore.int32),
    **dict.fromkeys(("InplaceIndexFillScalar", "InplaceIndexFillTensor"), _into(_index_fill)),
    **dict.fromkeys((f"InplaceScatter{by}" for by in ("Src", "SrcReduce", "Value", "ValueReduce")), _into(_scatter)),
    "TopK": lambda input, k: _ordered("topk")(input, k, -1),
    "TopkExt": _ordered("topk"),
    "LayerNorm": _layer_norm,
    "LayerNormExt": _normalized("layer_norm"),
    "GroupNorm": _normalized("group_norm"),
    "BatchNorm": _batch_norm,
    "BatchNormExt": lambda *args: _batch_norm(*args[:6], *args[:-3:-1]),  # which has the last two the other way round
    "Dropout": _dropout,
    "MSELossExt": _loss("mse_loss", "input target reduction"),
    "L1LossExt": _loss("l1_loss", "input target reduction"),
    "SmoothL1Loss": _loss("smooth_l1_loss", "input target beta reduction"),
    "KLDiv": _loss("kl_div", "input target reduction log_target"),
    "BinaryCrossEntropy": _loss("binary_cross_entropy", "input target weight reduction"),
    "BCEWithLogitsLoss": _loss("binary_cross_entropy_with_logits", "input target weight pos_weight reduction"),
    "NLLLoss": _nll_loss,
    "NLLLoss2d": _nll_loss,
    "AvgPool": _avg_pool,
    "UpsampleNearest1D": _resized("nearest"),
    "UpsampleNearest2D": _resized("nearest"),
    "UpsampleNearest3D": _resized("nearest"),
    "UpsampleLinear1D": _resized("linear"),
    "UpsampleBilinear2D": _resized("bilinear"),
    "UpsampleBicubic2D": _resized("bicubic"),
    "UpsampleTrilinear3D": _resized("trilinear"),
    "GridSampler2D": _grid_sample,
    "GridSampler3D": _grid_sample,
    "Assign": lambda target, value: target.copy_(value),
    "AssignAdd": lambda target, value: target.copy_(target + value),
    "AssignSub": lambda target, value: target.copy_(target - value),
    "StopGradient": _stop_gradient,
    "typeof": _type_of,
}  # fmt: skip

# Those that have arguments among the attributes of their primitive.
_BY_ATTRIBUTES: dict[str, Callable[..., Any]] = {
    "Sort": lambda input, axis, descending, **_: _ordered("sort")(
        input, axis, descending
    ),
    "Tril": lambda input, diagonal, **_: by_rule("tril", input, diagonal),
    "Unstack": lambda input, axis, **_: by_rule("unbind", input, axis),
    "Renorm": lambda input, p, dim, maxnorm, **_: by_rule(
        "renorm", input, p, dim, maxnorm
    ),
    "CumulativeLogsumexp": _running("logcumsumexp"),
    "IndexPut": lambda input, values, at, accumulate, **_: by_rule(
        "index_put", input, at, values, bool(accumulate)
    ),
    "Conv2D": _convolution(2),
    "Conv3D": _convolution(3),
    "MaxPool": _max_pool,
    "MaxPoolWithArgmaxV2": _max_pool_with_places,
    "AdaptiveAvgPool2D": lambda input, output_size, **_: by_rule(
        "adaptive_avg_pool2d", input, output_size
    ),
    "PadV3": _padded,
    "AffineGrid": lambda theta, size, align_corners, **_: by_rule(
        "affine_grid", theta, size, align_corners
    ),
    "KLDivLoss": lambda input, target, reduction, **_: by_rule(
        "kl_div", input, target, reduction=reduction
    ),
    "MultiMarginLoss": lambda input, target, weight, p, margin, reduction, **_: by_rule(
        "multi_margin_loss",
        input,
        target,
        p=p,
        margin=margin,
        weight=weight,
        reduction=reduction,
    ),
}


# --- primitives that do not ask: they would give a plain tensor, made of the shards


def dispatch_first(
    instead: Callable[..., Any], usual: Callable[..., Any]
) -> Callable[..., Any]:
    """Wraps a primitive that does not ask ``__fallback__``: ``instead`` runs on distributed tensors."""

    @functools.wraps(usual)
    def call(primitive: Any, *args: Any) -> Any:
        is_distributed = any(hasattr(leaf, "_layout") for leaf in _leaves(args))
        return instead(primitive, *args) if is_distributed else usual(primitive, *args)

    return call


def stack_by_rule(primitive: Any, tensors: Any) -> Any:
    """ops.Stack on distributed tensors."""
    return by_rule("stack", list(tensors), primitive.axis)


def add_n_by_rule(_primitive: Any, tensors: Any) -> Any:
    """ops.AddN on distributed tensors."""
    return functools.reduce(operator.add, tensors)
