# SPDX-License-Identifier: Apache-2.0
"""Whole modules on a mesh: distribute_module, shard_module with a plan, state dicts, casts, hooks, copies."""

import copy
import warnings

import pytest
import torch
from torch import nn

from hyper_parallel import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.shard.sharding_plan import ShardingPlan, shard_module
from hyper_parallel.testing import on_ranks

R, S0, S1 = [Replicate()], [Shard(0)], [Shard(1)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.down = nn.Linear(10, 6, bias=False)
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x):
        return self.down(torch.relu(self.norm(self.up(x)))) * self.scale


def net():
    torch.manual_seed(0)
    return Net().double()


def data():
    return torch.randn(
        5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def same(mine, true):
    whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
    torch.testing.assert_close(whole.detach(), true.detach(), rtol=1e-10, atol=1e-10)


def truth():
    model = net()
    y = model(data())
    y.pow(2).sum().backward()
    return model, y


def columns_then_rows(name, module, mesh):
    placements = {"up": (S0, S0), "down": (S1, None)}.get(name)
    if placements:
        for key, wanted in zip(("weight", "bias"), placements, strict=True):
            if wanted:
                setattr(
                    module,
                    key,
                    nn.Parameter(distribute_tensor(getattr(module, key), mesh, wanted)),
                )


@on_ranks(2)
def test_distribute_module_distributes_everything():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    expected, y = truth()
    seen = []

    def enter(module, inputs, mesh):
        seen.append(type(module).__name__)
        return tuple(distribute_tensor(x, mesh, R) for x in inputs)

    model = distribute_module(
        net(),
        mesh,
        columns_then_rows,
        enter,
        lambda _, out, mesh: out.redistribute().to_local(),
    )
    assert seen == []
    assert all(isinstance(t, DTensor) for t in (*model.parameters(), *model.buffers()))
    assert model.up.weight.placements == (Shard(0),)
    assert model.norm.weight.placements == (Replicate(),)
    assert isinstance(model.norm.weight, nn.Parameter)
    output = model(data())
    assert seen == ["Net"]
    assert type(output) is torch.Tensor
    same(output, y)
    output.pow(2).sum().backward()
    for mine, true in zip(model.parameters(), expected.parameters(), strict=True):
        same(mine.grad, true.grad)
        assert mine.grad.placements == mine.placements
    with pytest.raises(
        RuntimeError, match="distribute_module: the module is distributed already"
    ):
        distribute_module(model, mesh)


@on_ranks(2)
def test_distribute_module_keeps_tied_weights_tied_and_checks_its_functions():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = net()
    model.second = nn.Linear(10, 6, bias=False)
    model.second.weight = model.down.weight
    with mesh:
        distribute_module(model)
    assert model.second.weight is model.down.weight
    with pytest.warns(FutureWarning, match="input_fn"):
        distribute_module(net(), mesh, None, lambda inputs, mesh: inputs)
    with pytest.raises(ValueError, match="output_fn must take .* it takes 1"):
        distribute_module(net(), mesh, None, None, lambda x: x)


@on_ranks(4)
def test_a_plan_by_name_in_either_form():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    expected, y = truth()
    plan = ShardingPlan(
        plan={
            "up.*": [Replicate(), Shard(0)],
            "down.weight": ("None", "tp"),
            "norm.*": [Replicate(), Replicate()],
        },
        input_plan={"": [Shard(0), Replicate()]},
        output_plan={"output": ("dp", "None")},
        return_local_tensor=[""],
    )
    model = shard_module(net(), mesh, plan)
    model.scale = distribute_tensor(model.scale, mesh, [Replicate()] * 2)
    assert model.up.bias.placements == (Replicate(), Shard(0))
    output = model(data())
    assert type(output) is torch.Tensor
    rows = 3 if mesh.get_local_rank("dp") == 0 else 2
    assert output.shape == (rows, 6)
    whole = DTensor.from_local(output, mesh, [Shard(0), Replicate()], shape=(5, 6))
    same(whole, y)
    whole.pow(2).sum().backward()
    for mine, true in zip(model.parameters(), expected.parameters(), strict=True):
        same(mine.grad, true.grad)
    with pytest.raises(
        ValueError, match="'up.wieght' matches no parameter; did you mean up.weight"
    ):
        shard_module(net(), mesh, ShardingPlan({"up.wieght": [Replicate(), Shard(0)]}))
    with pytest.raises(ValueError, match="parameter up.weight already lies in"):
        shard_module(model, mesh, ShardingPlan({"up.weight": [Replicate(), Shard(0)]}))
    with pytest.raises(TypeError, match="expected a ShardingPlan, got dict"):
        shard_module(net(), mesh, {})


@on_ranks(2)
def test_inputs_by_position_and_keyword():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    class Two(nn.Module):
        def forward(self, x, mask=None, scale=1.0):
            return {"y": x * mask * scale, "n": 3}

    plan = ShardingPlan({}, {"": {0: S0, "mask": R}}, {"": {"y": S1}})
    made = shard_module(Two(), mesh, plan)(data(), mask=data(), scale=2.0)
    assert made["n"] == 3
    assert made["y"].placements == (Shard(1),)
    same(made["y"], data() * data() * 2)
    plan = ShardingPlan({}, {"": [S0, R]})
    assert shard_module(Two(), mesh, plan)(data(), data())["y"].placements == (
        Shard(0),
    )


@on_ranks(2)
def test_state_dicts_casts_copies_and_hooks():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    expected, _ = truth()
    model = distribute_module(net(), mesh, columns_then_rows)
    state = model.state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == {
        name: tuple(t.shape) for name, t in expected.state_dict().items()
    }
    other = distribute_module(Net().double(), mesh, columns_then_rows)
    assert not torch.equal(other.up.weight.to_local(), model.up.weight.to_local())
    other.load_state_dict(state)
    for mine, true in zip(
        other.state_dict().values(), expected.state_dict().values(), strict=True
    ):
        same(mine, true)
    rowwise = distribute_module(
        Net().double(), mesh
    )  # another layout: load_state_dict redistributes
    rowwise.load_state_dict(state)
    same(rowwise.up.weight, expected.up.weight)
    assert rowwise.up.weight.placements == (Replicate(),)
    twin = copy.deepcopy(model)
    twin.up.weight.data.zero_()
    same(model.up.weight, expected.up.weight)
    before = model.up.weight
    model.float()
    assert model.up.weight.dtype == torch.float32
    assert model.up.weight is before
    assert isinstance(model.up.weight, nn.Parameter)
    assert model.up.weight.placements == (Shard(0),)
    assert model.scale.dtype == torch.float32
    model.double().requires_grad_(False)
    assert not any(p.requires_grad for p in model.parameters())
    model.requires_grad_(True)
    seen = []
    model.up.register_forward_hook(
        lambda m, i, out: seen.append(("forward", type(out).__name__, tuple(out.shape)))
    )
    model.up.register_full_backward_hook(
        lambda m, gi, go: seen.append(
            ("backward", type(go[0]).__name__, tuple(go[0].shape))
        )
    )
    x = distribute_tensor(data().requires_grad_(), mesh, R)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = model(x)
    out.pow(2).sum().backward()
    assert seen == [("forward", "DTensor", (5, 10)), ("backward", "DTensor", (5, 10))]
    model.zero_grad()
    assert model.up.weight.grad is None
