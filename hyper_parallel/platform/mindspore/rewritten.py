# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002, A006 - operands have the names that the rules give them
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

from hyper_parallel.platform.mindspore.operators import NAMES, Operation, function


def rewritten(operation: Operation) -> Callable[..., Any] | None:
    """What does the work of an operator on distributed tensors; None if a rule does."""
    name = operation.name
    if name in _REWRITTEN:
        return _REWRITTEN[name]
    if name in _BY_ATTRIBUTES:
        return lambda *args: _BY_ATTRIBUTES[name](*args, **operation.attributes)
    if name.startswith("Inplace") and name != "InplaceCopy":
        return lambda target, *args, **kwargs: _changed(name.removeprefix("Inplace"), target, args, kwargs)
    return None


def by_rule(name: str, *args: Any, **kwargs: Any) -> Any:
    """An operator by the name and with the arguments of the rules."""
    kind = next(type(tensor) for tensor in _leaves(args) if hasattr(tensor, "_layout"))
    return kind.dispatch(function(name), args, kwargs)


def _leaves(tree: Any) -> list[Any]:
    return [leaf for item in tree for leaf in _leaves(item)] if isinstance(tree, (list, tuple)) else [tree]


def _changed(name: str, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    known = NAMES[name][0] if name in NAMES else name.lower()
    return target.copy_(by_rule(known, target, *args, **kwargs))


# --- products


def _matmul(input: Any, other: Any, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    left = mint.transpose(input, -1, -2) if transpose_a else input
    right = mint.transpose(other, -1, -2) if transpose_b else other
    return mint.matmul(left, right)


def _bias_add(input: Any, bias: Any, data_format: Any = 0) -> Any:  # noqa: ARG001 - channels are dim 1 in both
    return input + (bias if input.ndim == 2 else bias.reshape((-1, *(1,) * (input.ndim - 2))))


def _addcmul(input: Any, tensor1: Any, tensor2: Any, value: Any) -> Any:
    return input + tensor1 * tensor2 * value


def _addcdiv(input: Any, tensor1: Any, tensor2: Any, value: Any) -> Any:
    return input + tensor1 / tensor2 * value


# --- lookups


def _gather(input: Any, index: Any, axis: int, batch_dims: int = 0) -> Any:
    if batch_dims:
        raise NotImplementedError("ops.gather: batch_dims is not supported for distributed tensors")
    if axis % input.ndim == 0 and input.ndim == 2:
        return by_rule("embedding", index, input)
    if index.ndim == 1:
        return by_rule("index_select", input, axis, index)
    return input[(slice(None),) * (axis % input.ndim) + (index,)]


def _one_hot(index: Any, depth: int, on: Any, off: Any, axis: int = -1) -> Any:
    if axis != -1:
        raise NotImplementedError("ops.one_hot: distributed tensors get the new dim at the end; take axis=-1")
    found = by_rule("one_hot", index, depth)
    return found.astype(on.dtype) * (on - off) + off


def _strided_slice(input: Any, begin: Any, end: Any, strides: Any, *masks: int) -> Any:
    if any(masks):
        raise NotImplementedError("ops.strided_slice: masks are not supported for distributed tensors; index it")
    return input[tuple(map(slice, begin, end, strides))]


# --- reductions


def _reduced(name: str) -> Callable[..., Any]:
    def reduce(input: Any, axis: Any = None, keepdims: bool = False, *_: Any, **more: Any) -> Any:
        dims = None if axis in (None, (), []) else axis
        keep = more.get("keep_dims", keepdims)
        return by_rule(name, input) if dims is None and not keep else by_rule(name, input, dims, keep)

    return reduce


def _argument(name: str) -> Callable[..., Any]:
    def find(input: Any, axis: Any = None, kind: Any = None, keepdims: bool = False) -> Any:  # noqa: ARG001
        return by_rule(name, input, axis, keepdims).astype(mindspore.int32)

    return find


def _variance(input: Any, axis: Any = None, ddof: int = 0, keepdims: bool = False) -> Any:
    return by_rule("var", input, axis, correction=ddof, keepdim=keepdims)


def _deviation(input: Any, axis: Any = (), unbiased: bool = True, keep_dims: bool = False) -> Any:
    dims = None if axis in (None, (), []) else axis
    return by_rule("std", input, dims, correction=int(unbiased), keepdim=keep_dims), by_rule(
        "mean", input, dims, keep_dims
    )


def _running(name: str) -> Callable[..., Any]:
    def run(input: Any, axis: int, exclusive: bool = False, reverse: bool = False) -> Any:
        if exclusive or reverse:
            raise NotImplementedError(f"ops.{name}: exclusive and reverse are not supported for distributed tensors")
        return by_rule(name, input, axis)

    return run


def _topk(input: Any, k: int) -> Any:
    return by_rule("topk", input, k, -1)


# --- norms


def _layer_norm(input: Any, weight: Any, bias: Any, begin: int = -1, _: int = -1, epsilon: float = 1e-7) -> Any:
    """The normalized tensor; the mean and the deviation, which only its own backward needs, are left out."""
    shape = tuple(input.shape)[begin % input.ndim :]
    return by_rule("layer_norm", input, shape, weight, bias, epsilon), None, None


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
    "Gather": _gather,
    "OneHot": _one_hot,
    "StridedSlice": _strided_slice,
    "ReduceSum": _reduced("sum"),
    "DeprecatedSum": _reduced("sum"),
    "ReduceMean": _reduced("mean"),
    "DeprecatedMean": _reduced("mean"),
    "ReduceProd": _reduced("prod"),
    "DeprecatedProd": _reduced("prod"),
    "DeprecatedMax": _reduced("amax"),
    "DeprecatedMin": _reduced("amin"),
    "DeprecatedAll": _reduced("all"),
    "DeprecatedAny": _reduced("any"),
    "Argmax": _argument("argmax"),
    "Argmin": _argument("argmin"),
    "DeprecatedArgmax": lambda input, axis=None, keepdims=False: _argument("argmax")(input, axis, None, keepdims),
    "DeprecatedArgmin": lambda input, axis=None, keepdims=False: _argument("argmin")(input, axis, None, keepdims),
    "DeprecatedVar": _variance,
    "ReduceStd": _deviation,
    "CumSum": _running("cumsum"),
    "CumProd": _running("cumprod"),
    "TopK": _topk,
    "LayerNorm": _layer_norm,
    "Assign": lambda target, value: target.copy_(value),
    "AssignAdd": lambda target, value: target.copy_(target + value),
    "AssignSub": lambda target, value: target.copy_(target - value),
    "StopGradient": _stop_gradient,
    "typeof": _type_of,
}  # fmt: skip

# Those that have arguments among the attributes of their primitive.
_BY_ATTRIBUTES: dict[str, Callable[..., Any]] = {
    "Sort": lambda input, axis, descending, **_: by_rule("sort", input, axis, descending),
    "Tril": lambda input, diagonal, **_: by_rule("tril", input, diagonal),
}


# --- primitives that do not ask: they would give a plain tensor, made of the shards


def _asks_first(kind: Any, instead: Callable[..., Any]) -> None:
    usual = kind.__call__

    @functools.wraps(usual)
    def call(primitive: Any, *args: Any) -> Any:
        is_distributed = any(hasattr(leaf, "_layout") for leaf in _leaves(args))
        return instead(primitive, *args) if is_distributed else usual(primitive, *args)

    kind.__call__ = call


_asks_first(ops.Stack, lambda primitive, tensors: by_rule("stack", list(tensors), primitive.axis))
_asks_first(ops.AddN, lambda _, tensors: functools.reduce(operator.add, tensors))
