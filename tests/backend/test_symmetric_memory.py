# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory on real processes: what one rank writes the others read, in order, and nothing stays behind."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import frame
import numpy as np
import pytest

from hyper_parallel import CommunicationError, get_platform
from hyper_parallel.platform import shared_files, shared_memory
from hyper_parallel.testing import on_ranks

DTYPES = ["float32", "float64", "bfloat16", "int64", "uint8", "bool", "complex64"]
float32, float64, int64 = map(frame.dtype, ("float32", "float64", "int64"))


def new_handler():
    return get_platform().get_symmetric_memory_handler()


def share(*size, dtype=None, group=None):
    handler = new_handler()
    tensor = handler.empty(*size, dtype=dtype, device="cpu")
    return tensor, handler.rendezvous(tensor, group)


def put(tensor, value):
    """Fills a tensor, in its own memory."""
    get_platform().copy_into(
        tensor, get_platform().full(tuple(tensor.shape), value, tensor.dtype)
    )


def values(tensor):
    return frame.array(tensor).tolist()


def own_names():
    """The names that this process has in the directory now."""
    return list(shared_files.SHARED_DIRECTORY.glob(f"hyper_parallel_{os.getpid()}_*"))


# --- reading and writing


@pytest.mark.parametrize("name", DTYPES)
@on_ranks(4)
def test_every_rank_reads_what_the_others_wrote(name):
    dtype = frame.dtype(name)
    mine, handle = share(2, 3, dtype=dtype)
    assert (handle.rank, handle.world_size) == (get_platform().get_rank(), 4)
    assert handle.buffer_size == 6 * get_platform().get_element_size(mine)
    assert mine.shape == (2, 3)
    assert mine.dtype == dtype
    put(mine, handle.rank % 2)
    handle.barrier()
    for peer in range(4):
        theirs = handle.get_buffer(peer, (2, 3), dtype)
        assert theirs.dtype == dtype
        assert values(theirs) == [[peer % 2] * 3] * 2


@on_ranks(4)
def test_a_rank_writes_into_the_memory_of_its_peers():
    mine, handle = share(4, dtype=int64)
    put(mine, 0)
    handle.barrier()
    for peer in range(4):
        put(
            handle.get_buffer(peer, (1,), int64, storage_offset=handle.rank),
            10 * handle.rank + peer,
        )
    handle.barrier()
    assert values(mine) == [10 * sender + handle.rank for sender in range(4)]


@on_ranks(2)
def test_own_buffer_is_the_tensor_itself():
    mine, handle = share(8)
    assert handle.get_buffer(handle.rank, (8,), float32).data_ptr() == mine.data_ptr()
    assert (
        handle.get_buffer(handle.rank, (2,), float64, 2).data_ptr()
        == mine[4:].data_ptr()
    )


@on_ranks(2)
def test_buffers_outlive_tensor_and_handle():
    mine, handle = share(3)
    put(mine, handle.rank + 1)
    peer = 1 - handle.rank
    theirs = handle.get_buffer(peer, (3,), float32)
    handle.barrier()
    del mine
    gc.collect()
    assert (
        values(handle.get_buffer(handle.rank, (3,), float32)) == [handle.rank + 1.0] * 3
    )
    handle.barrier()
    handle.close()
    get_platform().barrier()
    assert values(theirs) == [peer + 1.0] * 3


@pytest.mark.parametrize("size", [(0,), (0, 3), ()])
@on_ranks(2)
def test_sizes_at_the_edge(size):
    mine, handle = share(*size)
    assert tuple(mine.shape) == size
    handle.barrier()
    assert handle.get_buffer(1 - handle.rank, size, float32).shape == size


def test_sizes_may_come_as_one_sequence_and_dtype_defaults():
    tensor = new_handler().empty([2, 5], device="cpu")
    assert tensor.shape == (2, 5)
    assert tensor.dtype == float32
    assert new_handler().empty(get_platform().list_to_size([3])).shape == (3,)


@on_ranks(4)
def test_all_reduce_by_hand_equals_all_reduce():
    data = frame.draw(64, 5, seed=get_platform().get_rank()).astype(np.float32)
    mine, handle = share(64, 5)
    total, total_handle = share(64, 5)
    for _ in range(5):
        get_platform().copy_into(mine, frame.tensor(data))
        handle.barrier()
        # Reduce-scatter: each rank adds its rows, in rank order; then it writes them to everyone.
        rows = slice(handle.rank * 16, handle.rank * 16 + 16)
        pieces = [handle.get_buffer(peer, (64, 5), float32)[rows] for peer in range(4)]
        added = pieces[0] + pieces[1] + pieces[2] + pieces[3]
        for peer in range(4):
            total_handle.get_buffer(peer, (64, 5), float32)[rows] = added
        total_handle.barrier()
        frame.equal(
            total, get_platform().all_reduce(frame.tensor(data), None), accuracy=1e-5
        )
        data = frame.array(total / 2)
        total_handle.barrier()


# --- signals


@on_ranks(4)
def test_a_ring_of_signals_carries_data_in_order():
    rounds, size = 500, 257
    mine, handle = share(size, dtype=int64)
    after, before = (handle.rank + 1) % 4, (handle.rank - 1) % 4
    outbox = handle.get_buffer(after, (size,), int64)
    for number in range(rounds):
        put(outbox, number * 4 + handle.rank)
        handle.put_signal(after)
        handle.wait_signal(before)
        assert values(mine) == [number * 4 + before] * size, number
        handle.put_signal(before, channel=1)  # it may overwrite this
        handle.wait_signal(after, channel=1)


@on_ranks(3)
def test_many_barriers_separate_rounds():
    mine, handle = share(64, dtype=int64)
    everyone = [handle.get_buffer(peer, (64,), int64) for peer in range(3)]
    for number in range(300):
        put(mine, number)
        handle.barrier(channel=number % 3)
        assert all(values(buffer) == [number] * 64 for buffer in everyone)
        handle.barrier(channel=number % 3)


@on_ranks(2)
def test_a_signal_of_one_channel_does_not_satisfy_another():
    _, handle = share(1)
    peer = 1 - handle.rank
    handle.put_signal(peer, channel=3)
    handle.barrier()
    with pytest.raises(CommunicationError, match="channel 4"):
        handle.wait_signal(peer, channel=4, timeout_ms=30)
    handle.wait_signal(peer, channel=3)
    with pytest.raises(CommunicationError, match="channel 3"):
        handle.wait_signal(peer, channel=3, timeout_ms=30)  # taken already
    handle.barrier()


@on_ranks(2)
def test_signals_and_barriers_do_not_mix():
    _, handle = share(1)
    peer = 1 - handle.rank
    handle.put_signal(peer)
    for _ in range(3):
        handle.barrier()  # the same channel
    handle.wait_signal(peer)
    with pytest.raises(CommunicationError):
        handle.wait_signal(peer, timeout_ms=30)
    handle.barrier()


@on_ranks(2)
def test_a_second_signal_waits_until_the_first_is_taken():
    _, handle = share(1)
    if handle.rank == 0:
        handle.put_signal(1)
        with pytest.raises(
            CommunicationError, match="rank 1 has not taken the signal before"
        ) as caught:
            handle.put_signal(1, timeout_ms=30)
        assert caught.value.missing == (1,)
        handle.barrier()
        handle.put_signal(1)
    else:
        handle.barrier()
        handle.wait_signal(0)
        handle.wait_signal(0)
        with pytest.raises(CommunicationError):
            handle.wait_signal(0, timeout_ms=30)


@on_ranks(2)
def test_a_rank_may_signal_itself_and_from_threads():
    _, handle = share(1)
    threads = [
        threading.Thread(target=handle.wait_signal, args=(handle.rank, 5))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for _ in threads:
        handle.put_signal(handle.rank, 5)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    handle.barrier()


# --- groups


@on_ranks(4)
def test_sub_groups_use_their_own_ranks():
    platform = get_platform()
    rank = platform.get_rank()
    members = [0, 2] if rank in (0, 2) else [1, 3]
    group = platform.create_group(members)
    mine, handle = share(2, group=group)
    assert (handle.rank, handle.world_size) == (members.index(rank), 2)
    put(mine, rank)
    handle.barrier()
    assert [
        values(handle.get_buffer(peer, (1,), float32))[0] for peer in range(2)
    ] == members
    handle.barrier()
    other = handle.world_size - 1 - handle.rank
    if handle.rank == 0:
        with pytest.raises(CommunicationError) as caught:
            handle.wait_signal(other, timeout_ms=30)
        assert caught.value.ranks == tuple(members)
        assert caught.value.missing == (
            members[1],
        )  # global ranks, as in every CommunicationError
    platform.barrier()


@on_ranks(4)
def test_one_tensor_in_several_groups():
    platform = get_platform()
    rank = platform.get_rank()
    handler = new_handler()
    mine = handler.empty(1, device="cpu")
    world = handler.rendezvous(mine)
    pair = handler.rendezvous(
        mine, platform.create_group([0, 1] if rank < 2 else [2, 3])
    )
    assert pair is not world
    put(mine, rank)
    pair.barrier()
    assert values(pair.get_buffer(1 - pair.rank, (1,), float32))[0] == rank ^ 1
    world.barrier()
    assert values(world.get_buffer(3 - rank, (1,), float32))[0] == 3 - rank


@on_ranks(2)
def test_a_second_rendezvous_gives_the_same_handle():
    handler = new_handler()
    tensor = handler.empty(4, device="cpu")
    handle = handler.rendezvous(tensor)
    assert handler.rendezvous(tensor) is handle
    assert handler.rendezvous(tensor[1:]) is handle  # the same memory
    handle.close()
    handle.close()
    with pytest.raises(RuntimeError, match="closed"):
        handle.barrier()
    again = handler.rendezvous(tensor)
    assert again is not handle
    put(tensor, again.rank)
    again.barrier()
    assert (
        values(again.get_buffer(1 - again.rank, (4,), float32))
        == [1.0 - again.rank] * 4
    )


# --- faults


@on_ranks(3)
def test_a_signal_that_never_comes_is_named_in_time():
    _, handle = share(1)
    if handle.rank == 0:
        before = time.monotonic()
        with pytest.raises(
            CommunicationError,
            match=r"rank 0: .*wait_signal on channel 7.*rank 2 sent no signal within 0\.1 s",
        ) as caught:
            handle.wait_signal(2, channel=7, timeout_ms=100)
        assert 0.1 <= time.monotonic() - before < 2
        assert (caught.value.collective, caught.value.ranks, caught.value.missing) == (
            "wait_signal",
            (0, 1, 2),
            (2,),
        )
    handle.barrier()


@on_ranks(3)
def test_who_misses_a_barrier_is_named_and_it_can_be_tried_again():
    mine, handle = share(1)
    if handle.rank == 0:
        with pytest.raises(
            CommunicationError, match=r"barrier on channel 2: .*rank 1, 2 did not come"
        ) as caught:
            handle.barrier(channel=2, timeout_ms=50)
        assert (caught.value.collective, caught.value.missing) == ("barrier", (1, 2))
    get_platform().barrier()
    for number in range(3):
        put(mine, number)
        handle.barrier(channel=2)
        assert values(handle.get_buffer(2, (1,), float32))[0] == number
        handle.barrier(channel=2)


@on_ranks(3)
def test_without_a_timeout_the_default_holds():
    _, handle = share(1)
    if handle.rank == 0:
        shared_memory.DEFAULT_TIMEOUT = 0.05
        try:
            with pytest.raises(CommunicationError, match=r"within 0\.05 s"):
                handle.wait_signal(1)
        finally:
            shared_memory.DEFAULT_TIMEOUT = 60.0
    handle.barrier()


@on_ranks(4)
def test_shapes_that_differ_raise_on_every_rank():
    handler = new_handler()
    rank = get_platform().get_rank()
    tensor = handler.empty(5 if rank == 2 else 4, device="cpu")
    with pytest.raises(
        ValueError,
        match=r"ranks \[0, 1, 3\]: \(4,\) float32 .*ranks \[2\]: \(5,\) float32",
    ):
        handler.rendezvous(tensor)
    assert own_names() == []
    tensor = handler.empty(
        4, dtype=frame.dtype("int32" if rank == 0 else "float32"), device="cpu"
    )
    with pytest.raises(
        ValueError,
        match=r"ranks \[0\]: \(4,\) int32 .*ranks \[1, 2, 3\]: \(4,\) float32",
    ):
        handler.rendezvous(tensor)


@on_ranks(2)
def test_a_tensor_from_elsewhere_raises_on_every_rank():
    handler = new_handler()
    tensor = (
        frame.tensor(np.ones(4), "float32")
        if get_platform().get_rank() == 1
        else handler.empty(4, device="cpu")
    )
    with pytest.raises(
        ValueError, match=r"on rank 1 of ranks \[0, 1\]: .*handler\.empty"
    ):
        handler.rendezvous(tensor)


@on_ranks(2)
def test_ranks_on_several_hosts_raise_on_every_rank():
    handler = new_handler()
    tensor = handler.empty(4, device="cpu")
    real, rank = shared_files.find_host, get_platform().get_rank()
    shared_files.find_host = lambda: f"host{rank}"
    try:
        with pytest.raises(
            RuntimeError, match=r"one host.*ranks \[0\]: host0; ranks \[1\]: host1"
        ):
            handler.rendezvous(tensor)
    finally:
        shared_files.find_host = real
    assert handler.rendezvous(tensor).world_size == 2  # it is not spoiled


@on_ranks(2)
def test_memory_that_cannot_be_mapped_raises_on_every_rank():
    handler = new_handler()
    tensor = handler.empty(4, device="cpu")
    real = shared_files._map
    if get_platform().get_rank() == 1:
        shared_files._map = lambda path, length: real(path + "elsewhere", length)
    try:
        with pytest.raises(
            RuntimeError, match=r"ranks \[1\] of \[0, 1\] cannot map .*No such file"
        ):
            handler.rendezvous(tensor)
    finally:
        shared_files._map = real
    assert own_names() == []


@on_ranks(2)
def test_wrong_arguments_are_named():
    handler = new_handler()
    _, handle = share(4)
    wrong = [
        (lambda: handle.put_signal(2), "rank must be 0 to 1, got 2"),
        (lambda: handle.wait_signal(-1), "rank must be 0 to 1, got -1"),
        (lambda: handle.get_buffer(2, (1,), float32), "rank must be 0 to 1, got 2"),
        (lambda: handle.barrier(channel=64), "channel must be 0 to 63, got 64"),
        (lambda: handle.barrier(timeout_ms=-5), "timeout_ms must be .* got -5"),
        (
            lambda: handle.get_buffer(0, (5,), float32),
            r"\(5,\) of .*loat32 .*the 16 bytes",
        ),
        (
            lambda: handle.get_buffer(0, (4,), float32, 1),
            "from element 1 on do not fit",
        ),
        (lambda: handle.get_buffer(0, (1,), float32, -1), "from element -1 on"),
        (lambda: handler.empty(-1), "sizes must be integers"),
        (lambda: handler.empty(1.5), "sizes must be integers"),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(RuntimeError, match="not available on device 'meta'"):
        handler.empty(1, device="meta")
    with pytest.raises(RuntimeError, match="not available on device 'meta'"):
        handler.rendezvous(get_platform().empty((1,), device="meta"))
    with pytest.raises(TypeError):
        handler.rendezvous([1.0])
    handle.barrier()


# --- nothing stays behind


@on_ranks(3)
def test_no_name_is_left_after_a_rendezvous():
    gc.collect()  # what failed calls before have left in tracebacks
    before = set(shared_memory._allocations)
    handler = new_handler()
    tensor = handler.empty(1000, device="cpu")
    assert len(own_names()) == 1
    handle = handler.rendezvous(tensor)
    assert own_names() == []
    handle.barrier()
    del tensor, handle
    gc.collect()
    assert set(shared_memory._allocations) == before


def test_a_dropped_tensor_takes_its_file_along():
    gc.collect()  # what failed calls before have left in tracebacks
    before = set(shared_memory._allocations)
    tensor = new_handler().empty(10, device="cpu")
    view = tensor[2:]
    (path,) = own_names()
    assert path.stat().st_mode & 0o777 == 0o600
    del tensor
    gc.collect()
    assert path.exists()  # the view lives
    put(view, 1)
    del view
    gc.collect()
    assert own_names() == []
    assert set(shared_memory._allocations) == before


def test_memory_and_descriptors_come_back():
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.glob("*")))
    for _ in range(50):
        new_handler().empty(1 << 20, device="cpu")
    assert len(list(descriptors.glob("*"))) == before
    assert own_names() == []


SCRIPT = """
import os, signal, sys
from hyper_parallel import get_platform
from hyper_parallel.platform import shared_files, shared_memory
platform = get_platform()
handler = platform.get_symmetric_memory_handler()
tensor = handler.empty(10, device="cpu")
(allocation,) = shared_memory._allocations.values()
print(allocation.file.address())
if sys.argv[1] == "kill":
    platform.init_process_group(None, store=platform.new_store(is_master=True), rank=0, world_size=1)
    handler.rendezvous(tensor)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_no_name_outlives_its_process(end):
    environment = dict(os.environ)
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, end],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )
    assert ran.returncode == (0 if end == "exit" else -signal.SIGKILL), ran.stderr
    assert ran.stdout.startswith(str(shared_files.SHARED_DIRECTORY))
    assert not Path(ran.stdout.strip()).exists()


def test_too_little_room_is_an_error_not_a_crash():
    with pytest.raises(RuntimeError, match=r"no room for .* bytes in .*shm-size"):
        new_handler().empty(1 << 50, dtype=frame.dtype("uint8"), device="cpu")
    assert own_names() == []
