# SPDX-License-Identifier: Apache-2.0
"""A run that goes on from saved state against one that was never broken: optimizers, generators, models."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from hyper_parallel import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.core.distributed_checkpoint.api import load, save
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.metadata import (
    TensorProperties,
    TensorStorageMetadata,
)
from hyper_parallel.core.distributed_checkpoint.training_state import (
    ModelState,
    OptimizerState,
    RandomState,
)
from hyper_parallel.testing import on_ranks, run_ranks


class Net(nn.Module):
    """Tied weights, a number as parameter, and a parameter that never gets a gradient."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.inner = nn.Linear(4, 5)
        self.out = nn.Linear(5, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, ids):
        return self.head(self.out(torch.tanh(self.inner(self.embed(ids)))) * self.scale)


class Lion(torch.optim.Optimizer):
    """An optimizer that torch does not have; it counts in plain ints."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["momentum"], state["count"] = torch.zeros_like(p), 0
                p.add_(
                    torch.sign(state["momentum"].lerp(p.grad, 0.1)),
                    alpha=-group["lr"] / (1 + state["count"]),
                )
                state["momentum"].lerp_(p.grad, 0.01)
                state["count"] += 1


OPTIMIZERS = {
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "Adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True, foreach=False),
    "Adam with a tensor as rate": lambda p: torch.optim.Adam(
        p, torch.tensor(1e-2), foreach=False
    ),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, 1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, 1e-2, t0=1),
    "Lion": lambda p: Lion(p, 1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, 1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, 1e-2),
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
}


def on_mesh(shape, seed=0, dtype=torch.float32):
    """The model on a mesh of this shape, its matrices cut along every axis; () is one device."""
    torch.manual_seed(seed)
    model = Net().to(dtype)
    if not shape:
        return model
    cut = [Shard(0), Shard(1)][: len(shape)]

    def partition(name, module, mesh):
        for key in ("weight",) if name in ("embed", "inner") else ():
            module.weight = nn.Parameter(
                distribute_tensor(getattr(module, key).detach(), mesh, cut)
            )
            if name == "embed":
                model.head.weight = module.weight

    return distribute_module(model, init_device_mesh("cpu", shape), partition)


def train(model, optimizer, steps):
    for step in steps:
        ids = torch.randint(6, (4, 3), generator=torch.Generator().manual_seed(step))
        if isinstance(model.scale, DTensor):
            mesh = model.scale.device_mesh
            ids = distribute_tensor(ids, mesh, [Replicate()] * mesh.ndim)
        model(ids).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor):
    return (
        tensor.detach().full_tensor()
        if isinstance(tensor, DTensor)
        else tensor.detach()
    )


def facts(model, optimizer):
    """All of a run in plain values: each tensor's kind, layout and numbers."""
    state = {name: optimizer.state.get(p, {}) for name, p in model.named_parameters()}
    flat = {
        (name, key): value
        for name, values in state.items()
        for key, value in values.items()
    }
    flat |= {name: p.detach() for name, p in model.named_parameters()}
    return {
        name: (
            type(v),
            v.dtype,
            v.requires_grad,
            getattr(v, "layout", None),
            whole(v).tolist(),
        )
        if torch.is_tensor(v)
        else v
        for name, v in flat.items()
    }


@on_ranks(2)
def test_every_optimizer_goes_on_bit_for_bit(tmp_path):
    for name, make in OPTIMIZERS.items():
        model = on_mesh((2,))
        optimizer = make(model.parameters())
        train(model, optimizer, range(3))
        folder = tmp_path / name
        save(
            {"model": model, "optimizer": OptimizerState(model, optimizer)},
            checkpoint_id=folder,
        )
        train(model, optimizer, range(3, 6))

        twin = on_mesh((2,), seed=1)
        fresh = make(twin.parameters())
        load(
            {"model": ModelState(twin), "optimizer": OptimizerState(twin, fresh)},
            checkpoint_id=folder,
        )
        if name != "Adagrad":  # which makes all of its state at once
            assert not fresh.state.get(twin.idle), name
        train(twin, fresh, range(3, 6))
        assert facts(twin, fresh) == facts(model, optimizer), name


def saved_run(folder, shape, make):
    """Saves after three steps and goes on for two; what is then in the run, whole."""
    model = on_mesh(shape, dtype=torch.float64)
    optimizer = OPTIMIZERS[make](model.parameters())
    train(model, optimizer, range(3))
    save(
        {"model": ModelState(model), "optimizer": OptimizerState(model, optimizer)},
        checkpoint_id=folder,
    )
    before = plain(model, optimizer)
    train(model, optimizer, range(3, 5))
    return before, plain(model, optimizer)


def resumed_run(folder, shape, make):
    """Loads, and goes on for two steps."""
    model = on_mesh(shape, seed=1, dtype=torch.float64)
    optimizer = OPTIMIZERS[make](model.parameters())
    load(
        {"model": ModelState(model), "optimizer": OptimizerState(model, optimizer)},
        checkpoint_id=folder,
    )
    loaded = plain(model, optimizer)
    train(model, optimizer, range(3, 5))
    return loaded, plain(model, optimizer)


def plain(model, optimizer):
    return {name: np.array(fact[-1]) for name, fact in facts(model, optimizer).items()}


@pytest.mark.parametrize("make", ["AdamW fused", "Adafactor"])
def test_the_mesh_changes(tmp_path, make):
    saved, after = run_ranks(saved_run, 2, tmp_path, (2,), make)[0]
    runs = [
        run_ranks(resumed_run, 4, tmp_path, shape, make)[3] for shape in ((4,), (2, 2))
    ]
    for loaded, went_on in (*runs, resumed_run(tmp_path, (), make)):
        assert loaded.keys() == saved.keys()
        for name in saved:
            np.testing.assert_array_equal(loaded[name], saved[name], err_msg=str(name))
            np.testing.assert_allclose(
                went_on[name], after[name], rtol=1e-9, atol=1e-12, err_msg=str(name)
            )


def grouped(model, *, turned=False):
    """AdamW with decay for matrices alone; turned, the groups and what is in them come in another order."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.3, "lr": 1e-2},
        {"params": rest, "weight_decay": 0.0},
    ]
    if turned:
        groups = [{"params": group["params"][::-1]} for group in groups[::-1]]
    return torch.optim.AdamW(groups, lr=1e-3)


@on_ranks(2)
def test_parameters_and_groups_in_another_order(tmp_path):
    model = on_mesh((2,))
    optimizer = grouped(model)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 4])
    train(model, optimizer, range(2))
    schedule.step()
    save(
        {
            "model": model,
            "optimizer": OptimizerState(model, optimizer),
            "schedule": schedule,
        },
        checkpoint_id=tmp_path,
    )
    train(model, optimizer, range(2, 4))

    twin = on_mesh((2,), seed=1)
    turned = grouped(twin, turned=True)
    plan = torch.optim.lr_scheduler.MultiStepLR(turned, [7])
    state = {"model": twin, "optimizer": OptimizerState(twin, turned), "schedule": plan}
    load(state, checkpoint_id=tmp_path)
    assert [group["weight_decay"] for group in turned.param_groups] == [0.0, 0.3]
    assert [group["lr"] for group in turned.param_groups] == [
        group["lr"] for group in optimizer.param_groups
    ][::-1]
    assert plan.milestones == schedule.milestones
    train(twin, turned, range(2, 4))
    assert facts(twin, turned) == facts(model, optimizer)


@pytest.fixture
def run():
    """A model on one device and AdamW that has made two steps."""
    model = Net()
    optimizer = grouped(model)
    train(model, optimizer, range(2))
    return model, optimizer


def test_state_is_filled_where_it_is(run, tmp_path):
    model, optimizer = run
    state = {"optimizer": OptimizerState(model, optimizer)}
    save(state, checkpoint_id=tmp_path)
    before = facts(model, optimizer)
    tensors = {id(v) for values in optimizer.state.values() for v in values.values()}
    model.idle.grad = torch.ones(3)
    train(model, optimizer, range(2, 4))
    assert model.idle in optimizer.state
    load(state, checkpoint_id=tmp_path)
    assert model.idle not in optimizer.state, "it had no state then"
    assert {
        id(v) for values in optimizer.state.values() for v in values.values()
    } == tensors
    after = facts(model, optimizer)
    assert {name: after[name] for name in after if isinstance(name, tuple)} == {
        name: before[name] for name in before if isinstance(name, tuple)
    }


def test_without_files(run):
    """The state of one optimizer goes straight into another, which shares no memory with it then."""
    model, optimizer = run
    other = grouped(model, turned=True)
    OptimizerState(model, other).load_state_dict(
        OptimizerState(model, optimizer).state_dict()
    )
    assert facts(model, other) == facts(model, optimizer)
    for parameter, values in optimizer.state.items():
        assert all(
            values[key].data_ptr() != other.state[parameter][key].data_ptr()
            for key in values
        )


def test_a_load_that_fails_changes_no_optimizer():
    model = Net()
    fresh = grouped(model)
    value = OptimizerState(model, fresh)
    value.expect(
        {"state.scale.step": TensorStorageMetadata(TensorProperties("float32"), (), ())}
    )
    assert value.state_dict()["state"].keys() == {"scale"}  # what a load would fill
    assert value.state_dict()["state"] == {} == fresh.state


def test_groups_that_are_cut_otherwise(run):
    model, optimizer = run
    saved = OptimizerState(model, optimizer).state_dict()
    together = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        CheckpointError,
        match=r"group 0 has scale and embed.weight.*in groups 1 and 0, with lr 0.001 and 0.01",
    ):
        OptimizerState(model, together).load_state_dict(saved)
    assert not together.state
    for group in saved["groups"]:
        group |= {"weight_decay": 0.25, "lr": 0.5}
    OptimizerState(model, together).load_state_dict(saved)
    assert together.param_groups[0]["lr"] == 0.5
    assert facts(model, together) == facts(model, optimizer)
    saved["groups"][0]["params"] = ("embed.weight",)
    with pytest.raises(
        CheckpointError,
        match=r"inner.weight and 1 others of group 0 are in no group of the checkpoint",
    ):
        OptimizerState(model, together).load_state_dict(saved)


def test_how_an_optimizer_computes_is_the_runs_own(run):
    model, optimizer = run
    saved = OptimizerState(model, optimizer).state_dict()
    rate = torch.tensor(0.7)
    other = torch.optim.AdamW(grouped(model).param_groups, fused=True)
    for group in other.param_groups:
        group |= {"fused": True, "lr": rate}
    OptimizerState(model, other).load_state_dict({**saved, "groups": saved["groups"]})
    assert all(group["fused"] and group["lr"] is rate for group in other.param_groups)
    assert rate == torch.tensor(1e-3)  # of the last group
    assert OptimizerState(model, other).state_dict()["groups"][0]["lr"] == np.float32(
        1e-3
    )


def test_where_new_state_lies():
    """On the parameter's device, but for the step of an optimizer that counts on the host."""
    model = Net().to("meta", torch.bfloat16)
    for options, step in (
        ({}, "cpu"),
        ({"capturable": True}, "meta"),
        ({"fused": True}, "meta"),
    ):
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.param_groups[0] |= options
        value = OptimizerState(model, optimizer)
        number, moment = TensorProperties("float32"), TensorProperties("float32")
        value.expect({
            "state.scale.step": TensorStorageMetadata(number, (), ()),
            "state.scale.mu_product": TensorStorageMetadata(number, (), ()),
            "state.scale.exp_avg": TensorStorageMetadata(moment, (), ()),
            "state.inner.weight.exp_avg": TensorStorageMetadata(moment, (5, 4), ()),
            "state.gone.exp_avg": TensorStorageMetadata(moment, (5, 4), ()),
        })  # fmt: skip
        found = value.state_dict()["state"]
        assert found.keys() == {"scale", "inner.weight"}
        assert {key: tensor.device.type for key, tensor in found["scale"].items()} == {
            "step": step,
            "mu_product": "meta",
            "exp_avg": "meta",
        }
        assert found["inner.weight"]["exp_avg"].dtype == torch.float32, (
            "as it was saved"
        )


def test_optimizers_that_are_refused():
    model = Net()
    other = torch.optim.SGD(
        [{"params": [model.scale]}, {"params": [nn.Parameter(torch.ones(7, 2))]}], 0.1
    )
    with pytest.raises(
        CheckpointError,
        match=r"group 1 of SGD has a parameter of shape \(7, 2\) that the model has no",
    ):
        OptimizerState(model, other).state_dict()
    lbfgs = torch.optim.LBFGS([model.scale])
    lbfgs.step(lambda: [(model.scale**2).backward(), model.scale.detach() ** 2][1])
    with pytest.raises(
        CheckpointError, match=r"state.scale.old_dirs: LBFGS keeps a list here"
    ):
        OptimizerState(model, lbfgs).state_dict()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    sgd.state["global"] = {"rate": 1.0}
    with pytest.raises(CheckpointError, match=r"SGD keeps state for 'global'"):
        OptimizerState(model, sgd).state_dict()


def test_wrapped_modules_keep_their_names(run, tmp_path):
    model, optimizer = run
    save({"optimizer": OptimizerState(model, optimizer)}, checkpoint_id=tmp_path)
    twin = Net()
    twin.inner = get_platform().ckpt_wrapper(twin.inner)
    fresh = grouped(twin)
    load({"optimizer": OptimizerState(twin, fresh)}, checkpoint_id=tmp_path)
    assert torch.equal(
        fresh.state[twin.inner.weight]["exp_avg"],
        optimizer.state[model.inner.weight]["exp_avg"],
    )


# --- generators


def draws():
    """From every generator, an odd number of normal ones, so that one is kept for the next."""
    return [
        *torch.rand(3).tolist(),
        random.random(),
        random.gauss(0, 1),
        *np.random.standard_normal(3),
        np.random.rand(),
    ]


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


@on_ranks(2)
def test_generators_go_on_where_they_were(tmp_path):
    rank = get_platform().get_rank()
    seed(rank)
    draws()
    save({"random": RandomState()}, checkpoint_id=tmp_path)
    expected = draws()
    seed(99)
    load({"random": RandomState()}, checkpoint_id=tmp_path)
    assert draws() == expected
    seed(1 - rank)
    draws()
    assert draws() != expected, "each rank has its own"


def numbers_saved(folder):
    seed(get_platform().get_rank())
    save({"random": RandomState()}, checkpoint_id=folder)
    return draws()


def numbers_loaded(folder):
    seed(50)
    report = load({"random": RandomState()}, checkpoint_id=folder)
    return draws(), sorted(report.kept)


def test_generators_on_another_number_of_ranks(tmp_path):
    first, second = run_ranks(numbers_saved, 2, tmp_path)
    seed(50)
    untouched = draws()
    names = ["random.cpu", "random.numpy", "random.python"]
    assert run_ranks(numbers_loaded, 4, tmp_path) == [
        (first, []),
        (second, []),
        (untouched, names),
        (untouched, names),
    ]
    assert numbers_loaded(tmp_path) == (first, [])


def test_generators_that_are_not_here():
    value = RandomState()
    stored = {
        name: TensorStorageMetadata(TensorProperties("uint8"), size, ())
        for name, size in (("cuda", (2, 16)), ("numpy", (2, 2512)))
    }
    value.expect(stored)
    state = value.state_dict()
    assert {name: len(own.value) for name, own in state.items()} == {
        "cuda": 16,
        "numpy": 2512,
    }
    expected = draws()[-4:]
    seed(1)
    before = random.getstate()
    with pytest.warns(
        UserWarning,
        match=r"a generator 'cuda' of 16 bytes, this process has .*'python of 2512'",
    ):
        value.load_state_dict(state)
    assert np.random.standard_normal(3).tolist() == expected[:3]
    assert random.getstate() == before
    assert value.state_dict().keys() == {"cpu", "numpy", "python"}


def test_another_generator_of_numpy_is_refused():
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        with pytest.raises(
            CheckpointError, match="must be MT19937 to be stored, got PCG64"
        ):
            RandomState().state_dict()
    finally:
        np.random.set_bit_generator(before)


# --- models


class Counting(nn.Linear):
    """A module with an object in its state."""

    calls = 0

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


def test_models_are_filled_where_they_are(tmp_path):
    model, twin = (
        nn.Sequential(Counting(2, 3), nn.BatchNorm1d(3), Net()) for _ in range(2)
    )
    model[0].calls = 5
    model[1](model[0](torch.ones(4, 2)))
    save({"model": ModelState(model)}, checkpoint_id=tmp_path)
    parameters = list(map(id, twin.parameters()))
    load({"model": ModelState(twin)}, checkpoint_id=tmp_path)
    assert list(map(id, twin.parameters())) == parameters
    assert twin[2].head.weight is twin[2].embed.weight
    assert twin[0].calls == 5
    for name, value in model.state_dict().items():
        assert (
            torch.equal(twin.state_dict()[name], value)
            if torch.is_tensor(value)
            else twin.state_dict()[name] == value
        )
    value = ModelState(twin)
    filled, versions = value.state_dict(), [p._version for p in twin.parameters()]
    value.load_state_dict(filled)
    assert [p._version for p in twin.parameters()] == versions, (
        "what lies in the model is not copied onto itself"
    )
    with pytest.raises(
        CheckpointError,
        match="0._extra_state is not in the state dict, nor are 15 others in both",
    ):
        ModelState(twin).load_state_dict({})
    other = nn.Sequential(Counting(2, 3), nn.BatchNorm1d(3), Net())
    ModelState(other).load_state_dict(model.state_dict())
    assert torch.equal(other[1].running_mean, model[1].running_mean)
    assert other[1].running_mean.data_ptr() != model[1].running_mean.data_ptr()
