# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002, A006 - operands have the names that torch gives them
"""Element by element: every dim may be cut, dims of size one stretch, and a pending sum passes what is linear.

add   "..., ... -> ..." linear in both together     mul   linear in either     div   linear in the first

A number that is added is the same on every rank and would be added once a rank, so that a sum does not pass it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.routes import adopt_after_inplace, local_for
from hyper_parallel.core.shard.arguments import one_mesh
from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.rule import Order, Rule, falling, move, pointwise, rising
from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform

platform = get_platform()

ONE, TWO, THREE = pointwise(1), pointwise(2), pointwise(3)
SAME = move("... -> ...")
SCALED = pointwise(1, linear=0)
# A maximum of values that rise together is that of the largest: only for what is monotone on all numbers, to within
# its own rounding, and gives a nan for a nan. So not sign, fmax or nan_to_num, and the root of a minimum alone.
RISING = pointwise(1, orders=rising(0))
FALLING = pointwise(1, orders=falling(0))
SCALED_UP = pointwise(1, linear=0, orders=rising(0))
NEGATED = pointwise(1, linear=0, orders=falling(0))

# --- one tensor

operator(
    "abs acos acosh angle arccos arccosh arcsin arctanh asin atanh bitwise_not cos cosh "
    "digamma erfcx erfinv frac gammaln i0 i0e i1 i1e isfinite isinf isnan "
    "isneginf isposinf isreal lgamma log log10 log1p log2 log_ndtr log_sigmoid logical_not ndtr ndtri entr psi "
    "reciprocal rsqrt sgn sign signbit sin sinc softsign square tan tanhshrink "
    "bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 "
    "modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 airy_ai spherical_bessel_j0",
    "input",
    ONE,
)
operator(
    "arcsinh arctan asinh atan ceil erf exp exp2 expit expm1 fix floor sigmoid sinh tanh trunc",
    "input",
    RISING,
)
operator("erfc", "input", FALLING)
operator(
    "sqrt", "input", pointwise(1, orders=(Order((0,), "min", "min"),))
)  # a negative part makes both a nan
operator("relu relu6", "input, inplace=False", RISING)
operator("hardsigmoid hardswish mish selu silu", "input, inplace=False", ONE)
operator("celu elu", "input, alpha=1.0, inplace=False", ONE)
operator("gelu", "input, approximate='none'", ONE)
operator("hardshrink softshrink", "input, lambd=0.5", ONE)
operator("hardtanh", "input, min_val=-1.0, max_val=1.0, inplace=False", RISING)
operator("leaky_relu", "input, negative_slope=0.01, inplace=False", ONE)
operator("logit", "input, eps=None", ONE)
operator("mvlgamma multigammaln", "input, p", ONE)
operator("nan_to_num", "input, nan=None, posinf=None, neginf=None", ONE)
operator("round", "input, decimals=0", RISING)
operator("softplus", "input, beta=1, threshold=20", ONE)
operator("threshold _threshold", "input, threshold, value, inplace=False", ONE)
operator("frexp", "input", Rule("... -> ..., ..."))
operator(
    "neg", "input", lambda input: NEGATED if is_real(input.dtype) else SCALED
)  # the least integer stays itself
operator("deg2rad rad2deg", "input", SCALED_UP)
operator("positive conj resolve_conj resolve_neg", "input", SAME, view="maybe")
operator("conj_physical", "input", SCALED)
operator("real imag", "input", SCALED, view="maybe")


def _view_as_real(**_: Any) -> RuleForCall:
    return RuleForCall(
        Rule("... -> ... pair!", linear=((0,),), broadcast="none"), {"pair": 2}
    )


def _glu(input: Any, dim: int) -> Any:
    return (
        RuleForCall(
            Rule("... {dim}! -> ... {dim=half}!"), {"half": input.shape[dim] // 2}
        )
        if input.shape
        else None
    )


def _polygamma(n: Any, input: Any) -> RuleForCall:
    return RuleForCall(
        ONE, operands=[n if isinstance(n, DTensor) else input]
    )  # as a method it has the tensor first


def _complex_shard(here: ShardContext, input: Any) -> Any:
    # An empty shard may have strides that torch does not accept here.
    return here.function(
        input if input.numel() else input.reshape(-1).reshape(input.shape)
    )


PAIRS = Rule("... pair! -> ...", linear=((0,),), broadcast="none")
operator("view_as_complex", "input", PAIRS, local=_complex_shard, view=True)
operator("view_as_real", "input", _view_as_real, view=True)
operator("glu", "input, dim=-1", _glu)
operator("polygamma", "n, input", _polygamma)


def is_zero(value: Any) -> bool:
    """Whether it is the number zero, which is the same as nothing in a sum."""
    return isinstance(value, (bool, int, float, complex)) and value == 0


# --- two tensors, or a tensor and a number

EITHER = rising(0, 1)
operator(
    "maximum",
    "input, other",
    pointwise(2, orders=(*EITHER, Order((0, 1), "max", "max"))),
)
operator(
    "minimum",
    "input, other",
    pointwise(2, orders=(*EITHER, Order((0, 1), "min", "min"))),
)
operator(
    "eq ne lt le gt ge fmax fmin fmod remainder floor_divide logical_and logical_or logical_xor "
    "bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift __rlshift__ __rrshift__ atan2 arctan2 "
    "copysign hypot logaddexp logaddexp2 nextafter xlogy xlog1py gcd lcm igamma igammac gammainc gammaincc zeta "
    "rpow rfloordiv rremainder",
    "input, other",
    TWO,
)
operator("pow float_power", "input, exponent", TWO)
operator("heaviside", "input, values", TWO)
operator("isclose", "input, other, rtol=1e-05, atol=1e-08, equal_nan=False", TWO)
operator(
    "chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w "
    "shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v "
    "shifted_chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l "
    "legendre_polynomial_p",
    "input, n",
    TWO,
)


def _with_factor(rule: Rule, operands: list[Any], factor: Any) -> Any:
    """A factor (alpha, value) may be a tensor without dims, which optimizers make of a learning rate."""
    if not isinstance(factor, DTensor):
        return rule
    return RuleForCall(
        Rule(rule.text.replace(" ->", ", ->"), linear=rule.linear),
        operands=[*operands, factor],
    )


def _sum(input: Any, other: Any, alpha: Any) -> Any:
    if is_zero(
        other
    ):  # where Python's sum() begins: nothing is added, and what is pending passes
        return _with_factor(
            SCALED_UP if is_real(getattr(input, "dtype", None)) else SCALED,
            [input],
            alpha,
        )
    return _with_factor(TOGETHER, [input, other], alpha)


def _ordered(signs: tuple[int, int]) -> Callable[..., Any]:
    """A sum of two with these signs: a maximum of one passes where all ranks have the other."""

    def rule(input: Any, other: Any, alpha: Any) -> Any:
        given = input, other
        is_plain = isinstance(alpha, int) and alpha == 1
        if not is_plain or (is_zero(other) and signs[0] > 0):
            return _sum(input, other, alpha) if signs[0] > 0 else TOGETHER
        orders: tuple[Order, ...] = ()
        for number, sign in enumerate(signs):
            if is_real(getattr(given[number], "dtype", None)) and _is_on_all_ranks(
                given[1 - number]
            ):
                orders += rising(number) if sign > 0 else falling(number)
        return (
            pointwise(2, linear=[(0, 1)], orders=orders, finite=True)
            if orders
            else TOGETHER
        )

    return rule


def _is_on_all_ranks(value: Any) -> bool:
    """Whether every rank of the mesh has the same, and so finds the same in it: a number without infinities."""
    if isinstance(value, DTensor):
        is_complex = platform.dtype_kind(value.dtype) == "complex"
        return not is_complex and all(
            placement.is_replicate() for placement in value.layout.placements
        )
    return isinstance(value, (bool, int, float)) and math.isfinite(value)


TOGETHER = pointwise(2, linear=[(0, 1)])
operator("add", "input, other, *, alpha=1", _ordered((1, 1)))
operator("sub", "input, other, *, alpha=1", _ordered((1, -1)))
operator("rsub", "input, other, alpha=1", _ordered((-1, 1)))
operator("complex", "real, imag", pointwise(2, linear=[(0, 1)]))
operator("mul", "input, other", pointwise(2, linear=[0, 1]))
operator("ldexp", "input, other", pointwise(2, linear=0))
operator(
    "polar", "abs, angle", TWO
)  # its gradient takes the first to be positive, which parts need not be
operator("rdiv", "input, other", pointwise(2, linear=1))


def _div(rounding_mode: str | None, **_: Any) -> Rule:
    return TWO if rounding_mode is not None else pointwise(2, linear=0)


def _prelu(input: Any, weight: Any) -> Any:
    """A weight for each channel, which is dim 1; or one for all."""
    names = [f"d{i}" for i in range(len(input.shape))]
    dims = " ".join(names)
    of_weight = (
        "" if not weight.shape else "one!" if tuple(weight.shape) == (1,) else names[1]
    )
    return Rule(f"{dims}, {of_weight} -> {dims}", broadcast="none")


def _isin(test_elements: Any, **_: Any) -> Any:
    tested = " ".join(f"t{i}!" for i in range(len(getattr(test_elements, "shape", ()))))
    return Rule(f"..., {tested} -> ...")


operator("div", "input, other, *, rounding_mode=None", _div)
operator("prelu", "input, weight", _prelu)
operator("isin", "elements, test_elements, *, assume_unique=False, invert=False", _isin)

# --- three tensors

operator("clamp clip", "input, min=None, max=None", pointwise(3, orders=rising(0)))
operator("clamp_min", "input, min", pointwise(2, orders=rising(0)))
operator("clamp_max", "input, max", pointwise(2, orders=rising(0)))


def _added_to(rule: Rule) -> Any:
    return lambda input, tensor1, tensor2, value: _with_factor(
        rule, [input, tensor1, tensor2], value
    )


ADDED = "input, tensor1, tensor2, *, value=1"
operator("addcmul", ADDED, _added_to(pointwise(3, linear=[(0, 1), (0, 2)])))
operator("addcdiv", ADDED, _added_to(pointwise(3, linear=[(0, 1)])))
operator("lerp", "input, end, weight", pointwise(3, linear=[(0, 1)]))


def _where(condition: Any, input: Any, other: Any) -> Any:
    """Linear in what is taken together. As a method it has the condition second."""
    if input is None or other is None:
        return None  # the places where it holds: how many depends on the data
    given = [condition, input, other]
    truth = platform.str_to_dtype("bool")
    conditions = [
        i for i, value in enumerate(given) if getattr(value, "dtype", None) == truth
    ]
    if conditions not in ([0], [1]):
        return THREE
    taken = tuple(i for i in range(3) if i not in conditions and not is_zero(given[i]))
    return pointwise(3, linear=[taken]) if taken else THREE


def _masked_fill(value: Any, **_: Any) -> Rule:
    return pointwise(3, linear=[(0,) if is_zero(value) else (0, 2)])


operator("where", "condition, input=None, other=None", _where)
operator("masked_fill", "input, mask, value", _masked_fill)

# --- another dtype or device


def is_inexact(dtype: Any) -> bool:
    """Whether a dtype is a floating-point or complex one."""
    return dtype is not None and platform.dtype_kind(dtype) in ("float", "complex")


def is_real(dtype: Any) -> bool:
    """Whether a dtype is a floating-point one that overflows to infinity: none of eight bits, and no complex one."""
    is_float = dtype is not None and platform.dtype_kind(dtype) == "float"
    return is_float and "float8" not in str(dtype).lower()


def itself(input: Any, **_: Any) -> Any:
    """The tensor that was given."""
    return input


# The classes of dtypes; some frameworks have several.
_KINDS = ("bool", "int32", "uint8", "float32", "bfloat16", "complex64")
DTYPE = tuple({type(platform.str_to_dtype(name)) for name in _KINDS})


def _cast(input: Any, dtype: Any) -> Any:
    """torch gives the tensor itself where nothing changes: what is done to it in place is seen in both."""
    if dtype == input.dtype:
        return itself
    if is_real(dtype) and platform.dtype_kind(input.dtype) != "complex":
        return SCALED_UP if is_inexact(input.dtype) else RISING
    return SCALED if is_inexact(input.dtype) and is_inexact(dtype) else ONE


def _to(
    input: Any,
    to: Any = (),
    dtype: Any = None,
    device: Any = None,
    other: Any = None,
    **more: Any,
) -> Any:
    if any(isinstance(value, DTensor) for value in (*to, other)):
        return _to_like
    dtype = next((value for value in to if isinstance(value, DTYPE)), dtype)
    device = next(
        (
            value
            for value in to
            if not isinstance(value, (bool, *DTYPE)) and value is not None
        ),
        device,
    )
    if dtype not in (None, input.dtype):
        return _cast(input, dtype)
    stays = str(device or input.device) == str(input.device) and True not in to
    return (
        itself if stays and not more["copy"] and more["memory_format"] is None else SAME
    )


def _to_like(input: Any, to: Any = (), other: Any = None, **more: Any) -> Any:
    """Of the other tensor only the dtype and the device count."""
    like = other if other is not None else to[0]
    more |= {
        **dict(zip(("non_blocking", "copy"), to[1:], strict=False)),
        "device": like.device,
        "dtype": like.dtype,
    }
    return input.to(**more)


def _type(input: Any, dtype: Any, **_: Any) -> Any:
    if dtype is None:
        return lambda input, **_: platform.operator("type")(input._local)  # its name
    return _cast(input, dtype)


def _to_dtype(name: str) -> Any:
    return lambda input, memory_format: (
        _cast(input, platform.str_to_dtype(name)) if memory_format is None else None
    )


def _to_device(name: str) -> Any:
    def rule(input: Any, device: Any, memory_format: Any, **_: Any) -> Any:
        stays = str(input.device) == name and device is None and memory_format is None
        return itself if stays else SAME

    return rule


operator(
    "to",
    "input, *to, dtype=None, device=None, other=None, non_blocking=False, copy=False, memory_format=None",
    _to,
    any_layout=True,
)
operator("type", "input, dtype=None, non_blocking=False", _type)
operator(
    "type_as",
    "input, other",
    handler=lambda input, other: input.to(dtype=other.dtype, device=other.device),
    any_layout=True,
)
DTYPES = {
    "byte": "uint8",
    "char": "int8",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "double": "float64",
}
DTYPES |= {
    "half": "float16",
    "float": "float32",
    "cfloat": "complex64",
    "cdouble": "complex128",
}
for _name in ("bool", "bfloat16", *DTYPES):
    operator(_name, "input, memory_format=None", _to_dtype(DTYPES.get(_name, _name)))
for _name in ("cpu", "cuda", "npu", "xpu"):
    operator(
        _name,
        "input, device=None, non_blocking=False, memory_format=None",
        _to_device(_name),
    )

# --- other values in a tensor


def _copy(input: Any, src: Any, non_blocking: bool) -> Any:
    one_mesh("copy_", [input, src])
    if src.shape != input.shape:
        src = src.expand(tuple(input.shape))
    if not is_inexact(input.dtype) or not is_inexact(src.dtype):
        src = src.reduce_partial()  # such a cast is not linear
    adopt_after_inplace(
        input,
        platform.changed(input._local, local_for(src, input._layout), non_blocking),
    )
    return input


def _zero(input: Any) -> Any:
    # Parts of zero are zero, whatever the reduction.
    adopt_after_inplace(
        input, platform.changed(input._local, platform.full_like(input._local, 0))
    )
    return input


operator("fill", "input, value", pointwise(2, linear=1))
operator("copy", "input, src, non_blocking=False", handler=_copy, any_layout=True)
operator("zero", "input", handler=_zero, any_layout=True)

# --- one answer of all ranks


def _equal(input: Any, other: Any) -> bool:
    return tuple(input.shape) == tuple(other.shape) and bool((input == other).all())


def _allclose(**arguments: Any) -> bool:
    return bool(platform.operator("isclose")(**arguments).all())


operator("equal", "input, other", handler=_equal)
operator(
    "allclose",
    "input, other, rtol=1e-05, atol=1e-08, equal_nan=False",
    handler=_allclose,
)
