# SPDX-License-Identifier: Apache-2.0
"""Queues in shared memory: two ends in one process, and an end in a process that is killed."""

import ctypes
import os
import random
import subprocess
import sys
import threading
import time
from collections import deque

import pytest

from hyper_parallel.platform.shared_channel import Address
from hyper_parallel.platform.shared_queue import Queues

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


def connected(ranks=2):
    ends = [Queues(index, ranks) for index in range(ranks)]
    addresses = [end.address("host") for end in ends]
    for end in ends:
        end.connect(addresses)
    return ends


def send(queues, rank, tag, data):
    address = queues.outgoing(rank).reserve(len(data))
    ctypes.memmove(address, data, len(data))
    queues.publish(rank, tag)


def receive(queues, rank):
    queue = queues.incoming(rank)
    message = queue.look()
    if message is None:
        return None
    data = ctypes.string_at(message.address, message.nbytes)
    queue.advance()
    return message.tag, data


def sleep(queues, rank, seconds):
    queues.sleep([rank], seconds, queues.incoming(rank).is_empty)


def test_messages_arrive_in_order():
    first, second = connected()
    for number in range(5):
        send(first, 1, 10 + number, bytes([number]) * number)
    assert not first.outgoing(1).is_read()
    for number in range(5):
        assert receive(second, 0) == (10 + number, bytes([number]) * number)
    assert receive(second, 0) is None
    assert first.outgoing(1).is_read()


def test_a_message_stays_until_it_is_given_back():
    first, second = connected()
    send(first, 1, 1, b"one")
    send(first, 1, 2, b"two")
    queue = second.incoming(0)
    assert queue.look() == queue.look()
    assert receive(second, 0) == (1, b"one")
    assert receive(second, 0) == (2, b"two")


def test_queues_of_all_pairs_are_apart():
    ends = connected(3)
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    for source, target in pairs:
        send(ends[source], target, source, b"%d to %d" % (source, target))
    for source, target in pairs:
        expected = (source, b"%d to %d" % (source, target))
        assert receive(ends[target], source) == expected
        assert receive(ends[target], source) is None


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_sizes(seed):
    """Rings wrap around, grow and begin again; every message is as it was sent."""
    rng = random.Random(seed)
    first, second = connected()
    under_way = deque()
    largest = rng.choice([0, 100, 5_000, 40_000, 300_000])
    for number in range(600):
        # Phases in which messages pile up, and others in which all are read.
        piles_up = (number // 50) % 2
        if rng.random() < (0.8 if piles_up else 0.3):
            size = rng.choice([0, 1, 63, 64, 65, rng.randint(0, largest)])
            data = rng.randbytes(size)
            send(first, 1, number, data)
            under_way.append((number, data))
        elif under_way:
            assert receive(second, 0) == under_way.popleft()
        else:
            assert receive(second, 0) is None
    while under_way:
        assert receive(second, 0) == under_way.popleft()
    assert receive(second, 0) is None


def test_a_ring_wraps_around_without_growing():
    first, second = connected()
    data = bytes(20_000)
    send(first, 1, 0, data)
    for number in range(50):  # never empty, so that it does not begin again
        send(first, 1, number + 1, data)
        assert receive(second, 0) == (number, data)
    assert first.outgoing(1)._ring.capacity < 5 * len(data)
    assert not first.outgoing(1)._old


def test_few_messages_under_way_touch_little_memory():
    first, second = connected()
    addresses = set()
    for number in range(20):
        addresses.add(first.outgoing(1).reserve(30_000))
        first.publish(1, number)
        assert receive(second, 0)[0] == number
    assert len(addresses) == 1


def test_rings_that_were_read_are_freed():
    first, second = connected()
    for number in range(100):
        send(first, 1, number, bytes(10_000))
    assert first.outgoing(1)._old
    for number in range(100):
        assert receive(second, 0)[0] == number
    send(first, 1, 0, b"")
    assert not first.outgoing(1)._old


def test_a_message_that_is_given_up_leaves_no_trace():
    first, second = connected()
    send(first, 1, 1, b"one")
    first.outgoing(1).reserve(10)
    first.outgoing(1).reserve(1 << 20)  # which leads to a larger ring
    send(first, 1, 2, b"two")
    assert receive(second, 0) == (1, b"one")
    assert receive(second, 0) == (2, b"two")


def test_a_sleeper_is_woken():
    first, second = connected()
    woken = threading.Thread(target=sleep, args=(second, 0, 20))
    began = time.monotonic()
    woken.start()
    time.sleep(0.1)
    send(first, 1, 1, b"")
    woken.join()
    assert time.monotonic() - began < 10
    assert receive(second, 0) == (1, b"")
    sleep(second, 0, 0.01)  # nothing comes; an old byte does not matter


def test_nobody_sleeps_when_something_is_there():
    first, second = connected()
    send(first, 1, 1, b"")
    began = time.monotonic()
    sleep(second, 0, 20)
    assert time.monotonic() - began < 10


PEER = """
import ctypes, sys
from hyper_parallel.platform.shared_channel import Address
from hyper_parallel.platform.shared_queue import Queues
queues = Queues(1, 2)
print(*queues.address("host"), flush=True)
host, process, descriptor = sys.stdin.readline().split()
own = queues.address("host")
queues.connect([Address(host, int(process), int(descriptor)), own])
if sys.argv[1] == "sends":
    ctypes.memmove(queues.outgoing(0).reserve(4), b"last", 4)
    queues.publish(0, 7)
print("sent", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("does", ["sends", "sends nothing"])
def test_a_peer_that_is_killed(does):
    pipe = subprocess.PIPE
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER, does], stdin=pipe, stdout=pipe, text=True
    )
    queues = Queues(0, 2)
    own = queues.address("host")
    peer.stdin.write(" ".join(map(str, own)) + "\n")
    peer.stdin.flush()
    host, process, descriptor = peer.stdout.readline().split()
    queues.connect([own, Address(host, int(process), int(descriptor))])
    assert peer.stdout.readline() == "sent\n"
    assert queues.ended() == []
    if does == "sends":
        assert queues.incoming(1).look().tag == 7
    peer.kill()
    peer.communicate()
    began = time.monotonic()
    sleep(queues, 1, 20)
    assert time.monotonic() - began < 10
    assert queues.ended() == [1]
    # What was seen before can still be read, and messages to it go nowhere.
    assert receive(queues, 1) == ((7, b"last") if does == "sends" else None)
    send(queues, 1, 1, b"nobody reads this")
    assert not queues.outgoing(1).is_read()


def test_votes():
    first, second, third = ends = connected(3)
    for turn in range(5):
        first.vote(turn)
        assert first.votes() == {0: turn}
        second.vote(turn + 1)
        third.vote(turn + 2)
        # One that has seen all votes may begin the next round before another one looks.
        first.vote(200)
        expected = {0: turn, 1: turn + 1, 2: turn + 2}
        assert second.votes() == third.votes() == expected
        assert first.votes() == {0: 200}
        second.vote(200)
        third.vote(200)
        assert [end.votes() for end in ends] == [dict.fromkeys(range(3), 200)] * 3


def test_threads_at_both_ends():
    first, second = connected()
    count, found = 3000, []

    def read():
        while len(found) < count:
            message = receive(second, 0)
            if message is None:
                sleep(second, 0, 0.01)
            else:
                found.append(message)

    reader = threading.Thread(target=read)
    reader.start()
    sent = [(number, bytes([number % 251]) * (number % 700)) for number in range(count)]
    for tag, data in sent:
        send(first, 1, tag, data)
    reader.join()
    assert found == sent
