# SPDX-License-Identifier: Apache-2.0
"""What operators on distributed tensors cost beyond the plain call, beside torch's own DTensor.

make bench

Tiny tensors on 2 ranks, where overhead shows; CPU time of the calling thread, in microseconds: what the threads of the
backend do meanwhile is not overhead. The ways are measured in turns: each line has the medians over the rounds, and the
median of the rounds' ratios of overheads, ours over torch's, beside its budget.
"""

import time
import warnings

import torch
import torch.distributed.tensor as native
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from by_hand import Copied, Summed
from timing import in_turns, median, ratio

from hyper_parallel import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.testing import close_ranks, run_ranks

ROUNDS, CALLS = 25, 100
TENSORS = {  # shape, and the dim that is cut; None for a copy on both ranks
    "x": ((8, 4, 8), 0),
    "y": ((8, 4, 8), 0),
    "square": ((8, 8), None),
    "w": ((16, 8), None),
    "norm": ((8,), None),
    "q": ((4, 2, 8, 8), 0),
    "up": ((16, 8), 0),  # column, then row
    "down": ((8, 16), 1),
    "h": ((2, 4, 8), None),
}
OPERATORS = {
    "add": lambda t: t["x"] + t["y"],
    "multiply by a number": lambda t: t["x"] * 2.5,
    "matmul": lambda t: torch.matmul(t["x"], t["square"]),
    "linear": lambda t: F.linear(t["x"], t["w"]),
    "layer_norm": lambda t: F.layer_norm(t["x"], (8,), t["norm"], t["norm"]),
    "softmax": lambda t: F.softmax(t["x"], -1),
    "view + transpose": lambda t: t["x"].view(-1, 4, 2, 4).transpose(1, 2),
    "attention": lambda t: F.scaled_dot_product_attention(t["q"], t["q"], t["q"]),
    "relu": lambda t: torch.relu(t["x"]),
    "sum": lambda t: t["x"].sum(-1),
}


def tensors(requires_grad=False):
    """The same small tensors: plain shards, torch's, ours; and the two meshes."""
    torch.manual_seed(0)
    mesh, theirs = (
        init_device_mesh("cpu", (2,), mesh_dim_names=("x",)),
        native.init_device_mesh("cpu", (2,)),
    )
    made = {"plain": {}, "torch": {}, "ours": {}}
    for name, (shape, dim) in TENSORS.items():
        whole = torch.randn(shape)
        made["ours"][name] = distribute_tensor(
            whole, mesh, [Replicate() if dim is None else Shard(dim)]
        )
        placed = [native.Replicate() if dim is None else native.Shard(dim)]
        made["torch"][name] = native.distribute_tensor(whole, theirs, placed)
        made["plain"][name] = made["ours"][name].to_local().clone()
    for way in made.values():
        for tensor in way.values():
            tensor.requires_grad_(requires_grad)
    return made, mesh, theirs


def block(t, copied=lambda x: x, summed=lambda x: x):
    """linear, gelu, linear, residual, layer_norm, sum; and backward."""
    inner = F.linear(F.gelu(F.linear(copied(t["h"]), t["up"])), t["down"])
    loss = F.layer_norm(summed(inner) + t["h"], (8,), t["norm"], t["norm"]).sum()
    loss.backward()
    for name in ("h", "up", "down", "norm"):
        t[name].grad = None


def blocks(made):
    """The block on both kinds of distributed tensors, and by hand: plain tensors and its two all-reduces."""
    return {
        **of_each(made, block),
        "plain": lambda: block(made["plain"], Copied.apply, Summed.apply),
    }


def of_each(made, call):
    """A way for each kind of tensors."""
    return {way: (lambda t=t: call(t)) for way, t in made.items()}


def redistributions(made, mesh, theirs):
    """from_local, to_local, and a redistribution that has nothing to do."""
    local, placed = made["plain"]["x"], [native.Shard(0)]
    return {
        "from_local": {
            "plain": lambda: None,
            "torch": lambda: native.DTensor.from_local(
                local, theirs, placed, run_check=False
            ),
            "ours": lambda: DTensor.from_local(local, mesh, [Shard(0)]),
        },
        "to_local": {
            "plain": lambda: None,
            "torch": made["torch"]["x"].to_local,
            "ours": made["ours"]["x"].to_local,
        },
        "redistribution without work": {
            "plain": lambda: None,
            "torch": lambda: made["torch"]["x"].redistribute(theirs, placed),
            "ours": lambda: made["ours"]["x"].redistribute(mesh, [Shard(0)]),
        },
    }


def first_calls(made, mesh, theirs, count=80):
    """linear on a new shape in every call."""
    found = {"plain": [], "torch": [], "ours": []}
    for number in range(count):
        whole = torch.randn(8, 3 + number, 8)
        inputs = {
            "plain": whole.chunk(2)[0],
            "torch": native.distribute_tensor(whole, theirs, [native.Shard(0)]),
            "ours": distribute_tensor(whole, mesh, [Shard(0)]),
        }
        for name, x in inputs.items():
            start = time.thread_time()
            F.linear(x, made[name]["w"])
            if number >= 10:
                found[name].append((time.thread_time() - start) * 1e6)
    return found


def measure():
    """(title, budget, times) of every line, on this rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = []
    with torch.no_grad():
        made, mesh, theirs = tensors()
        for name, call in OPERATORS.items():
            lines.append(
                (
                    name,
                    0.5,
                    in_turns(of_each(made, call), CALLS, ROUNDS, time.thread_time),
                )
            )
        lines.append(
            ("linear, a shape for the first time", 0.1, first_calls(made, mesh, theirs))
        )
        for name, ways in redistributions(made, mesh, theirs).items():
            budget = {"from_local": 0.2, "redistribution without work": 0.5}.get(name)
            lines.append(
                (name, budget, in_turns(ways, CALLS, ROUNDS, time.thread_time))
            )
    made, _, _ = tensors(requires_grad=True)
    lines.append(
        (
            "block, forward + backward",
            0.2,
            in_turns(blocks(made), CALLS // 5, ROUNDS, time.thread_time),
        )
    )
    return lines


def main():
    [lines, _] = run_ranks(measure, 2, timeout=600)
    close_ranks()
    print("\nOverhead, microseconds of CPU time a call, on 2 ranks")
    print(
        f"{'':36}{'plain':>9}{'torch':>9}{'ours':>9}   overhead, ours / torch's   budget"
    )
    for name, budget, found in lines:
        times = "".join(
            f"{median(found, way):9.1f}" for way in ("plain", "torch", "ours")
        )
        print(
            f"{name:36}{times}{ratio(found, 'ours', 'torch', beyond='plain'):>15.2f}{budget or '':>19}"
        )


if __name__ == "__main__":
    main()
