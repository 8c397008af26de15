# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks: through memory that they share, and through the backend, with equal results."""

import contextlib
import os
import random
import time

import frame
import numpy as np
import pytest

from hyper_parallel import CommunicationError, get_platform
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.platform.contract.memory import round_up
from hyper_parallel.platform.messages import HEADER_BYTES, BackendMessages
from hyper_parallel.testing import RankError, on_ranks, run_ranks

VARIABLE = "HYPER_PARALLEL_SHARE_MEMORY"
DTYPES = ["float32", "float64", "float16", "bfloat16", "int8", "uint8", "int64", "bool"]
SHAPES = [(), (1,), (3, 5), (0,), (4, 0, 2), (7, 1, 3), (1000, 33)]


@contextlib.contextmanager
def variable(value):
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = value
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def connect(on, ranks=(0, 1), timeout=10):
    """Messages of a new group whose ranks share memory, or do not; and the group."""
    with variable("1" if on else "0"):
        platform = get_platform()
        group = platform.split_group(None, [list(ranks)], timeout=timeout)
        messages = platform.connect_messages(group)
    is_shared = not isinstance(messages, BackendMessages)
    assert is_shared == (on and frame.IS_TORCH)
    return messages, group


def header(number):
    return number.to_bytes(HEADER_BYTES, "little")


def size_of(tensors):
    return sum(round_up(int(one.nbytes)) for one in tensors)


def values(shape, dtype, turn):
    numbers = np.arange(int(np.prod(shape))).reshape(shape) + turn
    return frame.tensor(numbers % 50, dtype)


def check(body, tensors, names):
    shapes = [tuple(one.shape) for one in tensors]
    found = get_platform().unpack_bytes(body, 0, list(zip(names, shapes, strict=True)))
    for one, expected in zip(found, tensors, strict=True):
        assert one.dtype == expected.dtype
        assert tuple(one.shape) == tuple(expected.shape)
        np.testing.assert_array_equal(frame.array(one), frame.array(expected))


@pytest.mark.parametrize("on", [True, False])
@on_ranks(2)
def test_all_dtypes_and_shapes(on):
    messages, _ = connect(on)
    is_sender = get_platform().get_rank() == 0
    for tag, dtype in enumerate(DTYPES):
        tensors = [values(shape, dtype, tag) for shape in SHAPES]
        if is_sender:
            messages.send(1, tag, header(tag), tensors)
        else:
            messages.expect(0, tag, size_of(tensors))
            said, body = messages.receive(0, tag)
            assert said == header(tag)
            check(body, tensors, [dtype] * len(tensors))
    messages.flush()


@pytest.mark.parametrize("on", [True, False])
@on_ranks(2)
def test_messages_without_a_body_and_in_another_order(on):
    messages, _ = connect(on)
    if get_platform().get_rank() == 0:
        for tag in (3, 1, 2, 1):
            messages.send(1, tag, header(tag), [])
        messages.send(1, 2, header(9), [values((5,), "float32", 0)])
    else:
        # As many with one tag come in their order.
        for tag, nbytes in ((2, 0), (2, 32), (1, 0), (1, 0), (3, 0)):
            messages.expect(0, tag, nbytes)
        said = [messages.receive(0, tag)[0] for tag in (1, 2, 3, 1, 2)]
        assert said == [header(number) for number in (1, 2, 3, 1, 9)]
    messages.flush()


@pytest.mark.skipif(not frame.IS_TORCH, reason="views are torch's")
@pytest.mark.parametrize("on", [True, False])
@on_ranks(2)
def test_views_with_gaps_and_what_changes_after_a_send(on):
    import torch

    messages, _ = connect(on)
    whole = torch.arange(24.0).view(4, 6)
    views = [whole.t(), whole[::2, 1:], torch.complex(whole[0], -whole[0]).conj()]
    if get_platform().get_rank() == 0:
        messages.send(1, 1, header(1), views)
        messages.drop_finished()
    else:
        messages.expect(0, 1, size_of(views))
        _, body = messages.receive(0, 1)
        check(body, views, ["float32", "float32", "complex64"])
    messages.flush()


@pytest.mark.skipif(not frame.IS_TORCH, reason="subclasses are torch's")
@pytest.mark.parametrize("on", [True, False])
@on_ranks(2)
def test_a_tensor_that_holds_another_one(on):
    import torch
    from torch.distributed._functional_collectives import all_reduce

    messages, group = connect(on)
    # What a functional collective returns is not complete before it is used.
    summed = all_reduce(torch.arange(6.0), "sum", group)
    if get_platform().get_rank() == 0:
        weight = torch.nn.Parameter(torch.ones(3))
        messages.send(1, 1, header(1), [summed, weight])
    else:
        expected = [2 * torch.arange(6.0), torch.ones(3)]
        messages.expect(0, 1, size_of(expected))
        check(messages.receive(0, 1)[1], expected, ["float32"] * 2)
    messages.flush()


@pytest.mark.skipif(not frame.IS_TORCH, reason="MindSpore shares no memory")
@on_ranks(2)
def test_a_tensor_without_host_memory_is_refused():
    import torch

    messages, _ = connect(on=True)
    with pytest.raises(ValueError, match="the tensor is on meta.*HP139"):
        messages.send(
            1 - get_platform().get_rank(), 1, header(1), [torch.empty(1, device="meta")]
        )
    messages.flush()


@pytest.mark.parametrize("on", [True, False])
@on_ranks(2, timeout=120)
def test_many_messages_in_both_directions(on):
    """More than a ring holds at once, of sizes that differ by step."""
    messages, _ = connect(on)
    rank = get_platform().get_rank()
    rng = random.Random(1)
    for step in range(8 if frame.IS_TORCH else 2):
        sizes = [rng.choice([0, 1, 17, 5_000, 60_000]) for _ in range(25)]
        for tag, size in enumerate(sizes):
            tensor = values((size,), "float32", step + rank)
            messages.expect(1 - rank, tag, size_of([tensor]))
            messages.send(1 - rank, tag, header(step), [tensor])
        for tag, size in enumerate(sizes):
            said, body = messages.receive(1 - rank, tag)
            assert said == header(step)
            check(body, [values((size,), "float32", step + 1 - rank)], ["float32"])
        messages.drop_finished()
        assert messages.find_largest(step * rank) == step
    messages.flush()


@pytest.mark.parametrize("on", [True, False])
@on_ranks(2)
def test_two_groups_at_once(on):
    first, _ = connect(on)
    second, _ = connect(on)
    one, two = (values((4,), "float32", turn) for turn in range(2))
    if get_platform().get_rank() == 0:
        first.send(1, 5, header(1), [one])
        second.send(1, 5, header(2), [two])
    else:
        for messages in (second, first):
            messages.expect(0, 5, 16)
        for messages, number, tensor in ((second, 2, two), (first, 1, one)):
            said, body = messages.receive(0, 5)
            assert said == header(number)
            check(body, [tensor], ["float32"])
    first.flush()
    second.flush()


@on_ranks(2)
def test_several_users_of_one_group():
    """All schedules of a group have one set of queues; each finds its own messages by their tags."""
    messages, group = connect(on=True)
    other = get_platform().connect_messages(group)
    if get_platform().get_rank() == 0:
        messages.send(1, 1, header(1), [])
        other.send(1, 2, header(2), [])
    else:
        messages.expect(0, 1, 0)
        other.expect(0, 2, 0)
        assert other.receive(0, 2)[0] == header(2)
        assert messages.receive(0, 1)[0] == header(1)
    assert messages.find_largest(1) == other.find_largest(1) == 1


@pytest.mark.parametrize("on", [True, False])
@on_ranks(3)
def test_the_largest_number_of_all_ranks(on):
    messages, _ = connect(on, (0, 1, 2))
    rank = get_platform().get_rank()
    for turn in range(20):
        if turn % 3 == rank:
            time.sleep(0.02)  # the others sleep before this one has voted
        assert messages.find_largest((rank + turn) % 3 * 100) == 200
        assert messages.find_largest(0) == 0


@pytest.mark.parametrize("on", [True, False])
@on_ranks(2)
def test_the_ledger_shows_the_same(on):
    messages, _ = connect(on)
    rank = get_platform().get_rank()
    with CommunicationLedger() as ledger:
        messages.expect(1 - rank, 1, 48)
        messages.send(1 - rank, 1, header(1), [values((12,), "float32", 0)])
        messages.receive(1 - rank, 1)
        messages.find_largest(0)
    messages.flush()
    assert ledger.counts() == {"irecv": 1, "isend": 1, "all_reduce": 1}
    received = {one.collective: one.nbytes for one in ledger.entries}
    assert received == {"irecv": 80, "isend": 0, "all_reduce": 8}


@pytest.mark.parametrize("by_rank", [0, 1])
@on_ranks(2)
def test_one_rank_that_does_not_share_is_enough(by_rank):
    platform = get_platform()
    with variable(str(int(platform.get_rank() != by_rank))):
        group = platform.split_group(None, [[0, 1]], timeout=10)
        assert isinstance(platform.connect_messages(group), BackendMessages)


# --- failures

AS_TORCH = pytest.mark.skipif(not frame.IS_TORCH, reason="MindSpore shares no memory")


@AS_TORCH
@pytest.mark.parametrize("call", ["receive", "find_largest"])
@on_ranks(2, timeout=30)
def test_a_rank_that_never_comes_is_named(call):
    messages, _ = connect(on=True, timeout=1)
    if get_platform().get_rank() == 0:
        messages.expect(1, 1, 0)
        with pytest.raises(CommunicationError, match="timed out after") as raised:
            if call == "receive":
                messages.receive(1, 1)
            else:
                messages.find_largest(0)
        assert raised.value.missing == (1,)
    get_platform().barrier()


@AS_TORCH
@on_ranks(2, timeout=30)
def test_a_message_that_nobody_reads():
    messages, _ = connect(on=True, timeout=1)
    if get_platform().get_rank() == 0:
        messages.send(1, 1, header(1), [])
        with pytest.raises(CommunicationError, match="isend to rank 1"):
            messages.flush()
    get_platform().barrier()


def lose_a_rank(call):
    messages, _ = connect(on=True, timeout=60)
    if get_platform().get_rank() == 1:
        messages.send(0, 1, header(7), [values((3,), "float32", 0)])
        time.sleep(0.5)
        os._exit(3)
    # What has arrived before its sender ended is received.
    messages.expect(1, 1, 16)
    assert messages.receive(1, 1)[0] == header(7)
    began = time.monotonic()
    try:
        if call == "receive":
            messages.expect(1, 2, 0)
            messages.receive(1, 2)
        elif call == "flush":
            messages.send(1, 2, header(2), [])
            messages.flush()
        else:
            messages.find_largest(0)
    except CommunicationError as error:
        took = time.monotonic() - began
        raise RuntimeError(f"missing {error.missing}, late {took > 20}") from error


@AS_TORCH
@pytest.mark.parametrize("call", ["receive", "flush", "find_largest"])
def test_a_rank_that_is_killed_is_named(call):
    with pytest.raises(RankError) as raised:
        run_ranks(lose_a_rank, 2, call)
    text = str(raised.value)
    assert "exit code 3" in text or "rank 1" in text
    assert "missing (1,), late False" in text
