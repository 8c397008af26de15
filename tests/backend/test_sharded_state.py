# SPDX-License-Identifier: Apache-2.0
"""What sharded data parallelism needs of a framework: memory that is freed and restored, and parts of backward."""

import frame
import numpy as np

from hyper_parallel.platform import get_platform
from hyper_parallel.testing import on_ranks

platform = get_platform()


@on_ranks(2)
def test_several_tensors_are_gathered_in_one_call():
    rank = platform.get_rank()
    sources = [frame.tensor(np.arange(3.0) + 10 * rank), frame.tensor([5.0 + rank])]
    outputs = [
        platform.zeros((6,), sources[0].dtype),
        platform.zeros((2,), sources[0].dtype),
    ]
    platform.gather_tensors(outputs, sources, None, 3).wait()
    frame.equal(outputs[0], [0, 1, 2, 10, 11, 12])
    frame.equal(outputs[1], [5, 6])


@on_ranks(2)
def test_several_tensors_are_reduced_in_one_call():
    rank = platform.get_rank()
    sources = [frame.tensor(np.arange(4.0) * (rank + 1)), frame.tensor([1.0, 2.0])]
    outputs = [
        platform.zeros((2,), sources[0].dtype),
        platform.zeros((1,), sources[0].dtype),
    ]
    platform.reduce_scatter_tensors(outputs, sources, None, 3).wait()
    frame.equal(outputs[0], [[0, 3], [6, 9]][rank])
    frame.equal(outputs[1], [[2], [4]][rank])


def test_copies_sums_and_quotients_in_place():
    target = platform.zeros((2, 3), frame.dtype("float64"))
    rows = [target[0], target[1, :2]]
    platform.copy_all(rows, [frame.tensor([1.0, 2.0, 3.0]), frame.tensor([4.0, 5.0])])
    frame.equal(target, [[1, 2, 3], [4, 5, 0]])
    part = platform.copy_part(target, (slice(1, 2), slice(1, 3)), (1, 2))
    frame.equal(part, [[5, 0]])
    platform.add_into(target, frame.tensor(np.ones((2, 3))))
    platform.divide_by(target, 2.0)
    frame.equal(target, [[1, 1.5, 2], [2.5, 3, 0.5]])
    frame.equal(part, [[5, 0]])


def test_an_alias_shares_memory_that_is_released_and_restored():
    tensor = platform.zeros((2, 3), frame.dtype("float64"))
    alias = platform.alias(tensor)
    platform.release_memory(tensor)
    platform.restore_memory(tensor)
    platform.copy_into(tensor, frame.tensor(np.full((2, 3), 4.0)))
    frame.equal(alias, np.full((2, 3), 4.0))


def test_memory_that_an_array_shares_is_kept():
    tensor = frame.tensor(np.arange(6.0))
    array = frame.array(tensor)
    platform.release_memory(tensor)
    platform.restore_memory(tensor)
    platform.copy_into(tensor, frame.tensor(np.ones(6)))
    frame.equal(tensor, np.ones(6))
    assert array.shape == (6,)


def test_a_module_reads_the_tensor_that_is_put_in_the_place_of_its_parameter():
    layer = frame.linear(2, 2)
    weight = frame.tensor(np.array([[1.0, 2.0], [3.0, 4.0]]), "float32")
    bias = frame.tensor(np.zeros(2), "float32")
    platform.put_tensor(layer, "weight", weight)
    platform.put_tensor(layer, "bias", bias)
    frame.equal(layer(frame.tensor([[1.0, 1.0]], "float32")), [[3, 7]], 1e-6)


def test_calls_before_and_after_a_part_of_backward():
    events = []
    x = frame.leaf([1.0, 2.0])
    with platform.tape():
        alias = platform.after_backward_to(x * 2, lambda: events.append("left"))
        output = alias * alias
        platform.before_backward_of([output], lambda: events.append("entered"))
        loss = (output * 3).sum()
    platform.backward([loss])
    assert events == ["entered", "left"]
    frame.equal(frame.grad(x), 24 * np.array([1.0, 2.0]))
