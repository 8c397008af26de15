# SPDX-License-Identifier: Apache-2.0
"""Local calls where a rank has nothing: results and gradients that are right, and the graph that other ranks have."""

import frame
import numpy as np
import pytest

from hyper_parallel.platform import get_platform

platform = get_platform()


def test_operands_that_a_result_does_not_depend_on_get_zeros():
    used, unused, empty = (
        frame.leaf(np.ones((2, 3))),
        frame.leaf(np.ones(4)),
        frame.leaf(np.ones((0, 3))),
    )
    result = platform.keep_in_graph(used * 2, [used, unused, empty])
    frame.equal(result, np.full((2, 3), 2.0))
    frame.backward([result], [np.full((2, 3), 5.0)])
    frame.equal(frame.grad(used), np.full((2, 3), 10.0))
    frame.equal(frame.grad(unused), np.zeros(4))
    frame.equal(frame.grad(empty), np.zeros((0, 3)))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, row: (x + row).sum(), 0.0),
        (lambda x, row: ((x * row) * (row * x)).sum() + (row * 0).sum(), 0.0),
        (lambda x, row: (x - row).sum(0).sum(), 0.0),
        (lambda x, row: (x[:, :2] * row[:2]).sum() + (row * 0).sum(), 0.0),
    ],
)
def test_functions_of_nothing(function, expected):
    for _ in range(3):  # what is left unset is sometimes zero
        x, row = frame.leaf(np.ones((0, 3))), frame.leaf(np.arange(3.0))
        result = platform.call_where_empty(function, (x, row))
        frame.equal(result, np.float64(expected))
        frame.backward([result], [np.float64(1.0)])
        frame.equal(frame.grad(x), np.zeros((0, 3)))
        frame.equal(frame.grad(row), np.zeros(3))


def test_what_has_elements_is_as_always():
    x, row = frame.leaf(np.ones((2, 3))), frame.leaf(np.arange(3.0))
    result = platform.call_where_empty(
        lambda x, row: {"sum": (x * row).sum()}, (x,), {"row": row}
    )["sum"]
    frame.equal(result, np.float64(6.0))
    frame.backward([result], [np.float64(1.0)])
    frame.equal(frame.grad(x), np.tile(np.arange(3.0), (2, 1)))
    frame.equal(frame.grad(row), np.full(3, 2.0))
