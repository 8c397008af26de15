# SPDX-License-Identifier: Apache-2.0
"""What a plain tensor is: a part of the batch at a model's boundary, a copy inside it, and what was said outside."""

import os

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from torch import nn

from hyper_parallel import DTensor, Replicate, Shard, init_device_mesh
from hyper_parallel.core.dtensor.modes import implicit_replication
from hyper_parallel.core.modules.axis import HYPER_PARALLEL_CHECK_BATCHES
from hyper_parallel.core.tensor_parallel import (
    ColwiseParallel,
    Replicated,
    RowwiseParallel,
    local_batch,
    parallelize_module,
    replicate,
    same_everywhere,
)
from hyper_parallel.testing import on_ranks

LOCAL = {"use_local_output": False}


def mesh_of_four():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def on_mesh(model, plan, mesh):
    return replicate(
        parallelize_module(model, mesh["tp"], {**plan, "": Replicated()}), mesh["dp"]
    )


def rows(tensor, mesh):
    return tensor.chunk(2)[mesh["dp"].get_local_rank()]


def same_gradients(model, true):
    for (name, mine), (_, one) in zip(
        model.named_parameters(), true.named_parameters(), strict=True
    ):
        torch.testing.assert_close(
            mine.grad.full_tensor(), one.grad, msg=lambda m, name=name: f"{name}: {m}"
        )


class MakesInputs(nn.Module):
    """Calls styled modules with tensors that it makes itself."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
        self.bias, self.queries = nn.Embedding(6, 5), nn.Linear(5, 5)

    def forward(self, x):
        made = self.net(torch.eye(8, dtype=self.net[0].weight.dtype)).sum(0)
        learned = self.queries(self.bias(torch.arange(6))).mean(0)
        return self.net(x) + made + learned


MAKES = {
    "net.0": ColwiseParallel(**LOCAL),
    "net.2": RowwiseParallel(**LOCAL),
    "bias": RowwiseParallel(**LOCAL),
    "queries": RowwiseParallel(**LOCAL),
}


@on_ranks(4)
def test_what_a_model_makes_is_the_same_on_every_rank_also_for_styled_modules():
    mesh = mesh_of_four()
    torch.manual_seed(0)
    true, data = MakesInputs().double(), torch.randn(4, 8, dtype=torch.float64)
    torch.manual_seed(0)
    model = on_mesh(MakesInputs().double(), MAKES, mesh)
    true(data).pow(2).mean().backward()
    for around in (
        torch.enable_grad(),
        implicit_replication(),
    ):  # a context of the user's is no boundary
        model.zero_grad()
        with around:
            found = model(rows(data, mesh))
        assert found.shape == (4, 5)
        found.pow(2).mean().backward()
        same_gradients(model, true)


@on_ranks(4)
def test_losses_of_every_kind_with_plain_targets():
    mesh = mesh_of_four()
    torch.manual_seed(0)
    true, data = MakesInputs().double(), torch.randn(4, 8, dtype=torch.float64)
    values, classes = torch.randn(4, 5, dtype=torch.float64), torch.tensor([0, 3, 1, 4])
    weights = torch.rand(5, dtype=torch.float64)
    torch.manual_seed(0)
    model = on_mesh(MakesInputs().double(), MAKES, mesh)

    def losses(model, data, values, classes, weights):
        output = model(data)
        accuracy = (output.argmax(-1) == classes).double().mean()
        custom = ((output - values).abs() * weights).sum(-1).logsumexp(0)
        return F.mse_loss(output, values) + F.smooth_l1_loss(
            output, values, beta=0.5
        ) + custom, accuracy

    loss, accuracy = losses(true, data, values, classes, weights)
    loss.backward()
    for like in (model, model(rows(data, mesh))):
        model.zero_grad()
        given = [
            local_batch(rows(t, mesh), like, run_check=True) for t in (values, classes)
        ]
        assert given[0].placements == (Shard(0), Replicate())
        assert given[0].shape == (4, 5)
        mine = losses(
            model,
            rows(data, mesh),
            *given,
            same_everywhere(weights, like, run_check=True),
        )
        torch.testing.assert_close(mine[0].full_tensor(), loss)
        torch.testing.assert_close(mine[1].full_tensor(), accuracy)
        mine[0].backward()
        same_gradients(model, true)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 5)

    def forward(self, x, mask=None, temperature=None):
        return self.linear(x) * mask / temperature


@on_ranks(4)
def test_arguments_that_are_no_batches():
    mesh = mesh_of_four()
    torch.manual_seed(0)
    true, data = Scaled(), torch.randn(4, 8)
    torch.manual_seed(0)
    model = on_mesh(Scaled(), {"linear": ColwiseParallel(**LOCAL)}, mesh)
    mask, temperature = torch.tensor([1.0, 0, 1, 1, 0]), torch.tensor([2.0])
    found = model(
        rows(data, mesh),
        mask=same_everywhere(mask, model),
        temperature=same_everywhere(temperature, model),
    )
    torch.testing.assert_close(found.full_tensor(), true(data, mask, temperature))


@on_ranks(4)
def test_parts_that_do_not_fit_together_are_told_on_all_ranks():
    mesh = mesh_of_four()
    place = mesh["dp"].get_local_rank()
    data = torch.arange(24.0).view(3, 8)
    cases = {
        "have another shape": data[:2]
        if place == 0
        else data[2:],  # a last batch that is smaller
        "have another values": data
        + mesh.rank,  # a sampler that was given the whole job
    }
    os.environ[HYPER_PARALLEL_CHECK_BATCHES] = "first:2"
    try:
        for told, part in cases.items():
            model = on_mesh(MakesInputs(), MAKES, mesh)
            model(torch.full((2, 8), float(place)))
            with pytest.raises(
                ValueError, match=f"MakesInputs: .*{told}.*part of the batch"
            ) as error:
                model(part)
            assert "HP412" in str(error.value)
    finally:
        del os.environ[HYPER_PARALLEL_CHECK_BATCHES]
    with pytest.raises(ValueError, match="another shape"):
        local_batch(torch.ones(2 + place, 3), model, run_check=True)


@on_ranks(2)
def test_data_that_differs_along_a_tensor_parallel_axis_is_told_without_a_data_axis():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    os.environ[HYPER_PARALLEL_CHECK_BATCHES] = "1"
    try:
        for plan in (MAKES, {**MAKES, "": Replicated()}):
            model = parallelize_module(MakesInputs(), mesh, plan)
            with pytest.raises(ValueError, match=r"ranks \[1\] have another values"):
                model(torch.full((2, 8), float(mesh.rank)))
    finally:
        del os.environ[HYPER_PARALLEL_CHECK_BATCHES]


@on_ranks(2)
def test_what_lies_nowhere_says_so():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with pytest.raises(
        ValueError, match="local_batch: expected a model that .* got Linear"
    ):
        local_batch(torch.ones(2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="a tensor of 0 dims has no dim 0"):
        local_batch(torch.tensor(1.0), replicate(nn.Linear(2, 2), mesh))
    given = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    assert local_batch(given, given) is given


class CallsItself(nn.Module):
    """Calls itself with a tensor that it makes."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 6)

    def forward(self, x, again=True):
        y = self.up(x)
        if not again:
            return y.sum(0)
        return y + self(torch.eye(4, dtype=torch.float64), again=False)


@on_ranks(4)
def test_what_a_model_passes_to_itself_is_the_same_on_every_rank():
    mesh = mesh_of_four()
    torch.manual_seed(0)
    true, data = CallsItself().double(), torch.randn(4, 4, dtype=torch.float64)
    torch.manual_seed(0)
    plan = {"up": ColwiseParallel()}
    model = parallelize_module(CallsItself().double(), mesh["tp"], plan)
    replicate(model, mesh["dp"])
    output = model(rows(data, mesh))
    torch.testing.assert_close(output.full_tensor(), true(data))
    output.pow(2).mean().backward()
    true(data).pow(2).mean().backward()
    same_gradients(model, true)
