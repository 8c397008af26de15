# SPDX-License-Identifier: Apache-2.0
"""Redistribution of 16 MiB on 2 x 2 ranks, beside the raw collective, the best code by hand, and torch's own DTensor.

make bench

*Raw* is the collective alone, from and into memory that lies right; *by hand* also puts the pieces where they belong,
as a person would write it who knows both layouts. Milliseconds, medians; ours is compared with the code by hand.
"""

import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.tensor as native
from timing import in_turns, median, ratio

from hyper_parallel import DTensor, Partial, Replicate, Shard, init_device_mesh
from hyper_parallel.testing import close_ranks, run_ranks

SIDE = 2048  # 16 MiB of float32
ROUNDS = 15
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
LETTERS = {
    "R": native.Replicate(),
    "S(0)": native.Shard(0),
    "S(1)": native.Shard(1),
    "P": native.Partial(),
}


class ByHand:
    """What a person would write with torch.distributed. ``x`` and ``y`` are the groups along the axes."""

    def __init__(self, x, y):
        self.x, self.y, self.world = x, y, dist.group.WORLD
        self.rank = dist.get_rank()

    def gather(self, local, group, dim):
        """Shards side by side along a dim."""
        out = local.new_empty((group.size() * local.shape[0], *local.shape[1:]))
        dist.all_gather_single(out, local, group=group)
        return out if dim == 0 else torch.cat(out.chunk(group.size()), dim)

    def gather_both(self, local):
        """Quarters, of which the first axis has the rows and the second the columns."""
        rows, columns = local.shape
        out = local.new_empty((4 * rows, columns))
        dist.all_gather_single(out, local, group=self.world)
        return (
            out.view(2, 2, rows, columns).transpose(1, 2).reshape(2 * rows, 2 * columns)
        )

    def reduce(self, local, group):
        out = local.clone()
        dist.all_reduce(out, group=group)
        return out

    def reduce_scatter(self, local, group, dim):
        source = local if dim == 0 else torch.cat(local.chunk(group.size(), dim))
        out = local.new_empty((source.shape[0] // group.size(), *source.shape[1:]))
        dist.reduce_scatter_single(out, source, group=group)
        return out

    def reduce_scatter_both(self, local):
        rows, columns = (size // 2 for size in local.shape)
        source = (
            local.view(2, rows, 2, columns).transpose(1, 2).reshape(4 * rows, columns)
        )
        out = local.new_empty((rows, columns))
        dist.reduce_scatter_single(out, source, group=self.world)
        return out

    def exchange(self, local, group, before, after):
        """From shards along one dim to shards along another."""
        source = torch.stack(local.chunk(group.size(), after))
        out = torch.empty_like(source)
        dist.all_to_all_single(out, source, group=group)
        return torch.cat(out.unbind(), before)

    def swap(self, local):
        """Ranks 1 and 2 change places."""
        if self.rank in (0, 3):
            return local
        peer, out = 3 - self.rank, torch.empty_like(local)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, local, peer), dist.P2POp(dist.irecv, out, peer)]
        ):
            work.wait()
        return out


PAIRS = {  # from, to, the code by hand; None where it is a slice
    "gather rows": ((S0, R), (R, R), lambda h, t: h.gather(t, h.x, 0)),
    "gather columns": ((S1, R), (R, R), lambda h, t: h.gather(t, h.x, 1)),
    "gather rows, both axes": ((S0, S0), (R, R), lambda h, t: h.gather(t, h.world, 0)),
    "gather rows and columns": ((S0, S1), (R, R), lambda h, t: h.gather_both(t)),
    "rows to columns": ((S0, R), (S1, R), lambda h, t: h.exchange(t, h.x, 0, 1)),
    "rows to columns, other axis kept": (
        (S0, S0),
        (S0, S1),
        lambda h, t: h.exchange(t, h.y, 0, 1),
    ),
    "rows, to the other axis": ((S0, R), (R, S0), lambda h, t: h.swap(t)),
    "axes change places": ((S0, S1), (S1, S0), lambda h, t: h.swap(t)),
    "sum": ((P, R), (R, R), lambda h, t: h.reduce(t, h.x)),
    "sum, both axes": ((P, P), (R, R), lambda h, t: h.reduce(t, h.world)),
    "sum, keep rows": ((P, R), (S0, R), lambda h, t: h.reduce_scatter(t, h.x, 0)),
    "sum, keep columns": ((P, R), (S1, R), lambda h, t: h.reduce_scatter(t, h.x, 1)),
    "sum, keep rows and columns": (
        (P, P),
        (S0, S1),
        lambda h, t: h.reduce_scatter_both(t),
    ),
    "sum of shards": ((S0, P), (S0, R), lambda h, t: h.reduce(t, h.y)),
    "cut rows": ((R, R), (S0, R), lambda h, t: t.chunk(2)[h.rank // 2].clone()),
    "cut columns": ((R, R), (R, S1), lambda h, t: t.chunk(2, 1)[h.rank % 2].clone()),
}
RAW = {  # the collective of each pair, on as much memory
    "gather": lambda n, group: (
        lambda x, out: dist.all_gather_single(out, x, group=group),
        n,
        n * group.size(),
    ),
    "rows to": lambda n, group: (
        lambda x, out: dist.all_to_all_single(out, x, group=group),
        n,
        n,
    ),
    "sum, keep": lambda n, group: (
        lambda x, out: dist.reduce_scatter_single(out, x, group=group),
        n,
        n // group.size(),
    ),
    "sum": lambda n, group: (lambda x, _: dist.all_reduce(x, group=group), n, 1),
}


def raw(title, elements, group):
    """The collective alone; nothing for what needs none of those."""
    for start, make in RAW.items():
        if title.startswith(start):
            call, before, after = make(elements, group)
            x, out = torch.randn(before), torch.empty(after)
            return lambda: call(x, out)
    return None


def measure():
    """The times of every pair on this rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    theirs = native.init_device_mesh("cpu", (2, 2))
    hand = ByHand(theirs.get_group(0), theirs.get_group(1))
    lines = {}
    for title, (before, after, by_hand) in PAIRS.items():
        whole = torch.randn(SIDE, SIDE)
        source = DTensor.from_local(whole, mesh, [R, R])
        local = (
            source.redistribute(None, [R if p is P else p for p in before])
            .to_local()
            .clone()
        )
        ours = DTensor.from_local(local, mesh, before)
        placed, wanted = ([LETTERS[str(p)] for p in side] for side in (before, after))
        torchs = native.DTensor.from_local(local, theirs, placed, run_check=False)
        true = by_hand(hand, local)
        torch.testing.assert_close(ours.redistribute(None, after).to_local(), true)
        changed = [
            group
            for group, a, b in zip((hand.x, hand.y), before, after, strict=True)
            if a != b
        ]
        group = hand.world if len(changed) == 2 else changed[0]
        ways = {
            "by hand": lambda f=by_hand, t=local: f(hand, t),
            "torch": lambda t=torchs, w=wanted: t.redistribute(theirs, w),
            "ours": lambda t=local, b=before, a=after: DTensor.from_local(
                t, mesh, b
            ).redistribute(None, a),
        }
        alone = raw(title, local.numel(), group)
        if alone is not None:
            ways["raw"] = alone
        with torch.no_grad():
            lines[title] = in_turns(
                ways, 1, ROUNDS, time.perf_counter, before=dist.barrier
            )
    return lines


def main():
    ranks = run_ranks(measure, 4, timeout=900)
    close_ranks()
    # A redistribution has ended when the last rank has what it needs.
    lines = {
        title: {
            way: [
                max(times)
                for times in zip(*(rank[title][way] for rank in ranks), strict=True)
            ]
            for way in found
        }
        for title, found in ranks[0].items()
    }
    print("\nRedistribution of 16 MiB on 2 x 2 ranks, milliseconds")
    columns = ("raw", "by hand", "torch", "ours")
    print(
        f"{'':34}{'from':>11} {'to':>11}{''.join(f'{c:>9}' for c in columns)}   torch / by hand   ours / by hand"
    )
    for title, found in lines.items():
        before, after, _ = PAIRS[title]
        places = " ".join(f"{','.join(map(str, side)):>11}" for side in (before, after))
        times = "".join(
            f"{median(found, c) / 1e3:9.2f}" if c in found else f"{'':>9}"
            for c in columns
        )
        theirs, ours = (ratio(found, way, "by hand") for way in ("torch", "ours"))
        print(f"{title:34}{places}{times}{theirs:>18.2f}{ours:>17.2f}")


if __name__ == "__main__":
    main()
