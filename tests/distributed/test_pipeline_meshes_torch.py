# SPDX-License-Identifier: Apache-2.0
"""Pipelines on one axis of a mesh: with tensor parallel stages, with fully_shard, and in the order of a group."""

import pytest
import torch
from pipeline_models import (
    Block,
    Mlp,
    Pair,
    batch,
    check_whole_gradients,
    close,
    layers,
    mse,
    new,
    parallel,
    shard,
    whole,
)
from torch import nn

from hyper_parallel import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.fully_shard import fully_shard
from hyper_parallel.core.pipeline_parallel import PipelineStage, Schedule1F1B
from hyper_parallel.core.pipeline_parallel.agreement import PipelineError
from hyper_parallel.testing import on_ranks


def mesh_of(*names):
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


@on_ranks(4)
def test_the_group_of_a_sub_mesh():
    for axis in (0, 1):
        mesh = mesh_of("pp", "dp") if axis == 0 else mesh_of("dp", "pp")
        group = mesh["pp"].get_group()
        pair = Pair(layers(2), group=group)
        seed = torch.distributed.get_rank(mesh["dp"].get_group())
        pair.step(*batch(seed=seed))
        pair.step(*batch(seed=seed + 7))


@on_ranks(4)
def test_stages_follow_the_order_of_the_group():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("pp",), rank_list=(3, 1, 0, 2))
    group = mesh.get_group("pp")
    place = list(torch.distributed.get_process_group_ranks(group)).index(
        torch.distributed.get_rank()
    )
    parts, same = layers(4), layers(4)
    schedule = Schedule1F1B(PipelineStage(parts[place], place, 4, group=group), 4, mse)
    x, y = batch(8)
    schedule.step(x, target=y)
    for one, target in zip(x.chunk(4), y.chunk(4), strict=True):
        (mse(nn.Sequential(*same)(one), target) / 4).backward()
    for own, other in zip(
        parts[place].parameters(), same[place].parameters(), strict=True
    ):
        close(own.grad, other.grad)


# --- tensor parallel


@on_ranks(4)
@pytest.mark.parametrize("name", ["1F1B", "ZB-H1", "Interleaved1F1B"])
def test_tensor_parallel_stages(name):
    mesh = mesh_of("pp", "tp")
    count = 4 if name == "Interleaved1F1B" else 2
    pair = Pair(
        new(*[Mlp] * count),
        name,
        group=mesh["pp"].get_group(),
        pipe=lambda part: parallel(part, mesh["tp"]),
    )
    x, y = batch()
    for _ in range(2):
        outputs, losses = pair.run_alone(x, y)
        own = []
        output = pair.schedule.step(x, target=y, losses=own)
        if pair.has_last:
            close(whole(output), torch.cat(outputs))
            close([whole(one) for one in own], losses)
        check_whole_gradients(pair)


@on_ranks(4)
def test_distributed_tensors_between_stages():
    """Shards travel; the other side knows the layout and the whole shape, also of uneven shards."""
    mesh = mesh_of("pp", "tp")
    seen = []

    def first(layer, x):
        y = layer(x)
        if not isinstance(y, DTensor):
            return y, y.detach() > 0
        return y.redistribute(mesh["tp"], [Shard(1)]), (y.detach() > 0)

    def second(layer, y, mask):
        if isinstance(y, DTensor):
            seen.append((y.placements, tuple(y.shape), tuple(y.to_local().shape)))
            y = y.redistribute(mesh["tp"], [Replicate()])
        return layer(y) * mask

    def distribute(part):
        for module in part.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                placed = distribute_tensor(parameter.detach(), mesh["tp"], [Shard(0)])
                setattr(module, name, nn.Parameter(placed))
        return part

    for name in ("1F1B", "ZB-H1"):
        pair = Pair(
            new(first, second),
            name,
            group=mesh["pp"].get_group(),
            pipe=distribute,
            loss=mse,
        )
        x, y = batch()
        given = distribute_tensor(x, mesh["tp"], [Replicate()])
        target = distribute_tensor(y, mesh["tp"], [Replicate()])
        for _ in range(2):
            outputs, losses = pair.run_alone(x, y)
            own = []
            output = pair.schedule.step(given, target=target, losses=own)
            if pair.has_last:
                assert isinstance(output, DTensor)
                close(whole(output), torch.cat(outputs))
                close([whole(one) for one in own], losses)
            check_whole_gradients(pair)
        if pair.has_last:
            sizes = {3, 2}
            assert all(
                one[0] == (Shard(1),) and one[1] == (2, 5) and one[2][1] in sizes
                for one in seen
            )
            assert len(seen) % 6 == 0
            seen.clear()


class Bare(nn.Module):
    """A stage without parameters, which tell of no mesh."""

    def forward(self, x):
        return x.sin()


@on_ranks(4)
def test_a_distributed_tensor_for_a_stage_without_a_mesh():
    mesh = mesh_of("pp", "tp")

    def first(layer, x):
        y = layer(x)
        return DTensor.from_local(y, mesh["tp"], [Replicate()])

    def loss(output, target):
        return mse(whole(output), target)

    x, y = batch()
    group = mesh["pp"].get_group()
    parts = [*new(first), Bare()]
    pair = Pair(parts, loss=loss, group=group)
    message = r"on the axes \['tp'\] came to a stage on None; pass mesh=.*HP481"
    with pytest.raises(PipelineError, match=message):
        pair.schedule.step(x, target=y)
    options = {"mesh": mesh}
    pair = Pair(parts, loss=loss, group=group, options=lambda stage, part: options)
    (mse(whole(parts[1](parts[0](x))), y)).backward()
    pair.schedule.step(x, target=y)
    check_whole_gradients(pair)


# --- fully_shard


FULLY = [("GPipe", 2), ("1F1B", 2), ("ZB-H1", 2), ("Interleaved1F1B", 4), ("ZBV", 4)]


def sharded_pair(name, count, mesh, **options):
    return Pair(
        new(*[Block] * count),
        name,
        micros=4,
        group=mesh["pp"].get_group(),
        pipe=lambda part: shard(part, mesh["dp"]),
        **options,
    )


def step_sharded(pair, mesh, seed):
    """A step on this rank's half of the batch; one process has the whole."""
    place = torch.distributed.get_rank(mesh["dp"].get_group())
    x, y = batch(16, seed)
    halves = [(one, target) for one, target in zip(x.chunk(2), y.chunk(2), strict=True)]
    for one, target in halves:
        pair.run_alone(one, target, scale=1 / 8)
    pair.schedule.step(halves[place][0], target=halves[place][1])


@on_ranks(4)
@pytest.mark.parametrize(("name", "count"), FULLY)
@pytest.mark.parametrize("keeps", [True, False])
def test_fully_shard_within_stages(name, count, keeps):
    mesh = mesh_of("pp", "dp")
    pair = sharded_pair(name, count, mesh, keep_parameters_whole=keeps)
    optimizers = [
        torch.optim.SGD([p for part in parts for p in part.parameters()], 0.1)
        for parts in (pair.alone, [pair.piped[stage] for stage in pair.own])
    ]
    for seed in range(10 if keeps else 2):
        step_sharded(pair, mesh, seed)
        check_whole_gradients(pair)
        pair.schedule.eval(batch(8)[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for stage in pair.own:
        for own, other in zip(
            pair.piped[stage].parameters(), pair.alone[stage].parameters(), strict=True
        ):
            close(whole(own).detach(), other.detach())


@on_ranks(4)
@pytest.mark.parametrize(("name", "count"), FULLY)
def test_split_backward_with_ddp_reduces_once(name, count):
    """One gather and one reduction per unit and step; gradients add up over steps."""
    mesh = mesh_of("pp", "dp")
    pair = sharded_pair(name, count, mesh)
    step_sharded(pair, mesh, 0)
    with CommunicationLedger(mesh) as ledger:
        step_sharded(pair, mesh, 1)
    counts = {}
    for entry in ledger.entries:
        if entry.axis == "dp":
            counts[entry.collective] = counts.get(entry.collective, 0) + 1
    units = 2 * len(pair.own)
    assert counts == {
        "all_gather_into_tensor": units,
        "reduce_scatter_tensor": units,
    }, counts
    check_whole_gradients(pair)


@on_ranks(4)
def test_fully_shard_after_a_failed_step():
    mesh = mesh_of("pp", "dp")
    pair = sharded_pair("1F1B", 2, mesh)
    step_sharded(pair, mesh, 0)
    pair.zero_grad()
    loss = pair.schedule._loss_fn

    def fail(output, target):
        raise ValueError("the loss")

    for own in (fail, loss):
        pair.schedule._loss_fn = own
        if own is fail:
            with pytest.raises(PipelineError, match="the loss"):
                pair.schedule.step(batch(8)[0], target=batch(8)[1])
            pair.zero_grad()
        else:
            step_sharded(pair, mesh, 1)
            check_whole_gradients(pair)


@on_ranks(2)
def test_all_units_of_a_module_at_once():
    """unshard_all, reshard_all and reduce_gradients of a unit, outside of pipelines."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    alone, sharded = new(Block)[0], shard(new(Block)[0], mesh)
    with CommunicationLedger(mesh) as ledger:
        sharded.unshard_all()
        sharded.unshard_all()
    assert ledger.counts() == {"all_gather_into_tensor": 2}
    sharded.set_requires_gradient_sync(False)
    place = torch.distributed.get_rank()
    with CommunicationLedger(mesh) as ledger:
        for seed in range(2):
            x, _ = batch(6, seed)
            (alone(x).square().sum() / 2).backward()
            sharded(x.chunk(2)[place]).square().sum().backward()
    assert "reduce_scatter_tensor" not in ledger.counts()
    with CommunicationLedger(mesh) as ledger:
        sharded.reduce_gradients()
    assert ledger.counts() == {"reduce_scatter_tensor": 2}
    sharded.reduce_gradients()  # adds nothing
    for own, other in zip(sharded.parameters(), alone.parameters(), strict=True):
        close(whole(own.grad), other.grad)
    sharded.unshard_all()
    sharded.reshard_all()
    with CommunicationLedger(mesh) as ledger:
        sharded.unshard_all()
    assert ledger.counts() == {"all_gather_into_tensor": 2}
    sharded.reshard_all()


@on_ranks(2)
def test_units_reduce_the_gradients_of_a_whole_batch():
    """Inputs are parts of one batch: the sum over the ranks is the gradient."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    alone, sharded = new(Block)[0], new(Block)[0]
    fully_shard(sharded.first, mesh=mesh)
    fully_shard(sharded, mesh=mesh, batch_dim=0)
    sharded.set_requires_gradient_sync(False)
    place = torch.distributed.get_rank()
    for seed in range(2):
        x, _ = batch(6, seed)
        alone(x).square().sum().backward()
        sharded(x.chunk(2)[place]).square().sum().backward()
    sharded.reduce_gradients()
    for own, other in zip(sharded.parameters(), alone.parameters(), strict=True):
        close(whole(own.grad), other.grad)
