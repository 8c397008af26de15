# SPDX-License-Identifier: Apache-2.0
"""A training step of a small transformer under tensor parallel: by hand as Megatron does it, by torch, and by ours.

make bench

Two ranks; forward, backward and AdamW, in wall-clock time, the ways measured in turns. ``torch`` and ``ours`` have the
same plan, in which modules hand out plain shards; ``ours, whole`` keeps distributed tensors throughout, so that the
model could be any that was written for one device. All ways begin with the same numbers, and what they have after the
last step is compared.
"""

import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.tensor as native
import torch.distributed.tensor.parallel as torch_tp
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from by_hand import Copied, Gathered, Scattered, Summed
from timing import in_turns, median, ratio
from torch import nn

import hyper_parallel as ours
from hyper_parallel.core.tensor_parallel import Replicated
from hyper_parallel.testing import close_ranks, run_ranks

SIZES = {  # dim, hidden, heads, layers, sequence, batch; budget, steps a measurement, measurements
    "overhead-bound: dim 128, 4 layers, sequence 32, batch 2": (
        (128, 352, 8, 4, 32, 2),
        1.3,
        8,
        31,
    ),
    "compute-bound: dim 512, 4 layers, sequence 256, batch 4": (
        (512, 1376, 8, 4, 256, 4),
        1.05,
        1,
        11,
    ),
}
RANKS = 2


# --- for one device


class Block(nn.Module):
    """Attention and SwiGLU. Sizes are asked of the tensors, so that it takes whole ones and shards."""

    def __init__(self, dim, hidden, heads):
        super().__init__()
        self.size = dim // heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.k, self.v, self.o = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )
        self.up, self.gate = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def split(self, x):
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def forward(self, x):
        h = self.norm1(x)
        y = F.scaled_dot_product_attention(
            *(self.split(w(h)) for w in (self.q, self.k, self.v)), is_causal=True
        )
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def model(dim, hidden, heads, layers, *_):
    """The same for every way."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dim, hidden, heads) for _ in range(layers)))


# --- by hand


class BlockByHand(nn.Module):
    """This rank's rows of q, k, v, up and gate and its columns of o and down."""

    def __init__(self, whole, sequence_parallel):
        super().__init__()
        rank = dist.get_rank()
        self.size = whole.size
        self.enter, self.leave = (
            (Gathered, Scattered) if sequence_parallel else (Copied, Summed)
        )
        self.norm1, self.norm2 = whole.norm1, whole.norm2
        for name in ("q", "k", "v", "up", "gate"):
            setattr(
                self,
                name,
                nn.Parameter(
                    getattr(whole, name).weight.detach().chunk(RANKS)[rank].clone()
                ),
            )
        for name in ("o", "down"):
            setattr(
                self,
                name,
                nn.Parameter(
                    getattr(whole, name).weight.detach().chunk(RANKS, 1)[rank].clone()
                ),
            )

    def split(self, x):
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def forward(self, x):
        h = self.enter.apply(self.norm1(x))
        q, k, v = (self.split(F.linear(h, w)) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.leave.apply(F.linear(y.transpose(1, 2).flatten(2), self.o))
        h = self.enter.apply(self.norm2(x))
        return x + self.leave.apply(
            F.linear(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down)
        )


def by_hand(sizes, sequence_parallel):
    """The model by hand, and what is left to do after backward: with sequence parallel, to sum the norms' gradients."""
    net = nn.Sequential(
        *(BlockByHand(block, sequence_parallel) for block in model(*sizes))
    )
    norms = [norm.weight for block in net for norm in (block.norm1, block.norm2)]

    def sum_norms():
        flat = torch.cat([p.grad for p in norms])
        dist.all_reduce(flat)
        for p, grad in zip(norms, flat.chunk(len(norms)), strict=True):
            p.grad.copy_(grad)

    return net, sum_norms if sequence_parallel else lambda: None


# --- by a plan


def plan(library, placements, sequence_parallel, use_local_output=True):
    """The same plan in the words of torch or of ours."""
    shard, whole = placements.Shard(1), placements.Replicate()
    between = shard if sequence_parallel else whole
    column = {"input_layouts": between, "use_local_output": use_local_output}
    row = {"output_layouts": between, "use_local_output": use_local_output}
    styles = {
        **{
            f"*.{name}": library.ColwiseParallel(**column)
            for name in ("q", "k", "v", "up", "gate")
        },
        **{f"*.{name}": library.RowwiseParallel(**row) for name in ("o", "down")},
    }
    if sequence_parallel:
        norm = library.SequenceParallel(use_local_output=use_local_output)
        styles |= {"*.norm1": norm, "*.norm2": norm}
    return styles


def models(sizes, sequence_parallel):
    """(model, what is left to do after backward) of each way."""
    mesh = ours.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    theirs = native.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    by_torch = torch_tp.parallelize_module(
        model(*sizes), theirs, plan(torch_tp, native, sequence_parallel)
    )
    by_ours = ours.parallelize_module(
        model(*sizes), mesh, plan(ours, ours, sequence_parallel)
    )
    whole = plan(ours, ours, sequence_parallel, use_local_output=False)
    by_whole = ours.parallelize_module(model(*sizes), mesh, {**whole, "": Replicated()})
    nothing = (lambda: None,)
    return {
        "by hand": by_hand(sizes, sequence_parallel),
        "torch": (by_torch, *nothing),
        "ours": (by_ours, *nothing),
        "ours, whole": (by_whole, *nothing),
    }


def step_of(net, after_backward, x, share=1.0):
    """A training step; ``share``: how much of the mean this rank's part is."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        (net(x).pow(2).mean() * share).backward()
        after_backward()
        optimizer.step()

    return step


def measure(sizes, sequence_parallel, calls, rounds):
    """The times of every way, and how far its parameters are in the end from those by hand."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dim, *_, sequence, batch = sizes
    x = torch.randn(batch, sequence, dim, generator=torch.Generator().manual_seed(1))
    shard = x.chunk(RANKS, 1)[dist.get_rank()].contiguous() if sequence_parallel else x
    made = models(sizes, sequence_parallel)
    steps = {}
    for name, (net, after) in made.items():
        enters, share = shard, 1 / RANKS if sequence_parallel else 1.0
        if name == "ours, whole" and sequence_parallel:
            enters, share = (
                ours.DTensor.from_local(
                    shard, net[0].q.weight.device_mesh, [ours.Shard(1)]
                ),
                1.0,
            )
        steps[name] = step_of(net, after, enters, share)
    found = in_turns(steps, calls, rounds, time.perf_counter, before=dist.barrier)
    return found, {
        name: distance(net, made["by hand"][0]) for name, (net, _) in made.items()
    }


def distance(net, truth):
    """How far parameters are from those that they should be, as a part of their norm."""
    shards = [getattr(p, "to_local", lambda p=p: p)() for p in sorted_parameters(net)]
    pairs = list(zip(shards, sorted_parameters(truth), strict=True))
    apart, norm = (
        sum(float(x.double().pow(2).sum()) for x in xs)
        for xs in ([a - b for a, b in pairs], shards)
    )
    return (apart / norm) ** 0.5


def sorted_parameters(net):
    """Parameters by name, which by hand are not those of modules."""
    return [
        p.detach()
        for _, p in sorted(
            (name.removesuffix(".weight"), p) for name, p in net.named_parameters()
        )
    ]


def main():
    ways = ("by hand", "torch", "ours", "ours, whole")
    print(
        "\nA training step under tensor parallel of 2, milliseconds, and times of the one by hand"
    )
    for title, (sizes, budget, calls, rounds) in SIZES.items():
        print(f"{title}   budget {budget}")
        print(
            f"{'':26}"
            + "".join(f"{way:>12}" for way in ways)
            + "".join(f"{way + ' / hand':>20}" for way in ways[1:])
        )
        for sequence_parallel in (False, True):
            [(found, apart), _] = run_ranks(
                measure, RANKS, sizes, sequence_parallel, calls, rounds, timeout=900
            )
            times = "".join(f"{median(found, way) / 1000:12.2f}" for way in ways)
            ratios = "".join(
                f"{ratio(found, way, 'by hand'):>20.2f}" for way in ways[1:]
            )
            print(
                f"{'sequence parallel' if sequence_parallel else 'no sequence parallel':26}{times}{ratios}"
            )
            print(
                f"{'':26}parameters differ in the end by {max(apart.values()):.1e} of their norm"
            )
    close_ranks()


if __name__ == "__main__":
    main()
