# SPDX-License-Identifier: Apache-2.0
"""MindSpore jobs end: the store outlives its last reader, and ranks that wait are told who is missing."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from thorough import THOROUGH

from hyper_parallel import CommunicationError, get_platform
from hyper_parallel.core.distributed_checkpoint import (
    CheckpointError,
    CheckpointManager,
)
from hyper_parallel.core.distributed_checkpoint.saving import Prepared
from hyper_parallel.platform.mindspore.store import Store
from hyper_parallel.testing import on_ranks


def test_ranks_that_save_wait_and_leave_end():
    """One in a few did not, or failed, when the host of the store left first. ``ending.py 100`` has the long loop."""
    script = Path(__file__).with_name("ending.py")
    count = 4 if THOROUGH else 2  # every second one says that it leaves
    done = subprocess.run(
        [sys.executable, str(script), str(count)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    *left, killed = done.stdout.splitlines()
    assert left == ["0 0"] * count, done.stderr
    assert killed == "-9 7", (
        done.stderr
    )  # the control: the other rank does not wait for the host of the store


class Late:
    """A store that answers a question after whoever asked has given up."""

    host, port = "127.0.0.1", 0

    def __init__(self):
        self.values = {"a": b"1", "b": b"2"}
        self.is_slow = True

    def get(self, key):
        if self.is_slow:
            self.is_slow = False
            raise RuntimeError("TCP get operation failed.")
        return self.values["a"]  # the late answer


def test_a_store_that_did_not_answer_is_not_asked_again():
    store = Store(Late())
    with pytest.raises(RuntimeError, match="failed"):
        store.get("a")
    with pytest.raises(RuntimeError, match="does not answer"):
        store.get("b")
    with pytest.raises(RuntimeError, match="does not answer"):
        store.under("x").add("b", 1)


@on_ranks(2, timeout=30)
def test_a_rank_that_does_not_come_to_the_end_of_a_save_is_named(tmp_path):
    platform = get_platform()
    manager = CheckpointManager(tmp_path, asynchronous=True, timeout=0.5)
    usual = Prepared.write

    def slow(self, ranks):
        time.sleep(1.5 if platform.get_rank() else 0.0)
        return usual(self, ranks)

    Prepared.write = slow
    try:
        manager.save(1, {"step": 1})
        with pytest.raises(
            CheckpointError, match=r"ranks \[(0, )?1\] are still writing"
        ):
            manager.wait()
    finally:
        Prepared.write = usual
    group = platform.split_group(None, [[0, 1]], timeout=1)
    if platform.get_rank() == 0:
        with pytest.raises(CommunicationError, match=r"ranks that never came: \[1\]"):
            platform.all_gather_object([None, None], 1, group)
    platform.barrier()


@on_ranks(2)
def test_the_longest_wait_is_known():
    platform = get_platform()
    assert platform.longest_wait() is None
    if platform.get_rank() == 0:
        found = []

        def look():
            time.sleep(0.4)
            found.append(platform.longest_wait())

        thread = threading.Thread(target=look)
        thread.start()
        platform.barrier()
        thread.join()
        [(collective, seconds)] = found
        assert collective == "barrier"
        assert 0.1 < seconds < 1
    else:
        time.sleep(0.8)
        platform.barrier()
