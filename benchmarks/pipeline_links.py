# SPDX-License-Identifier: Apache-2.0
"""A pipeline of two hosts with one stage each, over links of several rates: ours, and torch's on the same model.

make bench; or python benchmarks/pipeline_links.py --tiny to see that it works

The same run measures what each stage computes alone, of which the simulator makes a step without messages, and what is
sent, without computation. A step whose messages travel while stages compute takes little more than the larger of both.
"""

import statistics
import time
import warnings

from timing import in_turns, median, ratio  # neighbours of this file
from two_hosts import read_options, run_on_hosts

from hyper_parallel.core.pipeline_parallel.schedules import build_schedule
from hyper_parallel.core.pipeline_parallel.simulate import Times, simulate

RATES = ("200mbit", "500mbit", None)
FULL = {"dim": 512, "hidden": 1376, "layers": 4, "context": 256}
TINY = {"dim": 32, "hidden": 48, "layers": 2, "context": 16}
MICROS = 8


# --- a rank


def measure(sizes, rounds):
    """The times of every way in this rank, and those of a forward and a backward of its stage."""
    import torch
    import torch.distributed as dist
    from torch.distributed import pipelining

    from hyper_parallel import PipelineStage, Schedule1F1B, get_platform

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    get_platform().init_process_group(timeout=600)
    rank = dist.get_rank()
    ids = torch.randint(256, (MICROS, sizes["context"]))
    hidden = torch.randn(MICROS, sizes["context"], sizes["dim"])
    stages = [build_stage(sizes, rank) for _ in range(3)]
    ours = Schedule1F1B(PipelineStage(stages[0], rank, 2), MICROS, loss_fn=find_loss)
    device = torch.device("cpu")
    native = pipelining.PipelineStage(stages[1], rank, 2, device)
    theirs = pipelining.Schedule1F1B(native, MICROS, loss_fn=find_loss)
    given, target = ([], ids) if rank else ([ids], None)
    steps = {
        "ours": lambda: ours.step(*given, target=target, return_outputs=False),
        "torch": lambda: theirs.step(*given, target=target),
        "communication": build_exchange(hidden[:1], rank),
    }
    found = in_turns(steps, 1, rounds, before=dist.barrier, warm_up=2)
    alone = measure_alone(stages[2], hidden if rank else ids, ids, rank, rounds)
    get_platform().destroy_process_group()
    return found, alone


def build_stage(sizes, rank):
    """Half of a Llama."""
    import torch
    from torch import nn

    from model import Config, Llama

    torch.manual_seed(0)
    model = Llama(Config(**sizes))
    half = sizes["layers"] // 2

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Identity() if rank else model.embed
            self.blocks = model.blocks[half:] if rank else model.blocks[:half]
            self.rotary = model.rotary
            self.head = nn.Sequential(model.norm, model.head) if rank else nn.Identity()

        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = block(x, self.rotary)
            return self.head(x)

    return Half()


def find_loss(output, target):
    """The loss of a micro batch."""
    import torch

    return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def build_exchange(message, rank):
    """Sends every micro batch's output one way, and its gradient the other way."""
    import torch
    import torch.distributed as dist

    received = [torch.empty_like(message) for _ in range(MICROS)]

    def exchange():
        works = []
        for tag in range(MICROS):
            works.append(dist.isend(message, 1 - rank, tag=tag))
            works.append(dist.irecv(received[tag], 1 - rank, tag=tag))
        for work in works:
            work.wait()

    return exchange


def measure_alone(stage, inputs, targets, rank, rounds):
    """The medians of the seconds of a forward and of a backward of one micro batch, while the other rank computes."""
    forwards, backwards = [], []
    for _ in range(rounds + 1):
        for micro in range(MICROS):
            x = inputs[micro : micro + 1]
            x = x.clone().requires_grad_() if rank else x
            start = time.perf_counter()
            output = stage(x)
            loss = (
                find_loss(output, targets[micro : micro + 1]) if rank else output.sum()
            )
            middle = time.perf_counter()
            loss.backward()
            forwards.append(middle - start)
            backwards.append(time.perf_counter() - middle)
    return statistics.median(forwards), statistics.median(backwards)


# --- the hosts


def print_row(rate, reports):
    """One link."""
    found = [times for times, _ in reports]
    times = {
        way: [max(pair) for pair in zip(*(one[way] for one in found), strict=True)]
        for way in found[0]
    }
    forwards, backwards = zip(*(alone for _, alone in reports), strict=True)
    order = build_schedule("1F1B", 2, MICROS)
    costs = Times(forward=forwards, input=backwards, weight=[0, 0])
    computation = float(simulate(order, costs).makespan) * 1e6
    times["computation"] = [computation] * len(times["ours"])
    pairs = zip(times["computation"], times["communication"], strict=True)
    times["larger"] = [max(pair) for pair in pairs]
    ways = ("ours", "torch", "computation", "communication")
    cells = [f"{median(times, way) / 1000:>15.1f}" for way in ways]
    cells += [f"{ratio(times, way, 'larger'):>15.2f}" for way in ("ours", "torch")]
    print(f"{rate or 'unlimited':12}{''.join(cells)}", flush=True)


def main():
    is_tiny = read_options(__doc__.splitlines()[0], measure)
    if is_tiny is None:
        return
    sizes, rounds = (TINY, 1) if is_tiny else (FULL, 5)
    print("\nA step of 1F1B with 8 micro batches, one stage on each of two hosts:")
    print("milliseconds, and times of the larger of computation and communication")
    heads = ["ours", "torch", "computation", "communication"]
    heads += ["ours / larger", "torch / larger"]
    print(f"{'link':12}" + "".join(f"{head:>15}" for head in heads), flush=True)
    for rate in RATES:
        print_row(rate, run_on_hosts(__file__, rate, sizes, rounds))


if __name__ == "__main__":
    main()
