# SPDX-License-Identifier: Apache-2.0
"""Pairs of a forward and a backward that take turns at real all-to-alls: the numbers of the plain order."""

import pytest
import torch
from pipeline_models import DIM, Layer, Pair, batch, new
from torch import nn

from hyper_parallel import fully_shard, get_platform, init_device_mesh
from hyper_parallel.core.activation_checkpoint import checkpoint
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.pipeline_parallel import CommComputeOverlap
from hyper_parallel.core.pipeline_parallel.agreement import PipelineError
from hyper_parallel.testing import on_ranks

platform = get_platform()


class Experts(nn.Module):
    """An expert per rank of a group; every second token goes to the other rank and comes back."""

    def __init__(self):
        super().__init__()
        self.layer, self.expert = Layer(), nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.rand(DIM) + 0.5)
        self.connect(None, CommComputeOverlap(enabled=False))

    def connect(self, group, overlap, is_last=False, recomputes=False):
        self.group, self.recomputes = group, recomputes
        self.dispatch = overlap.wrap_dispatch(self.exchange)
        self.combine = overlap.wrap_combine(self.exchange, is_last_layer=is_last)
        return self

    def exchange(self, x):
        if self.group is None:
            return x
        return platform.differentiable_all_to_all_single(x, None, None, self.group)

    def forward(self, x):
        return checkpoint(self.run, x) if self.recomputes else self.run(x)

    def run(self, x):
        x = nn.functional.dropout(self.layer(x), 0.3)
        y = self.dispatch(x * self.scale)
        y = nn.functional.dropout(torch.tanh(self.expert(y)), 0.3)
        return x + self.combine(y)


def stages_of_experts(counts):
    parts = new(*[Layer] * len(counts))
    torch.manual_seed(5)
    return [
        nn.Sequential(part, *[Experts().double() for _ in range(count)])
        for part, count in zip(parts, counts, strict=True)
    ]


def train(
    counts,
    mesh,
    schedule,
    overlap,
    recomputes=False,
    steps=2,
    prepare=None,
    sharded=None,
):
    """(outputs, losses and gradients; F or B for every exchange; the stages of this rank) of some steps."""
    group = mesh["dp"].get_group()

    def connect(part):
        layers = [one for one in part if isinstance(one, Experts)]
        for layer in layers:
            layer.connect(group, overlap, layer is layers[-1], recomputes)
        return part if sharded is None else fully_shard(part, mesh=mesh["dp"])

    torch.manual_seed(9)
    pair = Pair(
        stages_of_experts(counts),
        schedule,
        micros=6,
        group=mesh["pp"].get_group(),
        pipe=connect,
        overlap=overlap,
        keep_parameters_whole=sharded != "freed",
    )
    if prepare is not None:
        prepare(pair)
    found, losses = [], []
    with CommunicationLedger(mesh) as ledger:
        for seed in range(steps):
            x, y = batch(12, seed + 10 * torch.distributed.get_rank(group))
            found.append(pair.schedule.step(x, target=y, losses=losses))
            found += losses
    for stage in pair.own:
        gradients = (one.grad for one in pair.piped[stage].parameters())
        found += [getattr(one, "_local", one) for one in gradients]
    exchanges = [one for one in ledger.entries if one.axis == "dp"]
    order = "".join("B" if one.backward else "F" for one in exchanges)
    return found, order, pair.own


def compare(found, expected):
    assert len(found) == len(expected)
    for value, other in zip(found, expected, strict=True):
        assert (value is None and other is None) or torch.equal(value, other)


CASES = [
    ("DualPipeV", [1, 1, 1, 1], False),
    ("DualPipeV", [2, 0, 1, 3], False),
    ("DualPipeV", [1, 2, 1, 1], True),
    ("DualPipe", [2, 1], False),
]


@on_ranks(4)
@pytest.mark.parametrize(("schedule", "counts", "recomputes"), CASES)
def test_pairs_take_turns_with_real_exchanges(schedule, counts, recomputes):
    """Dropout, recomputation and unequal numbers of layers included; bit by bit."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    plain, overlap = CommComputeOverlap(enabled=False), CommComputeOverlap()
    expected, in_order, own = train(counts, mesh, schedule, plain, recomputes)
    found, together, _ = train(counts, mesh, schedule, overlap, recomputes)
    compare(found, expected)
    assert sorted(together) == sorted(in_order)
    assert "BFBF" not in in_order
    if not recomputes:
        assert ("BFBF" in together) == all(counts[stage] for stage in own)
    orders = [None] * 2
    torch.distributed.all_gather_object(orders, together, mesh["dp"].get_group())
    assert orders[0] == orders[1]


@on_ranks(4)
@pytest.mark.parametrize("sharded", ["whole", "freed"])
def test_pairs_of_fully_sharded_stages(sharded):
    """Parameters are gathered and gradients reduced by the ranks that exchange tokens."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    found, orders = [], []
    for overlap in (CommComputeOverlap(enabled=False), CommComputeOverlap()):
        values, order, _ = train(
            [1, 2, 1, 1], mesh, "DualPipeV", overlap, sharded=sharded
        )
        found.append(values)
        orders.append(order)
    compare(*found)
    assert len(orders[0]) == len(orders[1])


@on_ranks(4)
def test_an_error_on_either_side_of_a_pair_is_an_error_on_all_ranks():
    """Of both pipelines, whose experts exchange tokens; then a good step follows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    class Fault:
        kind, calls = None, 0

        def fails(self, kind):
            self.calls += kind == self.kind
            return kind == self.kind and self.calls == 5

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, fault):
            ctx.fault = fault
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if ctx.fault.fails("backward"):
                raise ValueError("backward of the experts")
            return gradient, None

    class Faulty(nn.Module):
        def __init__(self, expert, fault):
            super().__init__()
            self.expert, self.fault = expert, fault

        def forward(self, x):
            if self.fault.fails("forward"):
                raise ValueError("forward of the experts")
            return Raises.apply(self.expert(x), self.fault)

    fault, pairs = Fault(), []

    def prepare(pair):
        pairs.append(pair)
        for part in pair.piped:
            part[1].expert = Faulty(part[1].expert, fault)

    counts, micros = [1] * 4, 6
    train(counts, mesh, "DualPipeV", CommComputeOverlap(), steps=0, prepare=prepare)
    (pair,) = pairs
    for kind in ("forward", "backward"):
        pair.zero_grad()
        fault.kind, fault.calls = kind, 0
        x, y = batch(2 * micros)
        with pytest.raises(PipelineError, match=f"{kind} of the experts"):
            pair.schedule.step(x, target=y)
        assert fault.calls == 5
        fault.kind = None
        pair.zero_grad()
        pair.schedule.step(x, target=y)
