# SPDX-License-Identifier: Apache-2.0
"""Rows of collectives, in memory that the ranks of a host share or in buffers of their own."""

import contextlib
import json
import os
import subprocess
import sys
from datetime import timedelta

import frame
import numpy as np
import pytest

from hyper_parallel import CommunicationError, get_platform
from hyper_parallel.platform.shared_channel import Address, Channel
from hyper_parallel.testing import on_ranks

LENGTH = 6
VARIABLE = "HYPER_PARALLEL_SHARE_MEMORY"


def numbers(rank, length=LENGTH, turn=0):
    return np.arange(length, dtype="float32") + 10 * rank + 100 * turn


@contextlib.contextmanager
def sharing(on):
    """A group whose ranks share memory, or do not."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1" if on else "0"
    try:
        yield get_platform().split_group(None, [[0, 1]], timeout=10)
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def float32():
    return get_platform().str_to_dtype("float32")


@pytest.mark.parametrize("on", [True, False])
@on_ranks(2)
def test_rows_are_gathered_in_place(on):
    platform = get_platform()
    rank = platform.get_rank()
    with sharing(on) as group:
        for turn in range(5):
            rows = platform.take_rows(LENGTH, float32(), group)
            assert rows.is_shared == (on and frame.IS_TORCH)
            platform.copy_into(rows.own, frame.tensor(numbers(rank, turn=turn)))
            platform.gather_tensors([], [], group, rows=rows).wait()
            for other, row in enumerate(rows.read()):
                frame.equal(row, numbers(other, turn=turn))
            rows.release()


@pytest.mark.parametrize("on", [True, False])
@on_ranks(2)
def test_rows_travel_along_with_tensors(on):
    platform = get_platform()
    rank = platform.get_rank()
    with sharing(on) as group:
        rows = platform.take_rows(LENGTH, float32(), group)
        platform.copy_into(rows.own, frame.tensor(numbers(rank)))
        source, output = (
            frame.tensor(numbers(rank, 2)),
            frame.tensor(np.zeros(4, "float32")),
        )
        platform.gather_tensors([output], [source], group, rows=rows).wait()
        frame.equal(output, np.concatenate([numbers(0, 2), numbers(1, 2)]))
        for other, row in enumerate(rows.read()):
            frame.equal(row, numbers(other))
        rows.release()


@pytest.mark.parametrize("on", [True, False])
@on_ranks(2)
def test_outgoing_rows_are_summed(on):
    platform = get_platform()
    rank = platform.get_rank()
    with sharing(on) as group:
        for turn in range(3):
            rows = platform.take_rows(LENGTH, float32(), group, is_outgoing=True)
            sent = np.stack(
                [numbers(rank + 3 * other, turn=turn) for other in range(2)]
            )
            platform.copy_into(rows.own, frame.tensor(sent))
            output = frame.tensor(np.zeros(LENGTH, "float32"))
            platform.reduce_scatter_tensors([output], [], group, rows=rows).wait()
            expected = sum(numbers(other + 3 * rank, turn=turn) for other in range(2))
            frame.equal(output, expected)
            rows.release()


@on_ranks(2)
def test_memory_is_used_again_when_all_have_read_it():
    platform = get_platform()
    rank = platform.get_rank()
    with sharing(on=True) as group:
        first = platform.take_rows(LENGTH, float32(), group)
        second = platform.take_rows(LENGTH, float32(), group)
        for number, rows in enumerate((first, second)):
            platform.copy_into(rows.own, frame.tensor(numbers(rank, turn=number)))
        handles = [
            platform.gather_tensors([], [], group, rows=rows)
            for rows in (first, second)
        ]
        for handle in reversed(handles):
            handle.wait()
        for number, rows in enumerate((first, second)):
            for other, row in enumerate(rows.read()):
                frame.equal(row, numbers(other, turn=number))
            rows.release()


@on_ranks(2)
def test_one_rank_that_does_not_share_is_enough():
    platform = get_platform()
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(platform.get_rank())
    try:
        group = platform.split_group(None, [[0, 1]], timeout=10)
        rows = platform.take_rows(LENGTH, float32(), group)
        assert not rows.is_shared
        rows.release()
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


@pytest.mark.skipif(not frame.IS_TORCH, reason="MindSpore shares no memory")
@on_ranks(2, timeout=30)
def test_ranks_that_have_started_different_collectives_are_told_so():
    platform = get_platform()
    with sharing(on=True) as group:
        rows = platform.take_rows(LENGTH + 4096 * platform.get_rank(), float32(), group)
        with pytest.raises(
            (RuntimeError, CommunicationError),
            match="different collectives|sizes|bytes",
        ):
            platform.gather_tensors([], [], group, rows=rows).wait()
            rows.read()
        rows.release()


@pytest.mark.skipif(not frame.IS_TORCH, reason="MindSpore shares no memory")
@on_ranks(2, timeout=30)
def test_a_rank_that_never_starts_is_named():
    platform = get_platform()
    group = platform.split_group(None, [[0, 1]], timeout=1)
    rows = platform.take_rows(LENGTH, float32(), group)
    if platform.get_rank() == 0:
        with pytest.raises(CommunicationError) as raised:
            platform.gather_tensors([], [], group, rows=rows).wait()
        assert raised.value.missing == (1,)
    rows.release()
    platform.barrier()


PEER = """
import json, sys
from hyper_parallel.platform.shared_channel import Channel
channel = Channel(1, 2)
print(json.dumps(channel.address("host")), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
@pytest.mark.skipif(not frame.IS_TORCH, reason="MindSpore shares no memory")
def test_a_rank_whose_process_has_ended_is_named():
    from hyper_parallel.platform.torch.rows import SharedWork

    peer = subprocess.Popen(
        [sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    channel = Channel(0, 2)
    channel.connect(
        [channel.address("host"), Address(*json.loads(peer.stdout.readline()))]
    )
    number = channel.publish(channel.take(4096))
    work = SharedWork(channel, number, timedelta(seconds=20))
    assert channel.missing(number) == [1]
    assert channel.ended() == []
    with pytest.raises(RuntimeError, match="timed out after"):
        work.wait(timedelta(seconds=0.1))
    peer.kill()
    peer.communicate()
    assert channel.ended() == [1]
    assert work.is_completed()
    with pytest.raises(
        RuntimeError, match=r"the processes of ranks \[1\] of the group have ended"
    ):
        work.wait()
