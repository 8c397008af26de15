# SPDX-License-Identifier: Apache-2.0
"""Operators by the names of the rules, gradients of a function, and what is remembered about a tensor."""

import gc
import weakref

import frame
import numpy as np
import pytest

from hyper_parallel import get_platform

platform = get_platform()


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("matmul", ([[1.0, 2.0]], [[3.0], [4.0]]), [[11.0]]),
        ("sum", ([[1.0, 2.0], [3.0, 4.0]], 1, True), [[3.0], [7.0]]),
        ("softmax", ([[0.0, 0.0]], 1), [[0.5, 0.5]]),
        ("amax", ([[1.0, 5.0], [7.0, 2.0]], (1,), False), [5.0, 7.0]),
        ("where", ([True, False], [1.0, 2.0], [3.0, 4.0]), [1.0, 4.0]),
    ],
)
def test_names_lead_to_functions_and_back(name, arguments, expected):
    function = platform.operator(name)
    assert platform.get_op_name(function) == name
    assert (
        platform.op_name_of(function).name,
        platform.op_name_of(function).inplace,
    ) == (
        name,
        False,
    )
    tensors = [
        frame.tensor(np.array(a)) if isinstance(a, list) else a for a in arguments
    ]
    frame.equal(function(*tensors), expected, 1e-6)


def test_names_that_are_none():
    with pytest.raises(AttributeError, match="no operator 'no_such_operator'"):
        platform.operator("no_such_operator")
    with pytest.raises(TypeError, match="expected an operator, got int"):
        platform.get_op_name(3)


def test_keywords_by_the_rules_names():
    assert platform.canonical_kwargs({"axis": 1, "alpha": 2}) == {"dim": 1, "alpha": 2}


def test_gradients_of_a_function():
    x, y = frame.tensor([1.0, 2.0]), frame.tensor([3.0, 4.0])
    dx, dy = platform.gradients(lambda a, b: (a * a * b).sum(), [x, y])
    frame.equal(dx, [6.0, 16.0])
    frame.equal(dy, [1.0, 4.0])
    assert not platform.requires_grad(x)


def test_what_is_recorded():
    x = frame.leaf([1.0, 2.0])
    assert platform.is_recorded(x)
    assert platform.is_recorded(x * 2)
    assert not platform.is_recorded(platform.detach(x))
    assert not platform.is_recorded(frame.tensor([1.0]))
    with platform.no_grad():
        assert not platform.is_recorded(x)


def test_memory_lives_with_its_tensor_and_does_not_keep_it():
    x = frame.tensor([1.0, 2.0])
    platform.memory_of(x)["made"] = made = frame.tensor([3.0])
    assert platform.memory_of(x)["made"] is made
    gone = weakref.ref(x)
    del x, made
    gc.collect()
    assert gone() is None


def test_seeds():
    platform.manual_seed(3)
    first, second = platform.draw_seed(), platform.draw_seed()
    assert first != second
    platform.manual_seed(3)
    assert (platform.draw_seed(), platform.draw_seed()) == (first, second)
    platform.manual_seed(5)
    expected = [frame.array(platform.rand((2,))) for _ in range(2)]
    platform.manual_seed(5)
    frame.equal(platform.rand((2,)), expected[0])
    with platform.seeded(9):
        drawn = frame.array(platform.rand((3,)))
    frame.equal(platform.rand((2,)), expected[1])  # as if nothing had been drawn
    with platform.seeded(9):
        frame.equal(platform.rand((3,)), drawn)
