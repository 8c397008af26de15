# SPDX-License-Identifier: Apache-2.0
"""Changes of tensors in place: what is seen of them in memory, and in backward."""

import warnings

import frame
import numpy as np

from hyper_parallel import DTensor, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.platform import get_platform
from hyper_parallel.testing import on_ranks

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


def overwritten(values, others):
    """Has no rule, and changes what it gets."""
    values[0] = 7.0
    return others + 1


@on_ranks(2)
def test_what_a_function_without_a_rule_changes_is_kept():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    values, others = (distribute_tensor(frame.tensor(np.arange(6.0).reshape(3, 2)), mesh, [Shard(0)]) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is run on whole tensors
        result = DTensor.dispatch(overwritten, (values, others), {})
    frame.equal(values.full_tensor(), np.array([[7.0, 7.0], [2.0, 3.0], [4.0, 5.0]]))
    frame.equal(others.full_tensor(), np.arange(6.0).reshape(3, 2))
    frame.equal(result.full_tensor(), np.arange(6.0).reshape(3, 2) + 1)
