# SPDX-License-Identifier: Apache-2.0
"""Errors of fully_shard: each has a code, is the same on every rank, leaves nothing gathered, and training goes on."""

import copy

import pytest
import torch
from sharded_models import Net, batches, both, check_gradients, part_of, wrap
from torch import nn
from torch._subclasses import FakeTensorMode

from hyper_parallel import init_device_mesh, init_empty_weights
from hyper_parallel.core.dtensor.initialisation import init_parameters
from hyper_parallel.core.fully_shard import (
    CPUOffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from hyper_parallel.core.fully_shard.running import runners_below
from hyper_parallel.core.fully_shard.unit import State
from hyper_parallel.testing import on_ranks


def new_mesh(shape=(2,)):
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp",))


def loss_of(net, x):
    return net(x).square().mean()


def raised_by(call):
    """What the call raises; every rank raises the same, up to its own numbers."""
    with pytest.raises((ValueError, RuntimeError)) as raised:
        call()
    codes = [None] * torch.distributed.get_world_size()
    found = (type(raised.value).__name__, getattr(raised.value, "code", None))
    torch.distributed.all_gather_object(codes, found)
    assert len(set(codes)) == 1, codes
    return raised.value


def check_goes_on(one, many, mesh):
    """Nothing is gathered, and the next step is right."""
    many.zero_grad()
    one.zero_grad()
    assert {one.unit.state for one in runners_below(many)} == {State.SHARDED}
    for x in batches(2):
        loss_of(one, x).backward()
        loss_of(many, part_of(x, mesh)).backward()
    check_gradients(one, many)


@on_ranks(2)
def test_parameters_without_data__on_every_rank_then_train():
    mesh = new_mesh()
    torch.manual_seed(0)
    one = Net().double()
    with init_empty_weights():
        many = Net().double()
    wrap(many, mesh)
    x = batches(1)[0]
    for call in (lambda: many(x), many.unshard, many.blocks[0].unshard):
        error = raised_by(call)
        assert error.code == "HP421"
        assert "weight" in str(error)
    init_parameters(many)
    many.load_state_dict(one.state_dict())
    check_goes_on(one, many, mesh)


@on_ranks(2)
def test_parameters_changed_before_backward__then_train():
    mesh = new_mesh()
    one, many = both(mesh)
    loss = loss_of(many, batches(1)[0])
    with torch.no_grad():
        for net in (one, many):
            for parameter in net.parameters():
                parameter.mul_(2)
    assert raised_by(loss.backward).code == "HP424"
    check_goes_on(one, many, mesh)


@on_ranks(2)
def test_second_order__then_train():
    mesh = new_mesh()
    one, many = both(mesh)
    loss = loss_of(many, batches(1)[0])
    parameters = list(many.parameters())
    error = raised_by(lambda: torch.autograd.grad(loss, parameters, create_graph=True))
    assert error.code == "HP432"
    many.reset_iter_state()
    check_goes_on(one, many, mesh)


@on_ranks(2)
def test_units_in_another_order__on_every_rank():
    """Units of equal shapes, which could be mixed up in silence."""
    mesh = new_mesh()
    many = Net().double()
    blocks = list(many.blocks)
    for block in blocks if mesh.get_local_rank() == 0 else reversed(blocks):
        fully_shard(block, mesh=mesh)
    fully_shard(many, mesh=mesh)
    error = raised_by(lambda: many(batches(1)[0]))
    assert error.code in ("HP115", "HP430")  # with the check of order, and without
    assert {one.unit.state for one in runners_below(many)} == {State.SHARDED}


@on_ranks(2)
def test_what_is_no_forward_and_no_unit():
    mesh = new_mesh()
    one, many = both(mesh)
    for name in ("no_such_method", "skipped"):
        error = raised_by(lambda name=name: register_fsdp_forward_method(many, name))
        assert error.code == "HP427"
    error = raised_by(lambda: many.set_modules_to_forward_prefetch([many.head]))
    assert error.code == "HP427"
    assert raised_by(lambda: fully_shard(many, mesh=mesh)).code == "HP427"
    assert raised_by(lambda: fully_shard([many], mesh=mesh)).code == "HP427"
    assert raised_by(lambda: copy.deepcopy(many)).code == "HP423"
    check_goes_on(one, many, mesh)


@on_ranks(2)
def test_an_optimizer_made_before_fully_shard():
    mesh = new_mesh()
    torch.manual_seed(0)
    one = Net().double()
    many = copy.deepcopy(one)
    optimizer = torch.optim.AdamW(many.parameters(), 0.1)
    wrap(many, mesh)
    loss_of(many, part_of(batches(1)[0], mesh)).backward()
    error = raised_by(optimizer.step)
    assert error.code == "HP231"
    assert "embed.weight" in str(error) or "weight (6, 4)" in str(error)
    check_goes_on(one, many, mesh)


@on_ranks(2)
def test_offloaded_parameters_that_were_moved_to_a_device():
    mesh = new_mesh()
    one, many = both(mesh, offload_policy=CPUOffloadPolicy())
    shard = many.blocks[1].up.weight._local
    with FakeTensorMode():  # there is no such device here
        many.blocks[1].up.weight._local = torch.empty(shard.shape, device="cuda")
    error = raised_by(lambda: many(batches(1)[0]))
    assert error.code == "HP434"
    assert "up.weight on cuda:0" in str(error)
    many.blocks[1].up.weight._local = shard
    check_goes_on(one, many, mesh)


SETTERS = {
    "set_requires_gradient_sync": "syncs_gradients",
    "set_requires_all_reduce": "all_reduces",
    "set_reshard_after_forward": "reshard_after_forward",
    "set_reshard_after_backward": "reshard_after_backward",
    "set_reduce_scatter_unused_params": "reduces_unused",
}


@on_ranks(2)
def test_flags_restored_after_error():
    """A flag that is refused changes nothing, and what the user has set outlives a step that raises."""
    mesh = new_mesh()
    one, many = both(mesh)
    for name in SETTERS:
        before = [copy.copy(runner.unit.settings) for runner in runners_below(many)]
        for value in (None, 1, "yes"):
            assert (
                raised_by(lambda n=name, v=value: getattr(many, n)(v)).code == "HP429"
            )
        assert [runner.unit.settings for runner in runners_below(many)] == before
    many.set_requires_gradient_sync(False)
    many.blocks[0].set_reshard_after_forward(False)
    before = [copy.copy(runner.unit.settings) for runner in runners_below(many)]

    def fail(*_):
        raise ArithmeticError("on purpose")

    handles = [
        many.blocks[1].up.register_forward_pre_hook(fail),
        many.blocks[1].up.register_full_backward_hook(fail),
    ]
    for handle in handles:
        with pytest.raises(ArithmeticError):
            loss_of(many, batches(1)[0]).backward()
        handle.remove()
    assert [runner.unit.settings for runner in runners_below(many)] == before
    many.zero_grad()
    many.set_requires_gradient_sync(True)
    many.reset_iter_state()
    check_goes_on(one, many, mesh)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.uses_second = True

    def forward(self, x):
        x = self.first(x)
        y = self.second(x)
        return y if self.uses_second else x + 0 * y.detach()


@on_ranks(2)
def test_units_used_on_one_rank_only__on_every_rank():
    mesh = new_mesh()
    torch.manual_seed(0)
    many = Gated().double()
    for unit in (many.first, many.second):
        fully_shard(unit, mesh=mesh)
    fully_shard(many, mesh=mesh)
    many.uses_second = mesh.get_local_rank() == 0
    loss = loss_of(many, batches(1)[0])
    error = raised_by(loss.backward)
    assert error.code in ("HP115", "HP430", "HP431")
    assert "set_reduce_scatter_unused_params(True)" in str(error)
    many.reset_iter_state()
    assert {one.unit.state for one in runners_below(many)} == {State.SHARDED}
