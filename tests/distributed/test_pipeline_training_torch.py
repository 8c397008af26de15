# SPDX-License-Identifier: Apache-2.0
"""Losses and targets of a pipeline, and what it keeps and runs while it trains."""

import weakref

import pytest
import torch
from pipeline_models import (
    DIM,
    Layer,
    Pair,
    batch,
    check_whole_gradients,
    close,
    layers,
    mse,
    new,
)
from torch import nn

from hyper_parallel import (
    fully_shard,
    init_device_mesh,
)
from hyper_parallel.core.activation_checkpoint import checkpoint
from hyper_parallel.core.pipeline_parallel import (
    PipelineScheduleRuntime,
    PipelineStage,
    build_schedule,
    plan_stages,
)
from hyper_parallel.core.pipeline_parallel.action import RECEIVES, SENDS
from hyper_parallel.core.pipeline_parallel.messages import add_messages
from hyper_parallel.testing import on_ranks

# --- losses and targets


@on_ranks(4)
def test_sums_of_losses_under_fully_shard():
    """Without scaling, and without the mean over ranks: gradients of the sum of all losses of the whole batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def shard(part):
        unit = fully_shard(part, mesh=mesh["dp"])
        unit.set_gradient_divide_factor(1.0)
        return unit

    pair = Pair(layers(2), group=mesh["pp"].get_group(), pipe=shard, scale_grads=False)
    x, y = batch(12)
    halves = list(zip(x.chunk(2), y.chunk(2), strict=True))
    for half in halves:
        pair.run_alone(*half, scale=1)
    own, target = halves[mesh["dp"].get_local_rank()]
    pair.schedule.step(own, target=target)
    check_whole_gradients(pair)


@on_ranks(2)
def test_targets_may_be_structures():
    """Divided leaf by leaf at dim 0, numbers and None as they are; the loss gets its own keyword arguments."""
    x, y = batch()
    rows = torch.arange(6)
    marker = object()

    def loss(output, target, *, weight, note):
        assert note is marker
        (first, (number, nothing)), ids = target["pair"], target["ids"]
        assert (number, nothing, first.shape[0], ids.shape[0]) == (3, None, 2, 2)
        return mse(output * (1 + ids[:, None]), first) * weight * number

    given = {"weight": torch.tensor(0.5, dtype=torch.double), "note": marker}
    pair = Pair(layers(2), loss=loss)
    target = {"pair": (y, [3, None]), "ids": rows}
    losses, expected = [], []
    pair.schedule.step(x, target=target, losses=losses, loss_kwargs=given)
    for micro, one in enumerate(x.chunk(3)):
        part = {"pair": (y.chunk(3)[micro], [3, None]), "ids": rows.chunk(3)[micro]}
        value = loss(pair.forward_alone(one), part, **given)
        (value / 3).backward()
        expected.append(value.detach())
    pair.check_gradients()
    if pair.has_last:
        close(losses, expected)
    given = pair.schedule.eval(x, target=target, losses=losses, loss_kwargs=given)
    if pair.has_last:
        close(losses, expected)


# --- forwards and messages


@on_ranks(2)
def test_no_forward_is_run_to_find_out_shapes():
    """Each micro batch once, so that the statistics of a norm are those of one process."""
    calls = []

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = nn.BatchNorm1d(DIM), Layer()

        def forward(self, x):
            calls.append(1)
            return self.layer(self.norm(x))

    pair = Pair(new(Counted, Counted))
    for seed in range(2):
        x, y = batch(seed=seed)
        pair.schedule.step(x, target=y)
    assert len(calls) == 6
    for seed in range(2):
        pair.run_alone(*batch(seed=seed))
    pair.check_gradients()
    own, alone = pair.piped[pair.rank].norm, pair.alone[pair.rank].norm
    assert own.num_batches_tracked == 6
    for name, value in alone.state_dict().items():
        close(own.state_dict()[name], value)


@on_ranks(2)
def test_receive_does_not_block_the_stage_before_it():
    """All receives of a rank come before anything else: they only name where a message goes."""
    for name, chunks in (("1F1B", 1), ("Interleaved1F1B", 2)):
        schedule = add_messages(build_schedule(name, 2, 4, chunks))
        orders = tuple(
            tuple(sorted(order, key=lambda step: step.type not in RECEIVES))
            for order in schedule.orders
        )
        assert orders != schedule.orders
        assert any(step.type in SENDS for step in orders[0])
        early = schedule.with_orders(orders)
        parts, same = layers(2 * chunks), layers(2 * chunks)
        rank = torch.distributed.get_rank()
        own = range(rank, 2 * chunks, 2)
        stages = [PipelineStage(parts[n], n, 2 * chunks) for n in own]
        runtime = PipelineScheduleRuntime(stages, 4, schedule=early, loss_fn=mse)
        x, y = batch(8)
        for one, target in zip(x.chunk(4), y.chunk(4), strict=True):
            (mse(nn.Sequential(*same)(one), target) / 4).backward()
        runtime.step(x, target=y)
        for n in own:
            for mine, other in zip(
                parts[n].parameters(), same[n].parameters(), strict=True
            ):
                close(mine.grad, other.grad)


@on_ranks(2)
def test_receive_buffer_reuse_keeps_no_hooks():
    """A hook on what a stage is given runs once for each micro batch of each step, and its tensor is then freed."""
    seen, given = [], []

    def watch(layer, x):
        if x.requires_grad:
            x.register_hook(lambda gradient: seen.append(gradient.sum()))
            given.append(weakref.ref(x))
        return layer(x)

    pair = Pair(new(Layer, watch))
    for steps in range(1, 4):
        x, y = batch()
        pair.schedule.step(x, target=y)
        assert len(seen) == (3 * steps if pair.rank == 1 else 0)
        assert all(one() is None for one in given)


@on_ranks(2)
def test_outputs_of_inner_stages_are_freed_after_their_backward():
    """What is sent is not kept either: a forward finds the outputs of those micro batches that wait for backward."""
    outputs, alive = [], []

    def first(layer, x):
        alive.append(sum(one() is not None for one in outputs))
        y = layer(x)
        outputs.append(weakref.ref(y))
        return y

    for name, expected in (("GPipe", [0, 1, 2, 3]), ("1F1B", [0, 1, 1, 1])):
        pair = Pair(new(first, Layer), name, micros=4)
        outputs.clear(), alive.clear()
        x, y = batch(8)
        pair.schedule.step(x, target=y)
        if pair.rank == 0:
            assert alive == expected
            assert all(one() is None for one in outputs)


@on_ranks(2)
def test_overlap_p2p_changes_no_value():
    for overlap in (False, True):
        pair = Pair(layers(4), "Interleaved1F1B", overlap_p2p=overlap)
        pair.step(*batch())


@on_ranks(2)
def test_split_backward_with_activation_checkpoint__memory():
    """Between the two parts of a backward nothing is alive of what a checkpoint recomputes."""
    inner = []

    def first(layer, x):
        def run(x):
            hidden = layer(x).sin()
            inner.append(weakref.ref(hidden))
            return hidden.cos()

        return checkpoint(run, x)

    pair = Pair(new(Layer, first), "ZB-H1")
    alive = []
    if pair.rank == 1:
        stage = pair.stages[0]
        run = stage.run_backward_weights

        def look(micro):
            alive.append(sum(one() is not None for one in inner))
            run(micro)

        stage.run_backward_weights = look
    x, y = batch()
    pair.schedule.step(x, target=y)
    if pair.rank == 1:
        assert len(inner) == 6  # forward, and once in backward
        assert alive == [0, 0, 0]


@pytest.mark.parametrize(("count", "stages"), [(7, 3), (5, 4), (30, 4), (6, 6)])
def test_no_layer_is_lost_when_layers_do_not_divide(count, stages):
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(1, 1) for _ in range(count)])
    plan = plan_stages(model, stages)
    pieces = [plan.pieces_of(stage) for stage in range(stages)]
    names = [f"blocks.{number}" for number in range(count)]
    assert [name for of_stage in pieces for name in of_stage] == names
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


def test_exports_of_readme():
    import hyper_parallel
    from hyper_parallel.core import pipeline_parallel

    for name in ("PipelineStage", "Schedule1F1B"):
        assert getattr(hyper_parallel, name) is getattr(pipeline_parallel, name)
