# SPDX-License-Identifier: Apache-2.0
"""A data-parallel step between two hosts over links of several rates: ours, and torch's on the same model.

make bench; or python benchmarks/data_parallel_links.py --tiny to see that it works

The hosts are network namespaces (tools/hosts.py), with one rank and one thread each. `replicate` is measured beside
DDP, and `fully_shard` beside FSDP2. The same run measures what a step computes without communication, and what it
communicates without computation: for the first pair the gradients' bytes in buckets as DDP makes them, for the second
the parameters' bytes as they are gathered and reduced, unit by unit. A step that overlaps both takes little more than
the larger of the two, one that does not takes their sum.
"""

import warnings

from timing import in_turns, median, ratio  # neighbours of this file
from two_hosts import read_options, run_on_hosts

RATES = ("200mbit", "500mbit", None)
FULL = {"dim": 512, "hidden": 1376, "layers": 4, "context": 256, "batch": 4}
TINY = {"dim": 32, "hidden": 48, "layers": 2, "context": 16, "batch": 2}
ROUNDS, WARM_UP = 7, 2
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes, as DDP has them
PAIRS = {
    "whole parameters": ("replicate", "DDP", "all-reduce"),
    "sharded parameters": ("fully_shard", "FSDP2", "gather and reduce"),
}


# --- a rank


def measure(sizes, rounds):
    """The times of every way in this rank, and how far the parameters of the first pair are apart in the end."""
    import torch
    import torch.distributed as dist

    from hyper_parallel import get_platform

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    get_platform().init_process_group(timeout=600)
    models = build_models(sizes)
    shape = (sizes["batch"], sizes["context"])
    ids = torch.randint(
        256, shape, generator=torch.Generator().manual_seed(dist.get_rank())
    )
    steps = {name: build_step(model, ids) for name, model in models.items()}
    alone = models["computation"]
    steps["all-reduce"] = build_exchange(count_bytes(alone))
    steps["gather and reduce"] = build_sharded_exchange(alone)
    found = in_turns(steps, 1, rounds, before=dist.barrier, warm_up=WARM_UP)
    apart = find_distance(models["replicate"], models["DDP"].module)
    get_platform().destroy_process_group()
    return found, apart


def build_models(sizes):
    """Models with the same numbers: on a mesh and in torch's wrappers, and alone."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh as native_mesh
    from torch.distributed.fsdp import fully_shard as native_fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from hyper_parallel import fully_shard, init_device_mesh
    from hyper_parallel.core.tensor_parallel import replicate
    from model import Config, Llama

    def build():
        torch.manual_seed(0)
        options = {name: size for name, size in sizes.items() if name != "batch"}
        return Llama(Config(**options))

    def build_units(shard, mesh):
        model = build()
        for block in model.blocks:
            shard(block, mesh=mesh)
        return shard(model, mesh=mesh)

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return {
        "replicate": replicate(build(), mesh),
        "DDP": DistributedDataParallel(
            build(), broadcast_buffers=False, gradient_as_bucket_view=True
        ),
        "fully_shard": build_units(fully_shard, mesh),
        "FSDP2": build_units(native_fully_shard, native_mesh("cpu", (2,))),
        "computation": build(),
    }


def count_bytes(module):
    """The bytes of the parameters."""
    return sum(parameter.numel() * 4 for parameter in module.parameters())


def build_step(model, ids):
    """Forward, backward and AdamW."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        model(ids).pow(2).mean().backward()
        optimizer.step()

    return step


def build_exchange(nbytes):
    """Sums so many bytes over the ranks, in buckets that are all under way at once."""
    import torch
    import torch.distributed as dist

    sizes = [min(FIRST_BUCKET, nbytes)]
    while sum(sizes) < nbytes:
        sizes.append(min(BUCKET, nbytes - sum(sizes)))
    buckets = [torch.ones(size // 4) for size in sizes]

    def exchange():
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()
        for bucket in buckets:
            bucket.fill_(1.0)  # it would grow without end

    return exchange


def build_sharded_exchange(model):
    """Gathers every unit's bytes before forward and again before backward, but the outermost's, and reduces them."""
    import torch
    import torch.distributed as dist

    blocks = [count_bytes(block) // 4 for block in model.blocks]
    rest = count_bytes(model) // 4 - sum(blocks)
    gathers = [rest, *blocks, *blocks]
    wholes = [torch.ones(size // 2 * 2) for size in gathers]
    shards = [torch.ones(size // 2) for size in gathers]

    def send_half(whole, shard, tag):
        """One half of a unit's bytes each way, which is what a gather or a reduction moves between two ranks."""
        peer = 1 - dist.get_rank()
        yield dist.isend(shard, peer, tag=tag)
        yield dist.irecv(whole[: shard.numel()], peer, tag=tag)

    def exchange():
        works = []
        for tag, (whole, shard) in enumerate(zip(wholes, shards, strict=True)):
            works += send_half(whole, shard, tag)
        for tag, place in enumerate(range(len(blocks) + 1), len(gathers)):
            works += send_half(wholes[place], shards[place], tag)
        for work in works:
            work.wait()

    return exchange


def find_distance(ours, theirs):
    """How far the parameters of both ways are apart, as a part of their norm."""
    apart, norm = 0.0, 0.0
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        own = mine.detach().to_local().double()
        apart += float((own - other.detach().double()).pow(2).sum())
        norm += float(own.pow(2).sum())
    return (apart / norm) ** 0.5


# --- the hosts


def find_slower(reports):
    """The times of the slower rank in every round."""
    by_rank = [found for found, _ in reports]
    return {
        way: [
            max(pair) for pair in zip(*(found[way] for found in by_rank), strict=True)
        ]
        for way in by_rank[0]
    }


def print_rows(rate, reports):
    """One link."""
    times = find_slower(reports)
    for title, (ours, theirs, exchange) in PAIRS.items():
        halves = zip(times["computation"], times[exchange], strict=True)
        times["larger"] = [max(pair) for pair in halves]
        ways = (ours, theirs, "computation", exchange)
        cells = [f"{median(times, way) / 1000:>15.1f}" for way in ways]
        cells += [f"{ratio(times, way, 'larger'):>15.2f}" for way in (ours, theirs)]
        print(f"{rate or 'unlimited':12}{title:20}{''.join(cells)}", flush=True)
    apart = max(apart for _, apart in reports)
    print(f"{'':12}replicate and DDP differ in the end by {apart:.1e} of their norm")


def main():
    is_tiny = read_options(__doc__.splitlines()[0], measure)
    if is_tiny is None:
        return
    sizes, rounds = (TINY, 1) if is_tiny else (FULL, ROUNDS)
    print("\nA data-parallel step between two hosts, milliseconds, and times of the")
    print("larger of computation and communication, each measured alone")
    heads = ["ours", "torch", "computation", "communication"]
    heads += ["ours / larger", "torch / larger"]
    print(f"{'link':32}" + "".join(f"{head:>15}" for head in heads), flush=True)
    for rate in RATES:
        print_rows(rate, run_on_hosts(__file__, rate, sizes, rounds))


if __name__ == "__main__":
    main()
