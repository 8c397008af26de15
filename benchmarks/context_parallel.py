# SPDX-License-Identifier: Apache-2.0
"""Attention on a sequence that ranks share: what travels, time beside code written by hand, memory, and balance.

make bench; or python benchmarks/context_parallel.py --tiny to see that it works
"""

import argparse
import statistics

import torch
import torch.distributed as dist
from attention_by_hand import attend_in_a_ring, attend_with_all_to_all
from memory import forget_peak, read_memory, return_freed_blocks, trim_memory
from timing import in_turns, median, ratio, slowest
from torch.nn.functional import scaled_dot_product_attention

METHODS = ("allgather", "ring", "ulysses")
BY_HAND = {"ring": attend_in_a_ring, "ulysses": attend_with_all_to_all}
BATCH, HEADS, HEAD_DIM = 1, 8, 64
ELEMENT = 4  # bytes


def new_mesh():
    """A mesh of all ranks, on one thread each."""
    from hyper_parallel import init_device_mesh

    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))


def draw_parts(length):
    """This rank's part of queries, keys and values, and of the gradient of the output."""
    shape = (4, BATCH, HEADS, length // dist.get_world_size(), HEAD_DIM)
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(shape, generator=generator).unbind()


def build_step(mesh, method, length, placement=None, is_causal=True):
    """Attention forward and backward on distributed tensors."""
    from hyper_parallel import DTensor, Shard
    from hyper_parallel.core.context_parallel import attention_method

    placements = [placement or Shard(2)]
    *parts, gradient = draw_parts(length)
    leaves = [
        DTensor.from_local(part, mesh, placements).requires_grad_() for part in parts
    ]

    def step():
        for leaf in leaves:
            leaf.grad = None
        with attention_method(method):
            output = scaled_dot_product_attention(*leaves, is_causal=is_causal)
        output.to_local().backward(gradient)

    return step


def build_step_by_hand(method, length, is_causal=True):
    """The same in code that people write by hand, on plain tensors."""
    *parts, gradient = draw_parts(length)
    leaves = [part.requires_grad_() for part in parts]

    def step():
        for leaf in leaves:
            leaf.grad = None
        BY_HAND[method](*leaves, is_causal).backward(gradient)

    return step


def run(function, ranks, *arguments):
    """What a function returns on each rank."""
    from hyper_parallel.testing import run_ranks

    return run_ranks(function, ranks, *arguments, timeout=900)


# --- what travels


def count_messages(length):
    """For each method what a rank issues forward and backward, and the bytes of each."""
    from hyper_parallel import CommunicationLedger

    mesh, found = new_mesh(), {}
    for method in METHODS:
        step = build_step(mesh, method, length)
        with CommunicationLedger(mesh) as ledger:
            step()
        found[method] = [
            (ledger.counts(backward=phase), ledger.nbytes(backward=phase))
            for phase in (False, True)
        ]
    return found


def expected_bytes(method, ranks, length):
    """(bytes that leave a rank forward, backward), by the formulas."""
    part = BATCH * HEADS * (length // ranks) * HEAD_DIM * ELEMENT
    others = ranks - 1
    if method == "ulysses":
        exchanged = 4 * part * others // ranks
        return exchanged, exchanged
    keys = 2 * part * others
    if method == "allgather":
        return keys, keys
    return (
        keys,
        keys + 2 * part * ranks,
    )  # and the gradients of keys and values go round


def print_messages(ranks, length):
    found = run(count_messages, ranks, length)[0]
    print(
        f"\nOne layer, {length} positions on {ranks} ranks: calls and bytes of a rank"
    )
    print(f"{'method':12}{'phase':10}{'bytes':>12}{'formula':>12}  calls")
    for method, phases in found.items():
        formulas = expected_bytes(method, ranks, length)
        rows = zip(("forward", "backward"), phases, formulas, strict=True)
        for phase, (calls, nbytes), formula in rows:
            listed = ", ".join(f"{count} {name}" for name, count in calls.items())
            print(f"{method:12}{phase:10}{nbytes:>12}{formula:>12}  {listed}")


# --- time


def measure_beside_hand(length, calls, rounds, is_causal):
    """Microseconds of a step of each method, ours and by hand, by round."""
    mesh = new_mesh()
    steps = {}
    for method in BY_HAND:
        steps[f"{method} by hand"] = build_step_by_hand(method, length, is_causal)
        steps[method] = build_step(mesh, method, length, is_causal=is_causal)
    return in_turns(steps, calls, rounds, before=dist.barrier)


def measure_balance(length, calls, rounds):
    """Microseconds of a causal step with parts in order and with balanced ones, by round."""
    from hyper_parallel import Shard, ZigzagShard

    mesh, steps = new_mesh(), {}
    for method in ("allgather", "ring"):
        for name, kind in (("in order", Shard), ("balanced", ZigzagShard)):
            steps[f"{method} {name}"] = build_step(mesh, method, length, kind(2))
    return in_turns(steps, calls, rounds, before=dist.barrier)


def print_times(lengths, calls, rounds):
    print("\nForward and backward on 2 ranks, beside the same by hand: milliseconds")
    print(
        f"{'method':12}{'positions':>10}{'mask':>8}{'by hand':>10}{'ours':>10}{'ratio':>8}"
    )
    for length in lengths:
        for is_causal in (False, True):
            found = slowest(
                run(measure_beside_hand, 2, length, calls, rounds, is_causal)
            )
            mask = "causal" if is_causal else "full"
            for method in BY_HAND:
                hand = f"{method} by hand"
                share = ratio(found, method, hand)
                times = f"{median(found, hand) / 1e3:10.2f}{median(found, method) / 1e3:10.2f}"
                print(f"{method:12}{length:10}{mask:>8}{times}{share:8.3f}", flush=True)


def print_balance(length, calls, rounds):
    found = slowest(run(measure_balance, 2, length, calls, rounds))
    print(
        f"\nCausal attention of {length} positions on 2 ranks: milliseconds, and the gain of balanced parts"
    )
    for method in ("allgather", "ring"):
        ways = [f"{method} {name}" for name in ("in order", "balanced")]
        times = "".join(f"{median(found, way) / 1e3:10.2f}" for way in ways)
        print(f"{method:12}{times}{ratio(found, *ways):8.2f}", flush=True)


# --- memory


def measure_memory(length, method):
    """Bytes that attention forward and backward needs at its peak, with what it is given."""
    return_freed_blocks()
    mesh = new_mesh()
    build_step(mesh, method, 64)()  # what is loaded once
    trim_memory()
    before = read_memory("VmRSS")
    step = build_step(mesh, method, length)
    forget_peak()
    step()
    return read_memory("VmHWM") - before


def print_memory(lengths):
    from hyper_parallel.testing import close_ranks

    print("\nPeak memory of attention forward and backward per rank, MiB")
    print(
        f"{'method':12}{'positions':>10}"
        + "".join(f"{f'cp={n}':>10}" for n in (1, 2, 4))
    )
    for method in METHODS:
        for length in lengths:
            peaks = []
            for ranks in (1, 2, 4):
                close_ranks()  # what a process had before is not counted again
                found = run(measure_memory, ranks, length, method)
                peaks.append(statistics.median(found))
            cells = "".join(f"{peak / 2**20:10.1f}" for peak in peaks)
            print(f"{method:12}{length:10}{cells}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tiny", action="store_true", help="short sequences, one round"
    )
    options = parser.parse_args()
    lengths, calls, rounds = ([256], 1, 1) if options.tiny else ([1024, 4096], 2, 9)
    for ranks in (2, 4):
        print_messages(ranks, lengths[0])
    print_times(lengths, calls, rounds)
    print_balance(lengths[-1], calls, rounds)
    print_memory([256] if options.tiny else [1024, 4096, 16384])


if __name__ == "__main__":
    main()
