# SPDX-License-Identifier: Apache-2.0
"""A call of each name in the table of pointwise operators."""

from dataclasses import replace

from rules.framework import F, function_called, torch
from rules.operators import OpCase

from hyper_parallel.core.shard.ops import pointwise
from hyper_parallel.core.shard.ops.operator import OPERATORS
from hyper_parallel.core.shard.rule import Rule

RULES = {
    "one": (pointwise.ONE, 1),
    "two": (pointwise.TWO, 2),
    "linear": (pointwise.SCALED, 1),
}
ELSEWHERE = {
    "imag",
    "polar",
    "igamma",
    "igammac",
    "gammainc",
    "gammaincc",
}  # for complex numbers; without a gradient
INTEGERS = {  # of which there are no floating ones, or no gradient
    "bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift",
    "__rlshift__", "__rrshift__", "floor_divide", "rfloordiv", "gcd", "lcm", "zeta", "heaviside",
}  # fmt: skip
ARGUMENTS = {"mvlgamma": (1,), "multigammaln": (2,), "threshold": (0.5, 2.0)}
SPELLED = {
    "_threshold": lambda x: F.threshold(x, 0.5, 2.0),
    "log_sigmoid": F.logsigmoid,
    "rpow": torch.Tensor.__rpow__,
    "rfloordiv": torch.Tensor.__rfloordiv__,
    "rremainder": torch.Tensor.__rmod__,
}


def case_of(name, count):
    function, more = SPELLED.get(name) or function_called(name), ARGUMENTS.get(name, ())
    ints = dict.fromkeys(range(count), 5) if name in INTEGERS else {}
    positive = tuple(range(count))
    shapes = " ".join(["35"] * count)
    return OpCase(
        f"{name}, by name",
        lambda *x: function(*x, *more),
        shapes,
        ints=ints,
        positive=positive,
    )


DEPENDS = {"neg": pointwise.SCALED}  # on the dtype: what it is for these operands


def is_like(name, op, rule):
    """Whether an operator has this rule, whatever the table says of orders."""
    own = op.family == pointwise.__name__ and isinstance(op.rule, Rule)
    alike = own and replace(op.rule, orders=(), finite=False) == rule
    return alike or op.rule is rule or DEPENDS.get(name) is rule


NAMES = {
    kind: [
        name
        for name, op in OPERATORS.items()
        if is_like(name, op, rule) and name not in ELSEWHERE
    ]
    for kind, (rule, _) in RULES.items()
}
BY_NAME = {
    kind: [case_of(name, RULES[kind][1]) for name in names]
    for kind, names in NAMES.items()
}
