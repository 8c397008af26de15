# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts that ranks share: time beside code written by hand, what travels, imbalance, and overlap.

make bench; or python benchmarks/expert_parallel.py --tiny to see that it works
"""

import argparse

import torch
import torch.distributed as dist
from experts_by_hand import MixtureByHand
from timing import in_turns, median, ratio, slowest

RANKS, EXPERTS, TOP_K = 2, 8, 2
SIZES = {"dim": 256, "hidden": 512}
TINY = {"dim": 16, "hidden": 16}
WAYS = ("by hand", "ours", "ours, all to one expert", "ours, shared expert")


def new_mesh():
    """A mesh of all ranks, on one thread each."""
    from hyper_parallel import init_device_mesh

    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))


def build_mixture(dim, hidden, shared=False):
    """The whole mixture, the same on every rank."""
    from hyper_parallel.core.expert_parallel import FeedForward, MoE

    torch.manual_seed(0)
    return MoE(
        dim,
        hidden,
        EXPERTS,
        TOP_K,
        score_before_experts=False,
        router_kwargs={"score_func": "softmax"},
        shared_expert=FeedForward(dim, hidden) if shared else None,
    )


def build_ours(mesh, sizes, *, shared=False, style=None):
    """The mixture with this rank's experts."""
    from hyper_parallel.core.expert_parallel import ExpertParallel

    moe = build_mixture(**sizes, shared=shared)
    (style or ExpertParallel()).apply(moe.experts, mesh)
    return moe


def build_by_hand(sizes):
    """The same in code that people write by hand."""
    moe, rank, ranks = build_mixture(**sizes), dist.get_rank(), dist.get_world_size()
    parts = [
        getattr(moe.experts, name).detach().chunk(ranks)[rank].clone()
        for name in ("w1", "w2", "w3")
    ]
    return MixtureByHand(moe.router.gate.weight.detach().clone(), *parts, TOP_K)


def draw_tokens(tokens, dim):
    """This rank's tokens, and the gradient of their outputs."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    own, gradient = torch.randn(2, tokens, dim, generator=generator).unbind()
    return own.requires_grad_(), gradient


def build_step(model, tokens, gradient):
    """Forward and backward."""

    def step():
        model.zero_grad()
        tokens.grad = None
        model(tokens).backward(gradient)

    return step


def build_steps(tokens, sizes):
    """All ways by name."""
    mesh = new_mesh()
    given = draw_tokens(tokens, sizes["dim"])
    crowded = build_ours(mesh, sizes)
    with (
        torch.no_grad()
    ):  # every token's first choice is expert 0, and its second one is expert 1
        crowded.expert_bias += torch.arange(EXPERTS, 0, -1) * 10
    models = [
        build_by_hand(sizes),
        build_ours(mesh, sizes),
        crowded,
        build_ours(mesh, sizes, shared=True),
    ]
    compare(models[0], models[1], *given)
    return {
        way: build_step(model, *given) for way, model in zip(WAYS, models, strict=True)
    }


def compare(one, other, tokens, gradient):
    """Both do the same."""
    for model in (one, other):
        build_step(model, tokens, gradient)()
    torch.testing.assert_close(one(tokens), other(tokens), rtol=1e-4, atol=1e-5)
    theirs = other.experts.w1.grad.to_local()
    torch.testing.assert_close(one.w1.grad, theirs, rtol=1e-3, atol=1e-4)


def measure_time(tokens, sizes, calls, rounds):
    """Microseconds of a step of each way on this rank, by round."""
    return in_turns(build_steps(tokens, sizes), calls, rounds, before=dist.barrier)


def count_messages(tokens, sizes):
    """What a rank issues forward and backward, its bytes, and what telemetry says of them."""
    from hyper_parallel import CommunicationLedger
    from hyper_parallel.core.expert_parallel import watch_experts

    mesh = new_mesh()
    step = build_step(build_ours(mesh, sizes), *draw_tokens(tokens, sizes["dim"]))
    with CommunicationLedger(mesh) as ledger, watch_experts() as load:
        step()
    phases = [
        (ledger.counts(backward=phase), ledger.nbytes(backward=phase))
        for phase in (False, True)
    ]
    return phases, load.nbytes, load.imbalance


def measure_overlap(tokens, sizes, calls, rounds):
    """Microseconds of forward of one micro batch and backward of another, one after the other and overlapped."""
    from hyper_parallel.core.expert_parallel import ExpertParallel
    from hyper_parallel.core.pipeline_parallel import CommComputeOverlap

    overlap = CommComputeOverlap()

    class Overlapped(ExpertParallel):
        """The exchange of one micro batch while the other one computes."""

        def __init__(self):
            self._token_dispatch = overlap.wrap_dispatch(super()._token_dispatch)
            self._token_combine = overlap.wrap_combine(super()._token_combine)

    mesh = new_mesh()
    given, gradient = draw_tokens(tokens, sizes["dim"])
    plain = build_ours(mesh, sizes)
    many = build_ours(mesh, sizes, style=Overlapped())
    waiting = {"in turn": plain(given), "overlapped": many(given)}

    def in_turn():
        waiting["in turn"], last = plain(given), waiting["in turn"]
        last.backward(gradient)

    def overlapped():
        def go_back():
            last.backward(gradient)

        last = waiting["overlapped"]
        waiting["overlapped"], _ = overlap.run(lambda: many(given), go_back)

    ways = {"in turn": in_turn, "overlapped": overlapped}
    return in_turns(ways, calls, rounds, before=dist.barrier)


# --- the tables


def run(function, *arguments):
    """What a function returns on each rank."""
    from hyper_parallel.testing import run_ranks

    return run_ranks(function, RANKS, *arguments, timeout=900)


def print_times(lengths, sizes, calls, rounds):
    print(
        f"Forward and backward of {EXPERTS} experts, top {TOP_K}, on {RANKS} ranks: milliseconds, and times by hand"
    )
    print(f"{'tokens of a rank':18}" + "".join(f"{way:>28}" for way in WAYS))
    for tokens in lengths:
        found = slowest(run(measure_time, tokens, sizes, calls, rounds))
        cells = [
            f"{median(found, way) / 1e3:18.2f} ({ratio(found, way, WAYS[0]):6.3f})"
            for way in WAYS
        ]
        print(f"{tokens:<18}" + "".join(f"{cell:>28}" for cell in cells), flush=True)


def print_messages(tokens, sizes):
    phases, nbytes, imbalance = run(count_messages, tokens, sizes)[0]
    print(f"\nWhat travels for {tokens} tokens of a rank")
    for name, (calls, moved) in zip(("forward", "backward"), phases, strict=True):
        listed = ", ".join(f"{count} {call}" for call, count in calls.items())
        print(f"{name:12}{moved:>12} bytes  {listed}")
    print(f"telemetry   {nbytes:>12} bytes forward, imbalance {imbalance:.2f}")


def print_overlap(tokens, sizes, calls, rounds):
    found = slowest(run(measure_overlap, tokens, sizes, calls, rounds))
    times = ", ".join(f"{way} {median(found, way) / 1e3:.2f} ms" for way in found)
    share = ratio(found, "overlapped", "in turn")
    print(f"\nForward of a micro batch and backward of another: {times}, {share:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="few tokens, one round")
    options = parser.parse_args()
    sizes = TINY if options.tiny else SIZES
    lengths, calls, rounds = ([64], 1, 1) if options.tiny else ([512, 2048], 2, 11)
    print_times(lengths, sizes, calls, rounds)
    print_messages(lengths[-1], sizes)
    print_overlap(lengths[-1], sizes, calls, rounds)


if __name__ == "__main__":
    main()
