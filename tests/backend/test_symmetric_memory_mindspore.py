# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory under MindSpore's own operators, which run later than they are called."""

import frame
import mindspore
import numpy as np
import pytest
from mindspore import mint, ops

from hyper_parallel import get_platform
from hyper_parallel.platform.mindspore import private
from hyper_parallel.testing import on_ranks

platform = get_platform()
WRITES = {
    "assign": ops.assign,
    "copy_": lambda target, value: target.copy_(value),
    "an item at a time": lambda target, value: [
        target.__setitem__(i, value[i]) for i in range(len(value))
    ],
    "a slice": lambda target, value: target.__setitem__(slice(None), value),
    "items of views": lambda target, value: (
        target[:4].__setitem__(slice(None), value[:4]),
        mint.narrow(target, 0, 4, 4).view(2, 2)[1].__setitem__(slice(None), value[:2]),
        target.view(2, 4)[1].__setitem__(slice(0, 2), value[:2]),
    ),
}


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("way", WRITES)
@on_ranks(2)
def test_what_operators_write_the_other_rank_reads(way, is_recorded):
    private.executor().set_grad_flag(is_recorded)
    memory = platform.get_symmetric_memory_handler()
    mine = memory.empty(600, 600) if way in ("assign", "copy_") else memory.empty(8)
    handle = memory.rendezvous(mine)
    peer = 1 - handle.rank
    theirs = handle.get_buffer(peer, tuple(mine.shape), mindspore.float32)
    for number in range(3):
        value = mint.matmul(mint.ones((600, 600)), mint.ones((600, 600))) * (
            number + handle.rank
        )  # takes its time
        WRITES[way](mine, value if mine.ndim == 2 else value[0, :8])
        handle.barrier()
        found = (theirs + 1).asnumpy()
        assert np.array_equal(
            found, np.full(mine.shape, 600.0 * (number + peer) + 1, np.float32)
        )
        handle.barrier()
    private.executor().set_grad_flag(False)


@on_ranks(2)
def test_what_was_called_before_a_barrier_has_read_by_then():
    memory = platform.get_symmetric_memory_handler()
    mine = memory.empty(600, 600)
    handle = memory.rendezvous(mine)
    theirs = handle.get_buffer(1 - handle.rank, (600, 600), mindspore.float32)
    platform.copy_into(mine, frame.tensor(np.ones((600, 600)), "float32"))
    handle.barrier()
    product = theirs
    for _ in range(4):
        product = mint.matmul(product, theirs) / 600
    handle.barrier()
    platform.copy_into(mine, frame.tensor(np.zeros((600, 600)), "float32"))
    handle.barrier()
    assert np.array_equal(product.asnumpy(), np.ones((600, 600), np.float32))


def test_what_cannot_be_had():
    memory = platform.get_symmetric_memory_handler()
    with pytest.raises(
        ValueError, match=r"cannot make a tensor of float8_e4m3fn .*share bytes"
    ):
        memory.empty(4, dtype=mindspore.float8_e4m3fn)
    with pytest.raises(
        RuntimeError,
        match="not available on device 'Ascend': MindSpore has none on an accelerator",
    ):
        memory.empty(4, device="npu")
