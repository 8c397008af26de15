# SPDX-License-Identifier: Apache-2.0
"""What an operator on distributed tensors costs beyond the plain call, beside torch's own DTensor.

make bench

Tiny tensors on 2 ranks, where overhead shows. Ways are measured in turns; each line has the medians over the rounds, in
microseconds, and the median of the rounds' ratios of overheads, ours over torch's.
"""

import statistics
import time
import warnings

import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it

from hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.testing import close_ranks, run_ranks

ROUNDS, CALLS = 25, 100


def rounds_of(ways, calls=CALLS, rounds=ROUNDS):
    """Microseconds a call of each way in each round."""
    found = {name: [] for name in ways}
    for number in range(rounds + 3):
        for name, way in ways.items():
            start = time.perf_counter()
            for _ in range(calls):
                way()
            if number >= 3:  # the first ones warm up
                found[name].append((time.perf_counter() - start) / calls * 1e6)
    return found


def tensors(requires_grad=False):
    """The same small tensors: plain shards, torch's, ours."""
    import torch.distributed.tensor as native

    torch.manual_seed(0)
    mesh, theirs = init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), native.init_device_mesh("cpu", (2,))
    made = {"plain": {}, "torch": {}, "ours": {}}
    for name, shape, dim in (("x", (8, 4, 8), 0), ("y", (8, 4, 8), 0), ("w", (16, 8), None), ("v", (8, 16), None)):
        whole = torch.randn(shape)
        made["ours"][name] = distribute_tensor(whole, mesh, [Replicate() if dim is None else Shard(dim)])
        placed = [native.Replicate() if dim is None else native.Shard(dim)]
        made["torch"][name] = native.distribute_tensor(whole, theirs, placed)
        made["plain"][name] = made["ours"][name].to_local().clone()
    for way in made.values():
        for tensor in way.values():
            tensor.requires_grad_(requires_grad)
    return made


def block(t):
    """Some twenty operators without communication in forward."""
    h = F.layer_norm(t["x"], (8,))
    h = F.linear(F.gelu(F.linear(h, t["w"])), t["v"]) + t["x"]
    q = h.unflatten(2, (2, 4)).transpose(1, 2)
    a = torch.matmul(q, q.transpose(2, 3)).mul(0.5).softmax(-1)
    return torch.matmul(a, q).transpose(1, 2).flatten(2).mul(t["y"]).sub(h).tanh()


OPERATORS = {
    "add": lambda t: t["x"] + t["y"],
    "mul by a number": lambda t: t["x"] * 2.5,
    "relu": lambda t: torch.relu(t["x"]),
    "linear": lambda t: F.linear(t["x"], t["w"]),
    "softmax": lambda t: F.softmax(t["x"], -1),
    "sum": lambda t: t["x"].sum(-1),
    "transpose": lambda t: t["x"].transpose(1, 2),
    "view": lambda t: t["x"].view(-1, 32),
    "layer_norm": lambda t: F.layer_norm(t["x"], (8,)),
}


def forward_and_backward(t):
    t["x"].grad = None
    block(t).backward(t["ones"])


def measure():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = {}
    with torch.no_grad():
        made = tensors()
        for name, call in OPERATORS.items():
            lines[name] = rounds_of({way: (lambda t=t, call=call: call(t)) for way, t in made.items()})
        lines["block forward"] = rounds_of({way: (lambda t=t: block(t)) for way, t in made.items()}, CALLS // 10)
    made = tensors(requires_grad=True)
    for t in made.values():
        for name in ("w", "v"):
            t[name] = t[name].detach()  # a weight's gradient would be communicated
        t["ones"] = torch.ones_like(t["x"]).detach()
    lines["block forward + backward"] = rounds_of(
        {way: (lambda t=t: forward_and_backward(t)) for way, t in made.items()}, CALLS // 10
    )
    lines["add, a shape for the first time"] = first_calls()
    return lines


def first_calls():
    """A new shape in every call."""
    import torch.distributed.tensor as native

    mesh, theirs = init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), native.init_device_mesh("cpu", (2,))
    found = {"plain": [], "torch": [], "ours": []}
    for number in range(60):
        whole = torch.randn(8, 3 + number)
        ways = {
            "plain": whole.chunk(2)[0],
            "torch": native.distribute_tensor(whole, theirs, [native.Shard(0)]),
            "ours": distribute_tensor(whole, mesh, [Shard(0)]),
        }
        for name, x in ways.items():
            start = time.perf_counter()
            _ = x + x
            if number >= 10:
                found[name].append((time.perf_counter() - start) * 1e6)
    return found


def main():
    [lines, _] = run_ranks(measure, 2, timeout=600)
    close_ranks()
    print(f"{'microseconds a call':<34}{'plain':>9}{'torch':>9}{'ours':>9}   overhead, ours / torch's")
    for name, found in lines.items():
        plain, theirs, ours = (statistics.median(found[way]) for way in ("plain", "torch", "ours"))
        rounds = zip(found["plain"], found["torch"], found["ours"], strict=True)
        ratio = statistics.median((o - p) / (t - p) for p, t, o in rounds)
        print(f"{name:<34}{plain:>9.1f}{theirs:>9.1f}{ours:>9.1f}   {ratio:.2f}")


if __name__ == "__main__":
    main()
