# SPDX-License-Identifier: Apache-2.0
"""get_state_dict and set_state_dict as torch.distributed.checkpoint has them: between meshes, and into one process."""

import copy

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    RowwiseParallel,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.distributed_checkpoint import (
    CheckpointError,
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from hyper_parallel.testing import on_ranks

FULL = StateDictOptions(full_state_dict=True)


def make(mesh=None, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    if mesh is not None:
        parallelize_module(
            model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
    groups = [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": model[2].parameters(), "lr": 0.2},
    ]
    return model, torch.optim.AdamW(groups)


def step(model, optimizer, count=1):
    for number in range(count):
        x = torch.randn(
            3, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64
        )
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


def whole(model):
    return {
        name: value.detach().full_tensor()
        if isinstance(value, DTensor)
        else value.detach()
        for name, value in model.state_dict().items()
    }


def close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)


@on_ranks(2)
def test_a_run_goes_on_on_another_mesh_and_in_one_process():
    mesh = init_device_mesh("cpu", (2,))
    plain = make()
    step(*plain, count=2)
    running = make(mesh)
    step(*running, count=2)
    close(whole(running[0]), whole(plain[0]))
    for options in (
        FULL,
        StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True),
        StateDictOptions(),
        StateDictOptions(flatten_optimizer_state_dict=True),
    ):
        of_model, of_optimizer = get_state_dict(*running, options=options)
        assert isinstance(of_model["0.weight"], DTensor) is not options.full_state_dict
        states = copy.deepcopy((of_model, of_optimizer))
        # onto a mesh of other axes, onto the same one, and into one process
        for other in (
            init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))["b"],
            mesh,
            None,
        ):
            target = make(other, seed=7)
            found = set_state_dict(
                *target,
                model_state_dict=states[0],
                optim_state_dict=states[1],
                options=options,
            )
            assert found == ([], [])
            expected = copy.deepcopy(plain[0].state_dict())
            close(whole(target[0]), expected)
            assert [group["lr"] for group in target[1].param_groups] == [0.1, 0.2]
            twin, twin_optimizer = make()
            twin.load_state_dict(plain[0].state_dict())
            twin_optimizer.load_state_dict(
                copy.deepcopy(plain[1].state_dict())
            )  # torch shares what it loads
            step(twin, twin_optimizer)
            step(*target)
            close(whole(target[0]), twin.state_dict())
    fresh = make(
        mesh, seed=7
    )  # the control: without the optimizer's state the next step is another
    set_model_state_dict(fresh[0], states[0])
    step(*fresh)
    with pytest.raises(AssertionError):
        close(whole(fresh[0]), twin.state_dict())


@on_ranks(2)
def test_rank_0_alone_has_the_state():
    mesh = init_device_mesh("cpu", (2,))
    running = make(mesh)
    step(*running, count=2)
    offload = StateDictOptions(full_state_dict=True, cpu_offload=True)
    of_model, of_optimizer = get_state_dict(*running, options=offload)
    assert bool(of_model) is bool(of_optimizer) is (mesh.rank == 0)
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    target = make(mesh, seed=7)
    set_state_dict(
        *target,
        model_state_dict=of_model,
        optim_state_dict=of_optimizer,
        options=broadcast,
    )
    close(whole(target[0]), whole(running[0]))
    step(*target)
    step(*running)
    close(whole(target[0]), whole(running[0]))


@on_ranks(2)
def test_what_the_options_leave_out_and_what_is_refused():
    mesh = init_device_mesh("cpu", (2,))
    model, optimizer = make(mesh)
    model[0].weight.requires_grad_(False)
    step(model, optimizer)
    frozen = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    assert "0.weight" not in get_model_state_dict(model, options=frozen)
    assert (
        "0.weight"
        not in get_optimizer_state_dict(model, optimizer, options=frozen)["state"]
    )
    bare = StateDictOptions(keep_submodule_prefixes=False)
    assert set(get_model_state_dict(model, submodules=[model[2]], options=bare)) == {
        "weight",
        "bias",
    }
    assert set(get_model_state_dict(model, submodules=[model[2]])) == {
        "2.weight",
        "2.bias",
    }
    state = get_model_state_dict(model, options=FULL)
    part = {name: value for name, value in state.items() if name != "2.bias"} | {
        "other": torch.ones(1)
    }
    with pytest.raises(CheckpointError, match="HP512"):
        set_model_state_dict(model, part)
    found = set_model_state_dict(model, part, options=StateDictOptions(strict=False))
    assert found == (["2.bias"], ["other"])
    with pytest.raises(CheckpointError, match="shape of the whole"):
        set_model_state_dict(model, state | {"0.weight": model[0].weight.to_local()})
    with pytest.raises(ValueError, match="broadcast_from_rank0 needs full_state_dict"):
        StateDictOptions(broadcast_from_rank0=True)
    with pytest.raises(CheckpointError, match="no parameter"):
        set_optimizer_state_dict(model, optimizer, {"state.nothing.step": 1})
