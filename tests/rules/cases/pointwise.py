# SPDX-License-Identifier: Apache-2.0
"""Calls of pointwise operators: what is linear, what broadcasts, what arguments do. test_pointwise.py has all names."""

from rules.framework import IS_TORCH, F, its, real, torch
from rules.operators import OpCase

from hyper_parallel import DTensor

R2, R3 = "...[-2] ...[-1]", "...[-3] ...[-2] ...[-1]"


def op(name, call, shapes, shards=R2, carries=0, sizes=("uneven",), **more):
    return OpCase(name, call, shapes, shards, carries, sizes=sizes, **more)


CASES = [
    op("relu", torch.relu, "abc", R3, sizes=("even", "uneven", "empty")),
    op("gelu", lambda x: F.gelu(x, approximate="tanh"), "ab"),
    op("silu of a scalar", F.silu, ".", ""),
    op("neg", lambda x: -x, "ab", carries=2),
    op("positive", lambda x: +x, "ab", carries=5),
    op("real", real, "ab", carries=2),
    op("conj", torch.conj, "ab", carries=5),
    op("deg2rad", torch.deg2rad, "ab", carries=2),
    op("round to decimals", lambda x: its(x).round(decimals=1), "ab"),
    op("frexp", torch.frexp, "ab"),
    op("glu", lambda x: F.glu(x, 1), "a6b"),
    op("polygamma", lambda x: torch.polygamma(1, x), "ab", positive=(0,)),
    op("polygamma as a method", lambda x: its(x).polygamma(2), "ab", positive=(0,)),
    # two
    op("add", torch.add, "ab ab", carries=2, sizes=("even", "uneven", "empty")),
    op("add, scaled", lambda x, y: torch.add(x, y, alpha=3), "ab b", carries=2),
    op(
        "add, scaled by a tensor",
        lambda x, y, a: x.sub(y, alpha=a),
        "ab b .",
        carries=2,
        ints={2: 4},
    ),
    op("add zero", lambda x: 0 + x, "ab", carries=2),
    op("add both ways", lambda x, y: x + y, "1b a1", carries=2),
    op("add a number", lambda x: x + 1, "ab"),
    op("add a scalar", lambda x, y: x + y, "ab .", carries=2),
    op("sub", lambda x, y: x - y, "abc b1", R3, 2),
    op("sub from a number", lambda x: 1.0 - x, "ab"),
    op("rsub", torch.rsub, "ab ab", carries=2),
    op("mul", lambda x, y: x * y, "ab a1", carries=4),
    op("mul by a number", lambda x: 2.5 * x, "ab", carries=2),
    op("div", lambda x, y: x / y, "ab b", carries=2),
    op("div by a number", lambda x: x / 3, "ab", carries=2),
    op("div, rounded", lambda x, y: torch.div(x, y, rounding_mode="floor"), "ab b"),
    op("div of a number", lambda x: 1 / x, "ab"),
    op("pow", lambda x: x**2, "ab"),
    op("pow of a number", lambda x: 2**x, "ab"),
    op("pow of two", torch.pow, "ab b", positive=(0,)),
    op("remainder of a number", lambda x: 5 % x, "ab", ints={0: 9}, sizes=()),
    op("compare", lambda x, y: x > y, "ab a1"),
    op("equals a number", lambda x: x == 1, "ab", ints={0: 3}),
    op("and", lambda x, y: x & y, "ab b", bools=(0, 1)),
    op("not", lambda x: ~x, "ab", bools=(0,)),
    op("shift", lambda x: x << 2, "ab", ints={0: 5}),
    op("shift a number", lambda x: 1 << x, "ab", ints={0: 5}),
    op("ldexp", torch.ldexp, "ab b", carries=2, ints={1: 3}),
    op("isclose", lambda x, y: torch.isclose(x, y, atol=0.5), "ab b"),
    op("isin", torch.isin, "ab 3", ints={0: 9, 1: 9}),
    op("prelu", F.prelu, "ab3 b", "d0 d1 d2"),
    op("prelu with one weight", F.prelu, "ab 1", "d0 d1"),
    # three
    op("clamp", lambda x: x.clamp(-1, 1), "ab"),
    op("clamp below", lambda x, low: torch.clamp(x, min=low), "ab b"),
    op("clip between tensors", lambda x, low, high: x.clip(low, high), "ab b a1"),
    op(
        "addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=2), "ab b a1", carries=4
    ),
    op(
        "addcmul by a tensor",
        lambda x, y, z, v: x.addcmul(y, z, value=v),
        "ab b a1 .",
        carries=4,
        ints={3: 4},
    ),
    op("addcdiv", lambda x, y, z: its(x).addcdiv(y, z), "ab b a1", carries=2),
    op("lerp", torch.lerp, "ab ab b", carries=2),
    op("lerp by a number", lambda x, y: x.lerp(y, 0.3), "ab b", carries=2),
    op("where", torch.where, "ab b ab", carries=2, bools=(0,)),
    op("where, a number", lambda c, x: torch.where(c, x, 1.5), "ab b", bools=(0,)),
    op(
        "where, else zero",
        lambda c, x: torch.where(c, x, 0.0),
        "ab b",
        carries=2,
        bools=(0,),
    ),
    op(
        "where as a method",
        lambda x, c, y: x.where(c, y),
        "b ab a1",
        carries=2,
        bools=(1,),
    ),
    op("where of booleans", torch.where, "ab b ab", bools=(0, 1, 2)),
    op("masked_fill", lambda x, m: x.masked_fill(m, -1e9), "ab b", bools=(1,)),
    op(
        "masked_fill by zero",
        lambda x, m: x.masked_fill(m, 0),
        "ab b",
        carries=2,
        bools=(1,),
    ),
    op("masked_fill by a scalar", torch.masked_fill, "ab b .", carries=2, bools=(1,)),
    # casts
    op(
        "to another floating type",
        lambda x: x.to(torch.float32),
        "ab",
        carries=2,
        sizes=(),
    ),  # rounded
    op("to an integer", lambda x: x.to(dtype=torch.int64), "ab"),
    op("from an integer", lambda x: x.double(), "ab", ints={0: 9}),
    op("long", lambda x: x.long(), "ab"),
    op("bool", lambda x: x.bool(), "ab"),
    op("type", lambda x: x.type(torch.int32), "ab"),
    op("a copy", lambda x: x.to(torch.float64, copy=True), "ab", carries=5),
]


def filled(change):
    """The change in place of a tensor that is not a leaf, so that gradients are seen too."""

    def call(x, *others):
        target = x * 1
        found = change(target, *others)
        if IS_TORCH or isinstance(
            target, DTensor
        ):  # MindSpore's own changes nothing, in silence, but gives the result
            assert found is target
        return found * 3

    return call


def added_into(x, y, z):
    with torch.no_grad():
        return torch.add(x, y, out=z.clone())


COMPOSITES = [
    op("to itself", lambda x: x.to("cpu", torch.float64), "ab"),
    op("cpu", lambda x: x.cpu().double().type(torch.float64), "ab"),
    op("to as another", lambda x, y: x.to(y), "ab c"),
    op("type_as", lambda x, y: x.type_as(y), "ab c"),
    op("down and up", lambda x: real(x.to(torch.complex128)).to(torch.float64), "ab"),
    op(
        "view_as_real",
        lambda x: torch.view_as_real(torch.view_as_complex(x) * 1j),
        "ab2",
    ),
    op("complex", lambda x, y: torch.view_as_real(torch.complex(x, y)), "ab b"),
    op(
        "polar",
        lambda x, y: torch.view_as_real(torch.polar(x, y)),
        "ab b",
        positive=(0,),
    ),
    op("imag", lambda x: torch.view_as_complex(x).imag, "ab2"),
    op("add_", filled(lambda x, y: x.add_(y, alpha=2)), "ab b"),
    op("+= a number", filled(lambda x: x.__iadd__(1)), "ab"),
    op("mul_", filled(lambda x, y: x.mul_(y)), "ab a1"),
    op("relu_", filled(torch.relu_), "ab"),
    op("relu in place", filled(lambda x: F.relu(x, inplace=True)), "ab"),
    op("clamp_", filled(lambda x, y: x.clamp_(min=y)), "ab b"),
    op("masked_fill_", filled(lambda x, m: x.masked_fill_(m, 2.0)), "ab b", bools=(1,)),
    op("addcmul_", filled(lambda x, y, z: x.addcmul_(y, z, value=0.5)), "ab ab b"),
    op("lerp_", filled(lambda x, y: x.lerp_(y, 0.25)), "ab ab"),
    op("copy_", filled(lambda x, y: x.copy_(y)), "ab ab"),
    op("copy_ of less dims", filled(lambda x, y: x.copy_(y)), "ab b"),
    op("copy_ of integers", filled(lambda x, y: x.copy_(y)), "ab a1", ints={1: 5}),
    op("fill_", filled(lambda x: x.fill_(2.5)), "ab"),
    op("fill_ by a tensor", filled(lambda x, y: x.fill_(y)), "ab ."),
    op("fill", lambda x: torch.fill(x, 2.5), "ab"),
    op("zero_", filled(lambda x: x.zero_()), "ab"),
    op("out=", added_into, "ab b ab"),
]
