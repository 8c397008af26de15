# SPDX-License-Identifier: Apache-2.0
"""Changes of tensors in place: what is seen of them in memory, and in backward."""

import frame
import numpy as np

from hyper_parallel.platform import get_platform

platform = get_platform()


def test_a_change_that_is_recorded_is_seen_by_backward():
    x, y = frame.leaf(np.array([1.0, 2.0])), frame.leaf(np.array([5.0, 7.0]))
    changed = platform.changed(x * 1, y * 3)
    frame.equal(platform.detach(changed), np.array([15.0, 21.0]))
    frame.backward([changed * changed], [np.ones(2)])
    frame.equal(frame.grad(y), np.array([90.0, 126.0]))  # 2 (3 y) 3
    assert frame.grad(x) is None or not frame.array(frame.grad(x)).any()


def test_a_change_that_is_not_recorded_is_done_in_place():
    x = frame.tensor(np.zeros((2, 3)))
    view = x[1]
    assert platform.changed(x, frame.tensor(np.arange(6.0).reshape(2, 3), "float32")) is x
    frame.equal(x, np.arange(6.0).reshape(2, 3))
    platform.copy_into(view, frame.tensor(np.full(3, 9.0)))
    frame.equal(x, np.array([[0.0, 1.0, 2.0], [9.0, 9.0, 9.0]]))


def test_a_copy_into_a_leaf_changes_its_memory():
    x = frame.leaf(np.zeros(2))
    with platform.no_grad():
        platform.copy_into(x, frame.tensor(np.array([1.0, 2.0])))
    frame.equal(platform.detach(x), np.array([1.0, 2.0]))
