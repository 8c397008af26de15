# SPDX-License-Identifier: Apache-2.0
"""What torch's functions are called in the rules, and how their arguments are named.

``torch.add``, ``Tensor.add_``, ``x += y`` and ``torch.ops.aten.add.Tensor`` are one operator, ``add``. Names of torch
are the canonical ones, so the tables hold only what differs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it

from hyper_parallel.platform.platform import OpName

# What an operator is called where torch's own name is another one, or stands for something else.
NAMES: dict[Any, str] = {
    F.unfold: "im2col",
    F.fold: "col2im",
    torch.adaptive_max_pool1d: "adaptive_max_pool1d_with_indices",  # always, unlike torch.nn.functional's
    torch.embedding: "embedding_of_weight",  # which comes first here
    torch.embedding_bag: "embedding_bag_of_weight",
    torch.Tensor.__rsub__: "rsub",
    torch.Tensor.__rdiv__: "rdiv",
    torch.Tensor.__rpow__: "rpow",
    torch.Tensor.__rmatmul__: "rmatmul",
    torch.Tensor.__rfloordiv__: "rfloordiv",
    torch.Tensor.__rmod__: "rremainder",
    torch.linalg.vector_norm: "vector_norm",
}

_SAME_AS = {
    "__abs__": "abs",
    "__add__": "add",
    "__and__": "bitwise_and",
    "__div__": "div",
    "__eq__": "eq",
    "__floordiv__": "floor_divide",
    "__ge__": "ge",
    "__getitem__": "getitem",
    "__gt__": "gt",
    "__invert__": "bitwise_not",
    "__le__": "le",
    "__lshift__": "bitwise_left_shift",
    "__lt__": "lt",
    "__matmul__": "matmul",
    "__mod__": "remainder",
    "__mul__": "mul",
    "__ne__": "ne",
    "__neg__": "neg",
    "__or__": "bitwise_or",
    "__pow__": "pow",
    "__radd__": "add",
    "__rand__": "bitwise_and",
    "__rmul__": "mul",
    "__ror__": "bitwise_or",
    "__rshift__": "bitwise_right_shift",
    "__rxor__": "bitwise_xor",
    "__setitem__": "setitem",
    "__sub__": "sub",
    "__truediv__": "div",
    "__xor__": "bitwise_xor",
    "absolute": "abs",
    "adjoint": "mH",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "linalg_matmul": "matmul",
    "linalg_matrix_norm": "matrix_norm",
    "linalg_multi_dot": "multi_dot",
    "linalg_vector_norm": "vector_norm",
    "moveaxis": "movedim",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "true_divide": "div",
}

# In place they fill a tensor with random numbers; the names without "_" are other operators, or none.
_FILLS = {
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
}

# Operators on lists of tensors: with "_" at the end and without it they are two operators.
_LISTS = ("_foreach_", "_fused_", "_amp_")

# Parameters that have several names.
_PARAMETERS = {
    "self": "input",
    "tensor": "input",
    "axis": "dim",
    "keepdims": "keepdim",
    "split_size_or_sections": "split_size",
    "axis0": "dim0",
    "axis1": "dim1",
    "tensors": "input",
    "x1": "input",
    "x2": "other",
}


@functools.cache
def op_name_of(func: Any) -> OpName:
    """What a function of torch is called."""
    if func in NAMES:
        return OpName(NAMES[func], False, _parameters(func))
    if isinstance(func, torch._ops.OpOverload):
        func = func.overloadpacket
    if isinstance(func, torch._ops.OpOverloadPacket):
        return _called_in_ops(func)
    name = getattr(func, "__name__", type(func).__name__)
    if name in (
        "__get__",
        "__set__",
    ):  # a property such as Tensor.T, which arrives as its getter
        return OpName(func.__self__.__name__, False, None)
    if getattr(func, "__module__", None) == "torch.nn.init":
        return OpName("init", True, _parameters(func))
    if name in _FILLS or name.startswith(_LISTS):
        return OpName(name, name.endswith("_"), None)
    return _spelled(name, _parameters(func))


def _called_in_ops(packet: Any) -> OpName:
    namespace, _, name = packet._qualified_op_name.partition("::")
    if namespace != "aten":
        return OpName(f"{namespace}::{name}", False, None)
    return (
        OpName(name, name.endswith("_"), None)
        if name.startswith(_LISTS)
        else _spelled(name, None)
    )


def _spelled(name: str, parameters: tuple[str, ...] | None) -> OpName:
    inplace = name.endswith("_") and not name.endswith("__")
    if name.startswith("__i") and name not in _SAME_AS:
        name, inplace = "__" + name[3:], True
    name = name.rstrip("_") if inplace and not name.endswith("__") else name
    name = name.removeprefix("special_")
    return OpName(_SAME_AS.get(name, name), inplace, parameters)


def _parameters(func: Any) -> tuple[str, ...] | None:
    """The names of the positional parameters, where Python knows them."""
    if not inspect.isfunction(func):
        return None
    try:
        found = inspect.signature(func).parameters.values()
    except ValueError:  # a function of C in a Python wrapper, such as Tensor.__pow__
        return None
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in found):
        return None
    return tuple(_PARAMETERS.get(parameter.name, parameter.name) for parameter in found)


def canonical_kwargs(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords by the names that the rules use."""
    return {_PARAMETERS.get(name, name): value for name, value in keywords.items()}


# Where functions are found by their names; those of torch.fft and torch.linalg call themselves fft_* and linalg_*.
_ROOMS = (
    F,
    torch,
    torch.Tensor,
    torch.linalg,
    *(getattr(torch._C, name) for name in ("_fft", "_linalg", "_nn")),
)


@functools.cache
def function(name: str) -> Callable[..., Any]:
    """The function of torch that an operator's name stands for."""
    for room in _ROOMS:
        found = getattr(
            room, f"__{name}__" if name in ("getitem", "setitem") else name, None
        )
        if callable(found):
            return found
    if not name.startswith("__") and hasattr(
        torch.ops.aten, name
    ):  # such as _grouped_mm, which only others call
        packet: Callable[..., Any] = getattr(torch.ops.aten, name)
        return packet
    raise AttributeError(f"torch has no operator {name!r}")
