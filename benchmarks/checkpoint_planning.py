# SPDX-License-Identifier: Apache-2.0
"""What planning a save costs one rank, as the number of ranks grows: simulated, since a plan needs no other rank.

make bench

The state is that of a model of 80 layers with Adam: 3 x 723 tensors, cut along tp and along dp (as sharded data
parallel does), or cut along tp and copied along dp, and norms that all ranks have. *Plan* is the time from the layouts
to what this rank writes and to the digest that is compared; *again* the same when nothing has changed; *items* what it
writes; *metadata* the size of checkpoint.json, which one rank writes.
"""

import statistics
import time

from hyper_parallel import Layout, Replicate, Shard
from hyper_parallel.core.distributed_checkpoint.entries import (
    Entry,
    cut_of,
    digest,
    writers,
)
from hyper_parallel.core.distributed_checkpoint.format import Stored, to_bytes
from hyper_parallel.core.distributed_checkpoint.metadata import Metadata
from hyper_parallel.core.distributed_checkpoint.standard_planner import plan_for

RANKS = (8, 64, 512, 4096, 16384, 65536)
DIM, HIDDEN, LAYERS, TP = 8192, 28672, 80, 8


def shapes():
    """Name, shape, and the dim that tensor parallel cuts; None: all ranks have it."""
    yield "embed", (128256, DIM), 0
    yield "head", (128256, DIM), 0
    yield "norm", (DIM,), None
    for layer in range(LAYERS):
        matrices = {
            "q": (DIM, DIM, 0),
            "k": (1024, DIM, 0),
            "v": (1024, DIM, 0),
            "o": (DIM, DIM, 1),
        }
        matrices |= {
            "gate": (HIDDEN, DIM, 0),
            "up": (HIDDEN, DIM, 0),
            "down": (DIM, HIDDEN, 1),
        }
        for name, (rows, columns, dim) in matrices.items():
            yield f"{layer}.{name}", (rows, columns), dim
        for name in ("norm1", "norm2"):
            yield f"{layer}.{name}", (DIM,), None


def entries_on(ranks, sharded):
    layout = Layout((ranks // TP, TP), ("dp", "tp"))
    dp = Shard(0) if sharded else Replicate()
    found = []
    for name, shape, dim in shapes():
        placed = [
            Replicate() if dim is None else dp,
            Replicate() if dim is None else Shard(dim),
        ]
        cut = cut_of(layout(placed).bind(len(shape)))
        found += [
            Entry(f"{kind}.{name}", "float32", shape, cut)
            for kind in ("model", "exp_avg", "exp_avg_sq")
        ]
    return found


def measured(ranks, sharded):
    entries = entries_on(ranks, sharded)
    plan, again = [], []
    for _ in range(5):
        start = time.process_time()
        items, tensors = plan_for(entries, ranks // 3, writers)
        digest(entries)
        plan.append(time.process_time() - start)
        start = time.process_time()
        digest(entries)
        again.append(time.process_time() - start)
    metadata = to_bytes(
        Metadata(tensors, {}, Stored("0" * 16, ranks, {}, "hyper_parallel"))
    )
    return statistics.median(plan), statistics.median(again), len(items), len(metadata)


def main():
    for sharded, title in (
        (False, "cut along tp, copied along dp"),
        (True, "cut along tp and dp"),
    ):
        print(f"\n{title}\n")
        print("| ranks | plan, ms | again, ms | items | metadata, KiB |")
        print("| ---: | ---: | ---: | ---: | ---: |")
        for ranks in RANKS:
            plan, again, items, metadata = measured(ranks, sharded)
            print(
                f"| {ranks:,} | {plan * 1e3:.0f} | {again * 1e3:.0f} | {items:,} | {metadata / 1024:.0f} |"
            )


if __name__ == "__main__":
    main()
