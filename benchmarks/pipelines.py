# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules beside the simulator and torch's own runtime, on ranks of this machine.

make bench; or python benchmarks/pipelines.py --tiny to see that it works

The first table has stages that sleep for a known time, so that two cores suffice for four ranks: how long a step takes,
in units of what the simulator says for messages that take no time. The second one has stages that compute next to
nothing: what is left of a step is the runtime's own time per action.
"""

import argparse
import functools
import os
import statistics
import time
import warnings

os.environ.setdefault("HYPER_PARALLEL_PLATFORM", "torch")  # both may be installed

from timing import in_turns, median, ratio  # a neighbour of this file

from hyper_parallel.core.pipeline_parallel.action import computations
from hyper_parallel.core.pipeline_parallel.schedules import SCHEDULES, build_schedule
from hyper_parallel.core.pipeline_parallel.simulate import Times, simulate

RANKS, MICROS = 4, 8
LONGEST = 900  # seconds of one measurement; ranks that sleep seem to do nothing
UNIT = 0.03  # seconds of a forward, of a backward of inputs and of parameters, of all layers of a rank
TORCHS = {  # the classes that torch has for our names
    "GPipe": "ScheduleGPipe",
    "1F1B": "Schedule1F1B",
    "Interleaved1F1B": "ScheduleInterleaved1F1B",
    "LoopedBFS": "ScheduleLoopedBFS",
    "InterleavedZeroBubble": "ScheduleInterleavedZeroBubble",
    "ZBV": "ScheduleZBVZeroBubble",
    "DualPipeV": "ScheduleDualPipeV",
}
WIDTH, TINY_MICROS, CALLS = 8, 16, 3


# --- stages


def build_sleeping_stage(seconds):
    """A module whose forward, backward of inputs and backward of parameters each take so long."""
    import torch
    from torch import nn

    class Sleep(torch.autograd.Function):
        """Passes a tensor on, and takes its time in backward."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(seconds)
            return gradient

    class Sleeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            time.sleep(seconds)
            # What the first stage is given has no gradient, and would take no time.
            x = x if x.requires_grad else x.clone().requires_grad_()
            return Sleep.apply(x) + Sleep.apply(self.weight)

    return Sleeping()


def build_tiny_stage(_):
    """A module that computes next to nothing."""
    import torch

    return torch.nn.Linear(WIDTH, WIDTH)


def count_loss(output, target):
    """A loss that takes no time."""
    return ((output - target) ** 2).mean()


def build_ours(name, micros, chunks, build):
    """A step of our runtime, and the number of its actions on this rank."""
    import torch
    import torch.distributed as dist

    from hyper_parallel import PipelineStage
    from hyper_parallel.core.pipeline_parallel import get_schedule_class

    order = build_schedule(name, dist.get_world_size(), micros, chunks)
    own = order.mapping.stages_of(dist.get_rank())
    stages = [PipelineStage(build(stage), stage, order.stages) for stage in own]
    schedule = get_schedule_class(name)(stages, micros, loss_fn=count_loss)
    x = torch.ones(micros, WIDTH)

    def step():
        schedule.step(x, target=x, return_outputs=False)

    return step, len(schedule.exec_order[dist.get_rank()])


def build_torchs(name, micros, chunks, build):
    """The same step of torch's runtime."""
    import torch
    import torch.distributed as dist
    from torch.distributed import pipelining

    order = build_schedule(name, dist.get_world_size(), micros, chunks)
    own = order.mapping.stages_of(dist.get_rank())
    device = torch.device("cpu")
    stages = [
        pipelining.PipelineStage(build(stage), stage, order.stages, device)
        for stage in own
    ]
    kind = getattr(pipelining, TORCHS[name])
    is_single = order.chunks == 1
    schedule = kind(stages[0] if is_single else stages, micros, loss_fn=count_loss)
    x = torch.ones(micros, WIDTH)
    is_first = 0 in own
    is_last = order.stages - 1 in own

    def step():
        schedule.step(*([x] if is_first else []), target=x if is_last else None)

    return step


def build_alone(name, micros, chunks, build):
    """What this rank computes in a step, without a pipeline."""
    import torch
    import torch.distributed as dist

    order = build_schedule(name, dist.get_world_size(), micros, chunks)
    modules = {
        stage: build(stage) for stage in order.mapping.stages_of(dist.get_rank())
    }
    x, gradient = torch.ones(2, 1, WIDTH)

    def step():
        for _ in range(micros):
            for stage, module in modules.items():
                output = module(x.detach().requires_grad_(stage > 0))
                if stage == order.stages - 1:
                    (count_loss(output, x) / micros).backward()
                else:
                    output.backward(gradient)

    return step


# --- the tables


def measure_makespans(names, rounds, unit):
    """For each schedule the simulated makespan, and the medians of both runtimes' steps over it."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    rows = []
    for name in names:
        order = build_schedule(name, RANKS, MICROS)
        seconds = unit / order.chunks

        def build(_, seconds=seconds):
            return build_sleeping_stage(seconds)

        steps = {"ours": build_ours(name, MICROS, order.chunks, build)[0]}
        if name in TORCHS:
            steps["torch"] = build_torchs(name, MICROS, order.chunks, build)
        found = in_turns(steps, 1, rounds, before=dist.barrier, warm_up=1)
        simulated = simulate_makespan(order, unit)
        rows.append((name, simulated, found))
    return rows


def simulate_makespan(order, unit):
    """Seconds of a step; the first stage's backward of inputs has nothing to compute before that of parameters."""
    times = Times(forward=unit, input=unit, weight=unit)
    return float(simulate(order, times, atomic_pairs=False).makespan)


def measure_overhead(names, rounds):
    """For each schedule the times of both runtimes' steps, of what they compute alone, and the number of actions."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for name in names:
        order = build_schedule(name, dist.get_world_size(), TINY_MICROS)
        arguments = (TINY_MICROS, order.chunks, build_tiny_stage)
        ours, count = build_ours(name, *arguments)
        steps = {
            "ours": ours,
            "torch": build_torchs(name, *arguments),
            "alone": build_alone(name, *arguments),
        }
        found = in_turns(steps, CALLS, rounds, before=dist.barrier)
        own = order.orders[dist.get_rank()]
        computed = sum(len(computations(step)) for step in own)
        rows.append((name, computed, count, found))
    return rows


def slowest(reports, way):
    """The times of the rank that took longest, in every round."""
    return [max(times) for times in zip(*(one[way] for one in reports), strict=True)]


def print_makespans(reports):
    print(f"\nA step of {RANKS} ranks and {MICROS} micro batches in stages that sleep:")
    print("milliseconds that the simulator says, and measured over simulated")
    print(f"{'schedule':24}{'simulated':>12}{'ours':>8}{'torch':>8}")
    for rows in zip(*reports, strict=True):
        name, simulated, _ = rows[0]
        found = [row[2] for row in rows]
        cells = []
        for way in ("ours", "torch"):
            is_there = way in found[0]
            took = statistics.median(slowest(found, way)) / 1e6 if is_there else 0
            cells.append(f"{took / simulated:8.3f}" if is_there else f"{'':>8}")
        print(f"{name:24}{simulated * 1000:12.1f}{''.join(cells)}", flush=True)


def print_overhead(reports):
    ranks = f"{len(reports)} rank{'s' if len(reports) > 1 else ', no messages'}"
    print(f"\nThe runtime's own time in stages that compute next to nothing, {ranks}:")
    print("microseconds per computation (a forward, a backward or a part of one)")
    heads = ("computations", "actions", "ours", "torch", "ours / torch")
    print(f"{'schedule':24}" + "".join(f"{head:>14}" for head in heads))
    for rows in zip(*reports, strict=True):
        name, computed, count, _ = rows[0]
        found = {
            way: slowest([row[3] for row in rows], way)
            for way in ("ours", "torch", "alone")
        }
        own = [
            (median(found, way) - median(found, "alone")) / computed
            for way in ("ours", "torch")
        ]
        share = ratio(found, "ours", "torch", beyond="alone")
        print(
            f"{name:24}{computed:14}{count:14}{own[0]:14.0f}{own[1]:14.0f}{share:14.2f}",
            flush=True,
        )


def main():
    from hyper_parallel.testing import run_ranks

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="short times, one round")
    options = parser.parse_args()
    names = ["1F1B", "ZBV"] if options.tiny else list(SCHEDULES)
    rounds, unit = (1, 0.002) if options.tiny else (5, UNIT)
    run = functools.partial(run_ranks, timeout=LONGEST)
    print_makespans(run(measure_makespans, RANKS, names, rounds, unit))
    rounds = 1 if options.tiny else 15
    names = ["LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBV"]
    print_overhead(run(measure_overhead, 1, names, rounds))
    print_overhead(run(measure_overhead, 2, ["GPipe", "1F1B", *names], rounds))


if __name__ == "__main__":
    main()
