# SPDX-License-Identifier: Apache-2.0
"""Plain collectives against their definitions, for every dtype, layout in memory, group and way of waiting."""

import math
import os
import threading
import time

import frame
import numpy as np
import pytest

from hyper_parallel import CommunicationError, get_platform
from hyper_parallel.platform.platform import P2POp
from hyper_parallel.testing import on_ranks

FLOATS = ["float32", "float64", "float16", "bfloat16"]
NUMBERS = [*FLOATS, "int32", "int64", "int8", "uint8"]
MOVED = [
    *NUMBERS,
    "bool",
    "complex64",
    "int16",
    "uint32",
    *(["float8_e4m3fn"] if frame.IS_TORCH else []),
]


def numbers(rank, shape=(4, 3)):
    """Small numbers that tell the ranks and the places apart and are exact in every dtype."""
    return ((np.arange(math.prod(shape)) * 3 + rank * 2) % 5).reshape(shape)


def of_rank(rank, dtype="float32", shape=(4, 3)):
    drawn = numbers(rank, shape)
    return (
        frame.tensor(drawn, dtype)
        if "float" in dtype
        else frame.tensor(drawn.astype(dtype))
    )


def reduced(op, dtype, ranks):
    """As numpy reduces; whole numbers wrap round in their dtype."""
    whole = frame.REDUCTIONS[op](
        np.stack([frame.array(of_rank(r, dtype)).astype(np.float64) for r in ranks])
    )
    return whole if dtype in FLOATS else whole.astype(dtype)


def elements(tensor):
    """The bytes of the elements, one after the other."""
    return get_platform().tensor_memory(tensor).tobytes()


def ones(*shape, dtype="float32"):
    return frame.tensor(np.ones(shape, dtype))


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("op", sorted(frame.REDUCTIONS))
@on_ranks(4)
def test_all_reduce_and_reduce_scatter(op, async_op):
    platform = get_platform()
    rank = platform.get_rank()
    for dtype in NUMBERS:
        if op == "avg" and dtype not in FLOATS:
            continue
        expected = reduced(op, dtype, range(4))
        accuracy = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6}.get(
            dtype, 1e-12
        )
        data = of_rank(rank, dtype)
        result = platform.all_reduce(data, None, async_op, op)
        if async_op:
            result, handle = result
            assert handle.wait()
            assert handle.is_completed()
        assert result is data  # in place
        assert result.dtype == frame.dtype(dtype)
        frame.equal(result, expected, accuracy)
        data = of_rank(rank, dtype)
        result = platform.reduce_scatter_tensor(data, None, async_op, op)
        if async_op:
            result, handle = result
            handle.wait()
        assert result.dtype == frame.dtype(dtype)
        frame.equal(result, expected[rank : rank + 1], accuracy)
        frame.equal(data, frame.array(of_rank(rank, dtype)))  # the input is left alone


@pytest.mark.parametrize(
    "shape", [(128, 128), (130, 127), (1 << 15,)]
)  # 64 KiB of float32, a little more, and twice
@on_ranks(4)
def test_large_and_small_tensors_take_different_ways_to_one_result(shape):
    platform = get_platform()
    rank = platform.get_rank()
    everyone = [numbers(r, shape) for r in range(4)]
    for dtype in ("float32", "int64", "int16"):
        mine = of_rank(rank, dtype, shape)
        frame.equal(
            platform.all_gather_into_tensor(mine, None), np.concatenate(everyone)
        )
        if dtype != "int16":
            frame.equal(platform.all_reduce(mine, None), sum(everyone))


@on_ranks(2)
def test_collectives_do_not_take_the_users_messages():
    platform = get_platform()
    rank = platform.get_rank()
    waiting = frame.tensor(np.zeros(1 << 15))
    receive = platform.irecv(waiting, 1 - rank)
    mine = np.full(1 << 15, float(rank))
    gathered = platform.all_gather_into_tensor(frame.tensor(mine), None)
    assert frame.array(gathered).reshape(2, -1)[:, 0].tolist() == [0.0, 1.0]
    send = platform.isend(frame.tensor(mine + 10), 1 - rank)
    receive.wait()
    send.wait()
    assert frame.array(waiting)[0] == 11 - rank


@on_ranks(4)
def test_every_rank_gets_the_same_bits():
    platform = get_platform()
    for count in (100, 1 << 15):
        data = frame.tensor(frame.draw(count, seed=platform.get_rank()), "float32")
        everyone = platform.all_gather_into_tensor(
            platform.all_reduce(data, None), None
        )
        assert (
            len({row.tobytes() for row in frame.array(everyone).reshape(4, count)}) == 1
        )


@on_ranks(2)
def test_reductions_of_bools_are_any_and_all():
    platform = get_platform()
    rank = platform.get_rank()
    mine = np.array([rank == 0, True, False, rank == 1])
    for op, expected in (
        ("sum", [1, 1, 0, 1]),
        ("prod", [0, 1, 0, 0]),
        ("max", [1, 1, 0, 1]),
        ("min", [0, 1, 0, 0]),
    ):
        assert elements(platform.all_reduce(frame.tensor(mine), None, op=op)) == bytes(
            expected
        )
        half = platform.reduce_scatter_tensor(frame.tensor(mine), None, op=op)
        assert elements(half) == bytes(expected[2 * rank : 2 * rank + 2])


@on_ranks(2)
def test_tensors_with_gaps_in_memory():
    platform = get_platform()
    rank = platform.get_rank()
    backing = np.arange(16.0).reshape(4, 4)
    expected = 2 * backing + 1
    for view in (
        lambda x: x[:, ::2],
        lambda x: x.T,
        lambda x: x[1:3, 1],
        lambda x: x[2, 3],
    ):
        mine = frame.tensor(backing + rank)
        result = platform.all_reduce(view(mine), None)
        frame.equal(result, view(expected))
        frame.equal(view(mine), view(expected))
    mine = frame.tensor(backing + rank)
    platform.broadcast(mine[:, 1], 1, None)
    frame.equal(mine[:, 1], backing[:, 1] + 1)
    frame.equal(mine[:, 0], backing[:, 0] + rank)
    gathered = platform.all_gather_into_tensor(frame.tensor(backing + rank).T, None)
    frame.equal(gathered, np.concatenate([backing.T + r for r in range(2)]))
    whole = frame.tensor(backing + rank)
    mine, handle = platform.all_reduce(whole[:, ::2], None, async_op=True)
    handle.wait()
    frame.equal(mine, expected[:, ::2])
    frame.equal(whole[:, ::2], expected[:, ::2])
    frame.equal(whole[:, 1::2], backing[:, 1::2] + rank)


@pytest.mark.parametrize("async_op", [False, True])
@on_ranks(4)
def test_data_of_every_dtype_travels(async_op):
    platform = get_platform()
    rank = platform.get_rank()

    def got(result):
        if async_op:
            result[1].wait()
            return result[0]
        return result

    def same(actual, dtype, shape, data):
        assert actual.dtype == frame.dtype(dtype)
        assert tuple(actual.shape) == shape
        assert elements(actual) == data

    for dtype in MOVED:
        everyone = [elements(of_rank(r, dtype)) for r in range(4)]
        row = len(everyone[0]) // 4
        gathered = got(
            platform.all_gather_into_tensor(of_rank(rank, dtype), None, async_op)
        )
        same(gathered, dtype, (16, 3), b"".join(everyone))
        same(
            got(platform.broadcast(of_rank(rank, dtype), 2, None, async_op)),
            dtype,
            (4, 3),
            everyone[2],
        )
        output, work = platform.all_to_all_single(
            of_rank(rank, dtype), (4, 3), None, async_op
        )
        assert (work is None) is not async_op
        if work is not None:
            work.wait()
        same(
            output,
            dtype,
            (4, 3),
            b"".join(x[rank * row : (rank + 1) * row] for x in everyone),
        )


@on_ranks(4)
def test_scalars_empty_tensors_and_subgroups():
    platform = get_platform()
    rank = platform.get_rank()
    assert frame.array(
        platform.all_gather_into_tensor(frame.tensor(float(rank)), None)
    ).tolist() == [0, 1, 2, 3]
    total = platform.all_reduce(frame.tensor(float(rank)), None)
    assert (tuple(total.shape), frame.array(total)) == ((), 6)
    for call in (
        platform.all_reduce,
        platform.all_gather_into_tensor,
        platform.reduce_scatter_tensor,
    ):
        assert tuple(call(frame.tensor(np.ones((0, 3))), None).shape) == (0, 3)
    pair = platform.create_group([rank % 2, rank % 2 + 2])
    gathered = platform.all_gather_into_tensor(frame.tensor([rank]), pair)
    assert frame.array(gathered).tolist() == [rank % 2, rank % 2 + 2]
    assert frame.array(
        platform.broadcast(frame.tensor([rank]), rank % 2 + 2, pair)
    ).tolist() == [rank % 2 + 2]
    piece = platform.reduce_scatter_tensor(frame.tensor([rank, 10 * rank]), pair)
    assert frame.array(piece).tolist() == [(rank % 2 * 2 + 2) * (1 if rank < 2 else 10)]


@on_ranks(4)
def test_point_to_point():
    platform = get_platform()
    rank = platform.get_rank()
    sent = platform.isend(frame.tensor(np.full(3, float(rank))), (rank + 1) % 4)
    buffer = frame.tensor(np.zeros((3, 2)))
    platform.irecv(buffer[:, 1], (rank - 1) % 4).wait()  # into a view with gaps
    assert frame.array(buffer).tolist() == [[0.0, float((rank - 1) % 4)]] * 3
    sent.wait()
    if rank == 0:
        senders = set()
        for _ in range(3):
            anyone = frame.tensor([0.0])
            platform.irecv(anyone).wait()
            senders.add(frame.array(anyone).item())
        assert senders == {1.0, 2.0, 3.0}
    else:
        platform.isend(frame.tensor([float(rank)]), 0).wait()


@on_ranks(2)
def test_tags_keep_messages_apart():
    platform = get_platform()
    if platform.get_rank() == 0:
        works = [
            platform.isend(frame.tensor([float(tag)]), 1, tag=tag) for tag in (1, 2)
        ]
        for work in works:
            work.wait()
    else:
        for tag in (2, 1):
            buffer = frame.tensor([0.0])
            platform.irecv(buffer, 0, tag=tag).wait()
            assert frame.array(buffer).item() == tag


@on_ranks(4)
def test_a_batch_of_sends_and_receives():
    """Receives come first in every list: a backend that waited for them in order would deadlock."""
    platform = get_platform()
    rank = platform.get_rank()
    after, before = (rank + 1) % 4, (rank - 1) % 4
    buffers = [frame.tensor(np.zeros(3)) for _ in range(2)]
    works = platform.batch_p2p(
        [
            P2POp("recv", buffers[0], before),
            P2POp("recv", buffers[1], after, tag=1),
            P2POp("send", frame.tensor(np.full(3, float(rank))), before, tag=1),
            P2POp("send", frame.tensor(np.full(3, 10.0 * rank)), after),
        ]
    )
    for work in works:
        work.wait()
    assert frame.array(buffers[0]).tolist() == [10.0 * before] * 3
    assert frame.array(buffers[1]).tolist() == [float(after)] * 3
    pair = platform.create_group([rank % 2, rank % 2 + 2])
    peer = (rank + 2) % 4
    [send, receive] = platform.batch_p2p(
        [
            P2POp("recv", buffers[0], peer, pair),
            P2POp("send", buffers[1] * 0.0 + rank, peer, pair),
        ]
    )
    send.wait()
    receive.wait()
    assert frame.array(buffers[0]).tolist() == [float(peer)] * 3
    assert platform.batch_p2p([]) == []
    with pytest.raises(ValueError, match="batch_p2p: kind must be .*HP139"):
        platform.batch_p2p([P2POp("receive", buffers[0], before)])


@on_ranks(4)
def test_objects():
    platform = get_platform()
    rank = platform.get_rank()
    everyone = [None] * 4
    platform.all_gather_object(everyone, {"rank": rank})
    assert everyone == [{"rank": r} for r in range(4)]
    if rank == 0:
        platform.send_object_list(["a", (1, 2)], 3)
    if rank == 3:
        received = [None, None]
        assert platform.recv_object_list(received, 0) == 0
        assert received == ["a", (1, 2)]


@on_ranks(4)
def test_barrier_waits_for_all():
    platform = get_platform()
    ports = [None] * 4
    store = platform.new_store(is_master=True) if platform.get_rank() == 0 else None
    platform.all_gather_object(ports, store.port if store else None)
    store = store or platform.new_store(ports[0], is_master=False)
    for number in range(5):
        store.add(f"came{number}", 1)
        if number % 2:
            platform.barrier(async_op=True).wait()
        else:
            assert platform.barrier() is None
        assert store.add(f"came{number}", 0) == 4
    platform.barrier()


@on_ranks(2)
def test_pending_gradient_reductions_finish_in_order():
    platform = get_platform()
    log = []
    first, first_handle = platform.all_reduce(ones(2), None, async_op=True)
    second, second_handle = platform.all_reduce(
        frame.tensor([3.0, 3.0]), None, async_op=True
    )
    platform.set_grad_reduce_handle(
        first_handle, lambda: log.append(frame.array(first).tolist())
    )
    assert log == []
    platform.set_grad_reduce_handle(
        second_handle, lambda: log.append(frame.array(second).tolist())
    )
    assert log == [[2.0, 2.0]]
    platform.wait_grad_handle()
    platform.wait_grad_handle()
    assert log == [[2.0, 2.0], [6.0, 6.0]]


@on_ranks(2)
def test_bad_input_names_what_is_wrong():
    platform = get_platform()
    x = ones(3, 2)
    for call in (
        platform.all_reduce,
        platform.all_gather_into_tensor,
        platform.reduce_scatter_tensor,
    ):
        with pytest.raises(
            TypeError, match=f"{call.__name__}: expected a tensor, got list"
        ):
            call([1.0], None)
        with pytest.raises(
            TypeError, match=f"{call.__name__}: expected a process group"
        ):
            call(x, 3)
    for call in (platform.all_reduce, platform.reduce_scatter_tensor):
        with pytest.raises(
            ValueError,
            match="op must be one of sum, avg, max, min, prod, got 'average'",
        ):
            call(x, None, op="average")
        with pytest.raises(
            ValueError, match="avg needs a floating-point tensor, got (torch.)?int64"
        ):
            call(ones(2, dtype="int64"), None, op="avg")
        with pytest.raises(
            ValueError, match="max is not defined for (torch.)?complex64"
        ):
            call(ones(2, dtype="complex64"), None, op="max")
        if frame.IS_TORCH:
            with pytest.raises(
                ValueError, match="gloo cannot reduce torch.int16; cast to one of"
            ):
                call(ones(2, dtype="int16"), None)
        else:
            assert set(frame.array(call(ones(2, dtype="int16"), None)).tolist()) == {2}
    with pytest.raises(
        ValueError,
        match=r"dim 0 of shape \(3, 2\) is not divisible by the group's 2 ranks",
    ):
        platform.reduce_scatter_tensor(x, None)
    with pytest.raises(ValueError, match="must be divisible by the group's 2 ranks"):
        platform.all_to_all_single(x, (3, 2), None)
    with pytest.raises(
        ValueError, match=r"output_shape \(2, 2\) does not hold the input's 12 elements"
    ):
        platform.all_to_all_single(ones(4, 3), (2, 2), None)
    for rank in (2, -1, None, "0"):
        with pytest.raises(
            ValueError,
            match=r"broadcast: src must be one of the group's ranks \[0, 1\], got ",
        ):
            platform.broadcast(x, rank, None)
        with pytest.raises(
            ValueError, match=r"isend: dst must be one of the group's ranks"
        ):
            platform.isend(x, rank)
    with pytest.raises(ValueError, match="irecv: src is this rank"):
        platform.irecv(x, platform.get_rank())
    with pytest.raises(
        ValueError, match="object_list needs one slot for each of the 2 ranks, got 1"
    ):
        platform.all_gather_object([None], 1)
    with pytest.raises(ValueError, match="send_object_list: dst must be one of"):
        platform.send_object_list([1], 9)
    with pytest.raises(ValueError, match="recv_object_list: src must be one of"):
        platform.recv_object_list([None], 9)
    assert (
        frame.array(platform.all_reduce(ones(1), None)).item() == 2
    )  # the group is as good as before


CALLS = {
    "all_reduce": lambda p, g: p.all_reduce(ones(2), g),
    "all_gather_into_tensor": lambda p, g: p.all_gather_into_tensor(ones(2), g),
    "reduce_scatter_tensor": lambda p, g: p.reduce_scatter_tensor(ones(4), g),
    "all_to_all_single": lambda p, g: p.all_to_all_single(ones(4), (4,), g),
    "broadcast": lambda p, g: p.broadcast(ones(2), 1, g),
    "barrier": lambda p, g: p.barrier(g),
    "irecv from rank 1": lambda p, g: p.irecv(ones(2), 1, g).wait(),
    "all_gather_object": lambda p, g: p.all_gather_object([None] * 4, 1, g),
    "recv_object_list": lambda p, g: p.recv_object_list([None], 1, g),
}


@pytest.mark.parametrize("name", sorted(CALLS))
@on_ranks(4, timeout=20)
def test_a_peer_that_never_comes_is_named(name):
    platform = get_platform()
    group = platform.split_group(None, [[0, 1, 2, 3]], timeout=1)
    if platform.get_rank() != 1:
        with pytest.raises(CommunicationError) as raised:
            CALLS[name](platform, group)
        assert raised.value.collective == name
        between_two = "recv" in name
        rank = platform.get_rank()
        assert raised.value.ranks == (
            tuple(sorted([rank, 1])) if between_two else (0, 1, 2, 3)
        )
        assert raised.value.missing == (1,)
        assert f"{name} on group" in str(raised.value)
        assert "ranks that never came: [1]" in str(raised.value)
    platform.barrier()


@on_ranks(4, timeout=20)
def test_point_to_point_names_the_peer_alone():
    platform = get_platform()
    group = platform.split_group(None, [[0, 1, 2, 3]], timeout=1)
    if platform.get_rank() == 0:  # ranks 2 and 3 have nothing to do with it
        with pytest.raises(CommunicationError) as raised:
            platform.p2p_exchange(ones(2), 1, group)
        assert (raised.value.ranks, raised.value.missing) == ((0, 1), (1,))
    platform.barrier()


@on_ranks(4, timeout=20)
def test_ranks_that_come_late_are_not_called_missing():
    platform = get_platform()
    rank = platform.get_rank()
    group = platform.split_group(None, [[0, 1, 2, 3]], timeout=5)
    if rank == 1:
        platform.barrier()
        return
    time.sleep(
        rank * 0.6
    )  # later than the time in which ranks wait for each other's notes
    with pytest.raises(CommunicationError) as raised:
        platform.all_reduce(ones(2), group)
    assert raised.value.missing == (1,)
    platform.barrier()


@on_ranks(2, timeout=20)
def test_ranks_that_call_different_collectives_are_told_so():
    platform = get_platform()
    group = platform.split_group(None, [[0, 1]], timeout=1)
    with pytest.raises(
        CommunicationError, match="the ranks called different collectives: rank "
    ):
        if platform.get_rank() == 0:
            platform.irecv(ones(1), 1, group).wait()
        else:
            platform.all_reduce(ones(4), group)
    platform.barrier()


def disagree(platform, rank, how):
    if how == "shape":
        return platform.all_reduce(ones(2 + rank), None)
    if how == "dtype":
        return platform.all_gather_into_tensor(
            ones(2, dtype=["float32", "float64"][rank]), None
        )
    if how == "op":
        return platform.reduce_scatter_tensor(ones(2), None, op=["sum", "max"][rank])
    if how == "source":
        return platform.broadcast(ones(2), rank, None)
    if how == "splits":
        return platform.differentiable_all_to_all_single(
            ones(4), [1, 3], [[1, 2], [3, 2]][rank], None
        )
    if how == "exchange":
        return platform.all_to_all_single(ones(4 + 2 * rank), (4 + 2 * rank,), None)
    return platform.barrier() if rank else platform.all_gather_object([None, None], 1)


@pytest.mark.parametrize(
    "how", ["shape", "dtype", "op", "source", "splits", "exchange", "call"]
)
@on_ranks(2)
def test_checked_collectives_say_on_every_rank_what_does_not_fit(how):
    platform = get_platform()
    with platform.checked_collectives():
        with pytest.raises(
            ValueError, match="the ranks do not agree: rank 0 calls .*; rank 1 calls "
        ) as raised:
            disagree(platform, platform.get_rank(), how)
        if how == "shape":
            assert "rank 1 calls all_reduce(sum, float32, (3,))" in str(raised.value)
        # What fits goes on, and the groups are as good as before.
        assert frame.array(platform.all_reduce(ones(1), None)).item() == 2
        splits = [[1, 2], [0, 1]]
        rank = platform.get_rank()
        mine = frame.tensor(np.full(sum(splits[rank]), float(rank)))
        comes = [splits[0][rank], splits[1][rank]]
        received = platform.differentiable_all_to_all_single(
            mine, splits[rank], comes, None
        )
        assert frame.array(received).tolist() == [[0.0], [0.0, 0.0, 1.0]][rank]
    assert frame.array(platform.all_reduce(ones(1), None)).item() == 2


@on_ranks(2)
def test_checks_are_off_unless_asked_for():
    assert not get_platform()._checks_collectives
    for value, on in (("1", True), ("0", False), ("", False)):
        os.environ["HYPER_PARALLEL_CHECK"] = value
        assert type(get_platform())()._checks_collectives is on


@on_ranks(2)
def test_listeners_hear_of_collectives_while_they_listen():
    platform = get_platform()
    heard = []
    with platform.listen_to_collectives(heard.append):
        platform.all_reduce(ones(4), None)
        receive = platform.irecv(ones(2), 1 - platform.get_rank())
        platform.isend(ones(2), 1 - platform.get_rank()).wait()
        receive.wait()
    platform.all_reduce(ones(4), None)
    assert [(t.collective, t.nbytes, t.backward) for t in heard] == [
        ("all_reduce", 16, False),
        ("irecv", 8, False),
        ("isend", 0, False),
    ]
    assert heard[0].ranks == (0, 1)


@pytest.mark.parametrize("splits", [None, [[1, 2], [0, 3]]])
@on_ranks(2)
def test_exchange_of_rows(splits):
    platform = get_platform()
    rank = platform.get_rank()
    sizes = splits or [[2, 2], [2, 2]]
    inputs = [numbers(r, (sum(sizes[r]), 2)) for r in range(2)]
    sends = splits and splits[rank]
    receives = splits and [splits[0][rank], splits[1][rank]]
    mine = frame.tensor(inputs[rank])
    output, handle = platform.exchange("rows", mine, sends, receives, None)
    handle.wait()
    starts = [sum(sizes[r][:rank]) for r in range(2)]
    rows = [inputs[r][starts[r] : starts[r] + sizes[r][rank]] for r in range(2)]
    frame.equal(output, np.concatenate(rows))


@pytest.mark.parametrize("op", sorted(frame.REDUCTIONS))
@on_ranks(1)
def test_reduction_of_pieces_that_arrived(op):
    pieces = np.stack([numbers(r, (2, 2)) for r in range(3)]).astype(np.float64)
    received = frame.tensor(pieces.reshape(-1))
    result = get_platform().reduce_pieces(received, (3, 2, 2), op)
    frame.equal(result, frame.REDUCTIONS[op](pieces))


@on_ranks(2)
def test_what_is_communicated_in_backward_is_a_matter_of_the_thread():
    """A forward may communicate on another thread meanwhile; torch can tell a backward by itself."""
    platform = get_platform()
    traffic = []

    def communicate():
        platform.all_reduce(frame.tensor([1.0]), None)

    with platform.listen_to_collectives(traffic.append), platform.in_backward():
        communicate()
        other = threading.Thread(target=communicate)
        other.start()
        other.join()
    assert [entry.backward for entry in traffic] == [not frame.IS_TORCH, False]
