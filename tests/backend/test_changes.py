# SPDX-License-Identifier: Apache-2.0
"""Changes of tensors in place: what is seen of them in memory, and in backward."""

import warnings

import frame
import numpy as np

from hyper_parallel import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.shard.custom_shard import custom_shard
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
    assert (
        platform.changed(x, frame.tensor(np.arange(6.0).reshape(2, 3), "float32")) is x
    )
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
    values, others = (
        distribute_tensor(frame.tensor(np.arange(6.0).reshape(3, 2)), mesh, [Shard(0)])
        for _ in range(2)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is run on whole tensors
        result = DTensor.dispatch(overwritten, (values, others), {})
    frame.equal(values.full_tensor(), np.array([[7.0, 7.0], [2.0, 3.0], [4.0, 5.0]]))
    frame.equal(others.full_tensor(), np.arange(6.0).reshape(3, 2))
    frame.equal(result.full_tensor(), np.arange(6.0).reshape(3, 2) + 1)


# --- what was communicated is remembered for the next who asks, but not past a change

VALUES = np.arange(8.0).reshape(4, 2)


def cut(values=VALUES):
    """(mesh, a recorded result of operators that lies in shards)."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    return mesh, distribute_tensor(frame.leaf(values), mesh, [Shard(0)]) * 1


def whole(tensor):
    return platform.detach(tensor.redistribute().to_local())


@on_ranks(2)
def test_a_whole_tensor_that_its_owner_changes_is_nobody_elses():
    for ask in (lambda x: x.full_tensor(), lambda x: platform.detach(x).full_tensor()):
        _, x = cut()
        frame.equal(whole(x), VALUES)  # is remembered
        if platform.get_rank() == 0:  # the others go on as they would have
            platform.copy_into(platform.detach(ask(x)), frame.tensor(np.zeros((4, 2))))
        else:
            ask(x)
        frame.equal(whole(x), VALUES)
        frame.equal(platform.detach(ask(x)), VALUES)


@on_ranks(2)
def test_an_array_of_a_tensor_is_nobody_elses():
    _, x = cut()
    frame.equal(whole(x), VALUES)
    found = platform.detach(x).numpy() if frame.IS_TORCH else x.asnumpy()
    found[...] = 0
    frame.equal(whole(x), VALUES)


@on_ranks(2)
def test_a_change_of_a_distributed_tensor_is_seen_by_who_asks_next():
    mesh, x = cut()
    frame.equal(whole(x), VALUES)
    x[0] = 5.0
    expected = VALUES.copy()
    expected[0] = 5.0
    frame.equal(whole(x), expected)
    x.copy_(distribute_tensor(frame.tensor(VALUES + 1), mesh, [Shard(0)]))
    frame.equal(whole(x), VALUES + 1)


@on_ranks(2)
def test_a_change_of_the_tensor_that_a_distributed_one_was_made_of_is_seen():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    plain = frame.leaf(np.ones((2, 2))) * 1
    x = DTensor.from_local(plain, mesh, [Shard(0)])
    view = x.reshape(8)
    for given in (x, view):
        frame.equal(whole(given), np.ones(given.shape))
    with platform.no_grad():
        plain[0] = 3.0
    for given in (x, view):
        frame.equal(whole(given), np.tile([3.0, 3.0, 1.0, 1.0], 2).reshape(given.shape))


@on_ranks(2)
def test_a_change_of_a_leaf_is_seen_through_its_views():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    leaf = distribute_tensor(frame.leaf(VALUES), mesh, [Shard(0)])
    view = leaf.reshape(8)
    frame.equal(whole(view), VALUES.reshape(8))
    with platform.no_grad():
        platform.copy_into(leaf.to_local(), frame.tensor(np.zeros((2, 2))))
    frame.equal(whole(view), np.zeros(8))


@on_ranks(2)
def test_a_function_on_shards_that_changes_them_is_seen():
    mesh, x = cut()
    frame.equal(whole(x), VALUES)

    def overwrite(shard):
        with platform.no_grad():
            platform.copy_into(shard, frame.tensor(np.zeros((2, 2))))
        return shard * 1

    rows = [Shard(0)]
    custom_shard(overwrite, mesh, rows, [rows])(x)
    frame.equal(whole(x), np.zeros((4, 2)))


@on_ranks(2)
def test_of_what_others_have_no_version_is_known_where_nobody_counts():
    _, x = cut()
    result, alias = x._local, (x * 1)._local
    assert platform.version_of(result) is not None
    platform.mark_escaped(result)
    platform.mark_alias(alias, result)
    known = platform.counts_changes
    assert [platform.version_of(one) is not None for one in (result, alias)] == [
        known,
        known,
    ]
    with platform.no_grad():
        platform.copy_into(result, frame.tensor(np.zeros((2, 2))))
    frame.equal(whole(x), np.zeros((4, 2)))


@on_ranks(2)
def test_what_is_not_changed_is_communicated_once():
    mesh, x = cut()
    with CommunicationLedger(mesh) as ledger:
        for _ in range(3):
            frame.equal(
                platform.detach((x.redistribute(None, [Replicate()]) * 2).to_local()),
                VALUES * 2,
            )
    assert [entry.collective for entry in ledger.entries] == ["all_gather_into_tensor"]
