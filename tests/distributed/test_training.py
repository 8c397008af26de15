# SPDX-License-Identifier: Apache-2.0
"""Twenty steps of a small transformer on meshes (2), (4) and (2, 2) against one process: all losses, all parameters."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from thorough import THOROUGH
from torch import nn

from hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.dtensor.modes import strict
from hyper_parallel.core.shard.sharding_plan import ShardingPlan, shard_module
from hyper_parallel.testing import run_ranks

STEPS = 20
EVEN = {"vocab": 16, "dim": 16, "heads": 4, "hidden": 32, "batch": 4, "seq": 8}
UNEVEN = {"vocab": 17, "dim": 20, "heads": 4, "hidden": 13, "batch": 3, "seq": 5}


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.RMSNorm(dim)
        self.wq, self.wv, self.wo = (nn.Linear(dim, dim) for _ in range(3))
        self.wk = nn.Linear(
            dim, dim, bias=False
        )  # its gradient would be nothing but rounding, which AdamW makes large
        self.up, self.gate = nn.Linear(dim, hidden), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (self.split(w(h)) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self, vocab, dim, heads, hidden, **_):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, hidden) for _ in range(2))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plan(parallel):
    """Tensor parallel as Megatron does it; the other axes, before it, copy the parameters."""
    columns, rows, whole = ([*parallel, p] for p in (Shard(0), Shard(1), Replicate()))
    return ShardingPlan(
        {
            "embed.weight": columns,
            "head.weight": columns,
            "norm.*": whole,
            "blocks.*.norm*.*": whole,
            "blocks.*.w[qkv].*": columns,
            "blocks.*.up.*": columns,
            "blocks.*.gate.*": columns,
            "blocks.*.wo.weight": rows,
            "blocks.*.wo.bias": whole,
            "blocks.*.down.weight": rows,
            "blocks.*.down.bias": whole,
        },
        input_plan={"": [Shard(0), Replicate()] if parallel else [Replicate()]},
    )


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=3e-3, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "momentum": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, foreach=False
    ),
    "momentum foreach": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, weight_decay=0.01, foreach=True
    ),
}


def batches(sizes):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(
        sizes["vocab"], (STEPS, sizes["batch"], sizes["seq"] + 1), generator=generator
    )
    return [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in ids]


def train(model, make_optimizer, sizes, place):
    optimizer = make_optimizer(model.parameters())
    losses = []
    for ids, targets in batches(sizes):
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), place(targets).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def job(shape, names, optimizers, sizes, dtype, tolerance):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    parallel = [Replicate()] * (len(shape) - 1)
    batch = [Shard(0), Replicate()] if parallel else [Replicate()]

    def place(targets):
        return distribute_tensor(targets, mesh, batch)

    def fresh():
        torch.manual_seed(0)
        return Model(**sizes).to(dtype)

    for name in optimizers:
        one, many = fresh(), shard_module(fresh(), mesh, plan(parallel))
        expected = train(one, OPTIMIZERS[name], sizes, lambda t: t)
        with strict():
            found = train(many, OPTIMIZERS[name], sizes, place)
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(expected), rtol=tolerance, atol=tolerance
        )
        assert expected[-1] != expected[0]
        for (key, true), mine in zip(
            one.named_parameters(), many.parameters(), strict=True
        ):
            torch.testing.assert_close(
                mine.full_tensor(),
                true,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m, k=key, n=name: f"{n}: {k}: {m}",
            )


@pytest.mark.parametrize("sizes", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize(
    ("shape", "names"), [((2,), ("tp",)), ((4,), ("tp",)), ((2, 2), ("dp", "tp"))]
)
def test_twenty_steps_equal_one_process(shape, names, sizes):
    ranks = 2 if shape == (2,) else 4
    some = ["adamw", "momentum foreach"]
    if sizes is EVEN and (THOROUGH or shape == (2, 2)):
        optimizers = list(OPTIMIZERS)
    elif THOROUGH or shape == (2, 2):
        optimizers = some
    else:  # of the meshes of one axis, each with one of them
        turn = (shape == (4,)) ^ (sizes is EVEN)
        optimizers = [some[turn]]
    run_ranks(
        job, ranks, shape, names, optimizers, sizes, torch.float64, 1e-8, timeout=300
    )


def test_twenty_steps_in_float32():
    run_ranks(
        job,
        4,
        (2, 2),
        ("dp", "tp"),
        ["momentum", "adamw"],
        EVEN,
        torch.float32,
        2e-4,
        timeout=300,
    )


def count(asked):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = shard_module(Model(**EVEN), mesh, plan([]))
    if asked:
        shard_module(
            model,
            mesh,
            ShardingPlan(
                output_plan={
                    f"blocks.*.{name}": [Replicate()] for name in ("wo", "down")
                }
            ),
        )
    x = distribute_tensor(torch.randn(4, 8, 16).requires_grad_(), mesh, [Replicate()])
    with CommunicationLedger(mesh) as ledger:
        y = model.blocks[0](x).redistribute()
        y.sum().backward()
    return ledger.counts(backward=False), ledger.counts(backward=True), ledger.table()


@pytest.mark.parametrize("asked", [True, False])
def test_a_block_costs_two_all_reduces_each_way(asked):
    for forward, backward, table in run_ranks(count, 4, asked):
        assert forward == {"all_reduce": 2}, table
        assert backward == {"all_reduce": 2}, table
