# SPDX-License-Identifier: Apache-2.0
"""What the platform's collectives cost beside torch's own, on gloo: ratios of medians, interleaved in one run.

make bench
"""

import torch
import torch.distributed as dist
from timing import in_turns, median

from hyper_parallel import get_platform
from hyper_parallel.testing import close_ranks, run_ranks

ROUNDS = 15


def interleaved(ways, rounds=ROUNDS):
    """Median seconds of each way."""
    found = in_turns(ways, 1, rounds, before=dist.barrier, warm_up=2)
    return {name: median(found, name) / 1e6 for name in ways}


def measure(elements):
    """Medians on this rank for one size, in float32."""
    platform = get_platform()
    ranks = platform.get_world_size()
    x = torch.randn(elements)
    strided = torch.randn(elements, 2)[:, 0]
    rounds = ROUNDS if elements > 1 << 16 else 10 * ROUNDS
    return {
        "reduce_scatter": interleaved(
            {
                "torch": lambda: dist.reduce_scatter_single(
                    torch.empty(elements // ranks), x
                ),
                "platform": lambda: platform.reduce_scatter_tensor(x, None),
            },
            rounds,
        ),
        "all_reduce": interleaved(
            {
                "torch": lambda: dist.all_reduce(x),
                "platform": lambda: platform.all_reduce(x, None),
            },
            rounds,
        ),
        "all_gather": interleaved(
            {
                "torch": lambda: dist.all_gather_single(
                    torch.empty(elements * ranks), x
                ),
                "platform": lambda: platform.all_gather_into_tensor(x, None),
            },
            rounds,
        ),
        "all_to_all": interleaved(
            {
                "torch": lambda: dist.all_to_all_single(torch.empty_like(x), x),
                "platform": lambda: platform.all_to_all_single(x, x.shape, None),
            },
            rounds,
        ),
        "all_reduce, strided": interleaved(
            {
                "torch": lambda: dist.all_reduce(strided.contiguous()),
                "platform": lambda: platform.all_reduce(strided, None),
            },
            rounds,
        ),
    }


def main():
    """Prints one table for every number of ranks."""
    for ranks in (2, 4):
        print(f"\n{ranks} ranks, medians on rank 0; below 1 the platform is faster")
        print(f"{'':22}{'size':>10}{'torch':>12}{'platform':>12}{'ratio':>8}")
        for elements in (64, 1 << 14, 1 << 18, 1 << 22):
            for name, medians in run_ranks(measure, ranks, elements, timeout=600)[
                0
            ].items():
                torch_ms, platform_ms = (
                    medians["torch"] * 1e3,
                    medians["platform"] * 1e3,
                )
                size = (
                    f"{elements * 4 / 1024:g} KiB"
                    if elements < 1 << 18
                    else f"{elements * 4 >> 20} MiB"
                )
                print(
                    f"{name:22}{size:>10}{torch_ms:>10.3f}ms{platform_ms:>10.3f}ms{platform_ms / torch_ms:>8.2f}"
                )
    close_ranks()


if __name__ == "__main__":
    main()
