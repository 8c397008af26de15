# SPDX-License-Identifier: Apache-2.0
"""Controls: gradients of gradients that are wrong in a rule or a local function are found, and only there."""

import numpy as np
import pytest
import torch

from hyper_parallel.core.shard import operator, pointwise
from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER
from hyper_parallel.core.shard.ops import OPERATORS
from hyper_parallel.testing import check_rule

ONE_AXIS = [(2,)]


class ProductWithoutSecondOrder(torch.autograd.Function):
    """x * y with the right gradients, which forget what they depend on."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y.detach(), grad * x.detach()


@pytest.fixture
def replace_operator():
    usual = {}

    def replace(name, *row, **how):
        usual[name] = OPERATORS[name]
        operator(name, *row, **how)

    yield replace
    OPERATORS.update(usual)
    _OP_DISPATCHER.forget()


def drawn(*shape):
    return np.random.default_rng(0).standard_normal(shape)


def test_a_local_function_that_forgets_its_operands_is_found(replace_operator):
    replace_operator(
        "mul",
        "input, other",
        pointwise(2),
        local=lambda here, **operands: ProductWithoutSecondOrder.apply(
            *operands.values()
        ),
    )
    operands = drawn(4, 3), drawn(4, 3)
    assert check_rule(torch.mul, *operands, meshes=ONE_AXIS) > 0
    with pytest.raises(AssertionError, match="gradient of gradients by operand"):
        check_rule(torch.mul, *operands, meshes=ONE_AXIS, second=ONE_AXIS)


def test_a_rule_that_is_right_in_both_orders():
    operands = drawn(4, 6), drawn(6, 5)
    first = check_rule(torch.mm, *operands, meshes=ONE_AXIS)
    assert (
        check_rule(torch.mm, *operands, meshes=ONE_AXIS, second=ONE_AXIS) == first > 3
    )
