# SPDX-License-Identifier: Apache-2.0
"""What the check of the order of collectives costs, on and off: medians, interleaved in one run, and the count alone.

make bench
"""

import timeit

import torch
import torch.distributed as dist
from timing import in_turns, median

from hyper_parallel import get_platform
from hyper_parallel.platform.torch import order
from hyper_parallel.testing import close_ranks, run_ranks

SIZES = (1, 1 << 12, 1 << 16, 1 << 20)


def measure(elements):
    """(microseconds off, on) of an all-reduce on this rank."""
    platform = get_platform()
    x = torch.ones(elements)

    def compared():
        with platform.checked_order():
            platform.all_reduce(x, None, op="max")

    ways = {"off": lambda: platform.all_reduce(x, None, op="max"), "on": compared}
    found = in_turns(
        ways, 1, 400 if elements < 1 << 18 else 50, before=dist.barrier, warm_up=2
    )
    return median(found, "off"), median(found, "on")


def count():
    """Microseconds that counting a collective takes."""
    group = dist.group.WORLD
    return min(timeit.repeat(lambda: order.begin(group), number=100_000, repeat=5)) * 10


if __name__ == "__main__":
    print("| elements | off | on | more |\n| --- | --- | --- | --- |")
    for size in SIZES:
        medians = run_ranks(measure, 4, size, timeout=300)
        off, on = (max(each) for each in zip(*medians, strict=True))
        print(f"| {size} | {off:.0f} us | {on:.0f} us | {on - off:.0f} us |")
    print(f"counting: {max(run_ranks(count, 2)):.2f} us")
    close_ranks()
