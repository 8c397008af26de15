# SPDX-License-Identifier: Apache-2.0
"""Starts two ranks of MindSpore that save, wait and leave, over and over, and tells how they ended.

python tests/on_mindspore/ending.py 100
"""

import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback

os.environ.setdefault("GLOG_v", "3")
os.environ["HYPER_PARALLEL_PLATFORM"] = "mindspore"

import mindspore  # noqa: F401 - imported once; the ranks are forked
import numpy as np

from hyper_parallel import CommunicationError, get_platform
from hyper_parallel.core.distributed_checkpoint import CheckpointManager


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def save_and_leave(folder, leaves):
    """What the end of a training does; ``leaves``: whether it says so, or just ends."""
    platform = get_platform()
    platform.init_process_group(timeout=60)
    manager = CheckpointManager(folder, asynchronous=True)
    manager.save(1, {"w": np.ones(8, np.float32)})
    manager.wait()
    if leaves:
        platform.destroy_process_group()


def wait_for_one_that_ends(folder, _):
    """Rank 0, which hosts the store, is killed while rank 1 waits for it."""
    platform = get_platform()
    platform.init_process_group(timeout=60)
    if platform.get_rank() == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        platform.barrier()
    except CommunicationError:
        os._exit(7)


def start(target, *arguments):
    """The processes of two ranks."""
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
    }
    started = []
    for rank in range(2):
        process = os.fork()
        if process == 0:
            os.environ |= {**address, "RANK": str(rank)}
            try:
                target(*arguments)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            sys.exit(0)  # through what is done at the end of a program
        started.append(process)
    return started


def ends_of(processes, seconds=40):
    """The exit code of each; None of those that had to be killed."""
    codes, deadline = {}, time.monotonic() + seconds
    while len(codes) < len(processes) and time.monotonic() < deadline:
        for process in set(processes) - set(codes):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[process] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for process in set(processes) - set(codes):
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return [codes.get(process) for process in processes]


def main(count):
    for number in range(count):
        folder = tempfile.mkdtemp()
        print(*ends_of(start(save_and_leave, folder, bool(number % 2))), flush=True)
        shutil.rmtree(folder)
    print(*ends_of(start(wait_for_one_that_ends, "", False)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
