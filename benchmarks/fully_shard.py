# SPDX-License-Identifier: Apache-2.0
"""A step of sharded data parallel beside torch's FSDP2 and DDP: time, memory, and how both grow.

make bench; or python benchmarks/fully_shard.py --tiny to see that it works

All ways train the Llama of the example on the same data in the same processes, in turns; the first column is DDP, which
shards nothing. Memory is that of a process, in new processes for each way.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "llama")]

from memory import forget_peak, read_memory, trim_memory  # noqa: E402 - a neighbour of this file
from timing import in_turns, median, ratio  # noqa: E402

SMALL = {"dim": 128, "hidden": 344, "layers": 4, "context": 32, "batch": 2}
LARGE = {"dim": 512, "hidden": 1376, "layers": 4, "context": 256, "batch": 4}
TINY = {"dim": 32, "hidden": 48, "layers": 2, "context": 16, "batch": 2}
WAYS = ("DDP", "FSDP2", "ours")
RECOMPUTE = ", recompute"


def build_model(sizes):
    """The model of the example, drawn from one seed."""
    from model import Config, Llama

    torch.manual_seed(0)
    options = {name: size for name, size in sizes.items() if name != "batch"}
    return Llama(Config(**options))


def build_way(name, sizes):
    """The model, trained by one of the ways."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh as native_mesh
    from torch.distributed.fsdp import fully_shard as native_fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from hyper_parallel import fully_shard, init_device_mesh

    model, ranks = build_model(sizes), dist.get_world_size()
    if name.endswith(RECOMPUTE):
        name = name.removesuffix(RECOMPUTE)
        recompute_blocks(model, is_native=name == "FSDP2")
    if name == "DDP":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if name == "FSDP2":
        shard, mesh = native_fully_shard, native_mesh("cpu", (ranks,))
    else:
        shard = fully_shard
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    for block in model.blocks:
        shard(block, mesh=mesh)
    return shard(model, mesh=mesh)


def recompute_blocks(model, is_native):
    """Has every block keep its input only, and run again in backward."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        checkpoint_wrapper as native_wrapper,
    )

    from hyper_parallel import checkpoint_wrapper

    wrap = native_wrapper if is_native else checkpoint_wrapper
    model.blocks = torch.nn.ModuleList(wrap(block) for block in model.blocks)


def build_step(name, sizes):
    """Forward, backward and AdamW."""
    import torch.distributed as dist

    model = build_way(name, sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (sizes["batch"], sizes["context"])
    ids = torch.randint(256, shape, generator=generator)

    def step():
        optimizer.zero_grad()
        model(ids).pow(2).mean().backward()
        optimizer.step()

    return step


def measure_time(sizes, ways, rounds, calls):
    """Microseconds per step of each way on this rank, by round."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    steps = {name: build_step(name, sizes) for name in ways}
    for step in steps.values():
        for _ in range(40 if calls > 1 else 2):
            step()
    return in_turns(steps, calls, rounds, before=dist.barrier)


def measure_memory(sizes, way):
    """(memory that a way holds after a step, its peak in a step) on this rank, beyond that of an empty process."""
    from hyper_parallel import get_platform

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    get_platform().init_process_group()
    for name in WAYS:  # what they load once
        build_step(name, TINY)()
    before = read_memory("VmRSS")
    step = build_step(way, sizes)
    for _ in range(3):
        step()
    trim_memory()
    held = read_memory("VmRSS") - before
    forget_peak()
    step()
    peak = read_memory("VmHWM") - before
    get_platform().destroy_process_group()
    return held, peak


def measure_copies(sizes):
    """(bytes that a rank packs and unpacks for one gather of all units, bytes that it gathers)."""
    from hyper_parallel.core.fully_shard.running import runners_below

    copied = gathered = 0
    for runner in runners_below(build_way("ours", sizes)):
        for part in runner.unit._prepare():
            plan = part.from_shards.plan
            packed = sum(plan.entries[number].nbytes for number in plan.packed)
            copied += packed + packed // plan.ranks
            gathered += sum(entry.nbytes for entry in plan.entries)
    return copied, gathered


def print_times(title, sizes, rounds, calls, ranks=2):
    """A table of steps."""
    from hyper_parallel.testing import run_ranks

    reports = run_ranks(measure_time, ranks, sizes, WAYS, rounds, calls)
    slower = {
        way: [max(times) for times in zip(*(one[way] for one in reports), strict=True)]
        for way in WAYS
    }
    cells = [f"{median(slower, way) / 1000:>10.2f}" for way in WAYS]
    ratios = [f"{ratio(slower, way, 'DDP'):>10.2f}" for way in ("FSDP2", "ours")]
    print(f"{title:34}{''.join(cells)}{''.join(ratios)}", flush=True)


def print_memory(sizes):
    """A table of bytes, each way in new processes."""
    print(f"\n{'memory per rank, MiB':34}{'held':>10}{'peak':>10}")
    for way in (*WAYS, "FSDP2" + RECOMPUTE, "ours" + RECOMPUTE):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
        command += ["2", str(Path(__file__).resolve()), "--memory", way]
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        given = json.dumps(sizes)
        ran = subprocess.run(  # noqa: S603 - this file
            [*command, given], env=variables, check=True, capture_output=True, text=True
        )
        lines = [line for line in ran.stdout.splitlines() if line.startswith("[")]
        reports = [json.loads(line) for line in lines]
        held = statistics.median(one[0] for one in reports) / 2**20
        peak = statistics.median(one[1] for one in reports) / 2**20
        print(f"{way:34}{held:>10.1f}{peak:>10.1f}", flush=True)


def print_copies(sizes):
    """What is copied beside the collectives."""
    from hyper_parallel.testing import run_ranks

    copied, gathered = run_ranks(measure_copies, 2, sizes)[0]
    print(
        f"\nbytes copied per gathered byte, beyond the collectives: {copied / gathered:.4f}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small sizes, one round")
    parser.add_argument("--growth", action="store_true", help="more ranks and units")
    parser.add_argument("--memory", nargs=2, metavar=("WAY", "SIZES"))
    options = parser.parse_args()
    if options.memory is not None:
        way, sizes = options.memory
        print(json.dumps(measure_memory(json.loads(sizes), way)))
        return
    heads = [*WAYS, "FSDP2/DDP", "ours/DDP"]
    print("\nA step of sharded data parallel, milliseconds, on two ranks")
    print(f"{'':34}" + "".join(f"{head:>10}" for head in heads))
    if options.tiny:
        print_times("dim 32, 2 layers", TINY, 1, 1)
        print_memory(TINY)
        print_copies(TINY)
        return
    print_times("dim 128, 4 layers, sequence 32", SMALL, 9, 5)
    print_times("dim 512, 4 layers, sequence 256", LARGE, 5, 1)
    print_memory(LARGE)
    print_copies(LARGE)
    if options.growth:
        print("\nHow they grow")
        for ranks in (2, 4, 8):
            print_times(f"dim 128, {ranks} ranks", SMALL, 5, 3, ranks)
        for layers in (4, 16, 64):
            deep = {**SMALL, "layers": layers}
            print_times(f"dim 128, {layers} layers", deep, 3, 1)


if __name__ == "__main__":
    main()
