# SPDX-License-Identifier: Apache-2.0
"""The environment that ranks start in: how they meet, on how many threads they compute, what they log.

What the user has set takes precedence, except for what makes a process a rank of this job.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.order import FIRST, HYPER_PARALLEL_CHECK_ORDER
from hyper_parallel.platform.platform import HYPER_PARALLEL_PLATFORM

HOST = "127.0.0.1"
# Below the ports that the kernel gives to outgoing connections.
_PORTS = range(20_000, 32_000)


def find_port() -> int:
    """A port that is free, and that the kernel gives to no connection before rank 0 listens on it."""
    for port in (*random.sample(_PORTS, 100), 0):
        with socket.socket() as attempt, suppress(OSError):
            attempt.bind((HOST, port))
            return int(attempt.getsockname()[1])
    raise coded(OSError, "HP602", f"no port of {HOST} is free for the ranks to meet at")


def build_environment(framework: str, ranks: int) -> dict[str, str]:
    """What the ranks of a job on this machine have in common; see `number_rank` for the rest."""
    defaults = {
        "OMP_NUM_THREADS": str(_count_threads(ranks)),
        "HYPER_PARALLEL_CHECK_BATCHES": "first:3",  # of every place where plain tensors go in
        HYPER_PARALLEL_CHECK_ORDER: f"first:{FIRST}",
    }
    if framework == "mindspore":
        defaults |= QUIET
    job = {
        HYPER_PARALLEL_PLATFORM: framework,
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(find_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    return {**defaults, **os.environ, **job}


def number_rank(rank: int) -> dict[str, str]:
    """What one rank of a job on this machine has for itself."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


# MindSpore writes forty lines of warnings where a rank joins, unless errors are enough.
QUIET = {"GLOG_v": "3"}


@contextmanager
def default_environment(**variables: str) -> Iterator[None]:
    """Sets variables for the processes that are started inside, unless the user has set them."""
    missing = {k: value for k, value in variables.items() if k not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


def _count_threads(ranks: int) -> int:
    """The threads of each rank, if all ranks compute at once."""
    if not hasattr(os, "sched_getaffinity"):
        return 1
    return max(1, len(os.sched_getaffinity(0)) // ranks)
