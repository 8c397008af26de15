# SPDX-License-Identifier: Apache-2.0
"""torch.compile: refused in one sentence where it meets what lies on a mesh; functions of plain shards are compiled."""

import copy
import warnings

import pytest
import torch
from torch import nn

from hyper_parallel import (
    ColwiseParallel,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.shard import local_map
from hyper_parallel.core.shard.custom_shard import custom_shard
from hyper_parallel.core.tensor_parallel import Replicated, replicate
from hyper_parallel.testing import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
REFUSED = r"torch.compile: .*cannot be traced.*run the model without torch.compile.*local_map.*to_local.*HP143"


class Gate(nn.Module):
    """Two projections and what is between them, which may be replaced."""

    def __init__(self, between=torch.nn.functional.gelu):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.between = between

    def forward(self, x):
        return self.down(self.between(self.up(x)))


def model_of(**more):
    torch.manual_seed(0)
    return Gate(**more)


def mesh_of_two():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def plan(**more):
    return {"up": ColwiseParallel(**more), "down": RowwiseParallel(**more)}


def on_mesh(**more):
    return parallelize_module(model_of(**more), mesh_of_two(), plan())


def compiled(function, **more):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", **more)


@pytest.mark.parametrize("fullgraph", [False, True])
@on_ranks(2)
def test_what_lies_on_a_mesh_is_refused(fullgraph):
    x = torch.ones(4, 8)
    distributed = distribute_tensor(x, mesh_of_two(), [S0]).requires_grad_()
    by_method, block, optimised = on_mesh(), on_mesh(), on_mesh()
    by_method.compile(backend="aot_eager", fullgraph=fullgraph)
    block.up = compiled(block.up, fullgraph=fullgraph)
    optimised(x).sum().backward()
    step = compiled(torch.optim.AdamW(optimised.parameters()).step, fullgraph=fullgraph)
    data = replicate(model_of(), mesh_of_two())
    without_hooks = model_of()
    without_hooks.up.weight = nn.Parameter(
        distribute_tensor(without_hooks.up.weight.detach(), mesh_of_two(), [S0])
    )
    calls = [
        lambda: compiled(on_mesh(), fullgraph=fullgraph)(x),
        lambda: by_method(x),
        lambda: block(x),
        lambda: compiled(lambda value: (value * 2).relu().sum(), fullgraph=fullgraph)(
            distributed
        ),
        compiled(lambda: (distributed * 2).relu().sum(), fullgraph=fullgraph),
        lambda: compiled(data, fullgraph=fullgraph)(x),
        lambda: compiled(without_hooks, fullgraph=fullgraph)(x),
        step,
    ]
    for call in calls:
        torch._dynamo.reset()
        before = dict(torch._dynamo.utils.counters["stats"])
        with pytest.raises(RuntimeError, match=f"(?s){REFUSED}") as found:
            call()
        assert type(found.value).__name__ == "NotCompilable"
        assert torch._dynamo.utils.counters["stats"].get("unique_graphs") == before.get(
            "unique_graphs"
        )
    get_platform().barrier()  # no rank waits for another


@on_ranks(2)
def test_a_distributed_tensor_made_inside_is_refused():
    mesh = mesh_of_two()
    make = compiled(lambda x: (distribute_tensor(x, mesh, [S0]) * 2).sum())
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # of the compiler, which reads on until there is such a tensor
        with pytest.raises(RuntimeError, match=f"(?s){REFUSED}"):
            make(torch.ones(4, 8))


@on_ranks(2)
def test_a_plan_for_a_compiled_module_is_refused():
    by_method = model_of()
    by_method.compile(backend="aot_eager")
    inner = nn.Sequential(model_of())
    inner[0].up = compiled(inner[0].up)
    for model, patterns in (
        (compiled(model_of()), plan()),
        (compiled(model_of()), {"": Replicated()}),
        (by_method, plan()),
        (inner, {"0.up": ColwiseParallel()}),
        (inner, {"0.*": ColwiseParallel()}),
    ):
        with pytest.raises(
            ValueError, match=r"whose calls torch.compile has compiled.*HP414"
        ):
            parallelize_module(model, mesh_of_two(), patterns)
    parallelize_module(
        inner, mesh_of_two(), {"0.down": RowwiseParallel()}
    )  # the compiled one is another


@on_ranks(2)
def test_functions_of_plain_shards_are_compiled():
    warnings.filterwarnings(
        "ignore", message="The .grad attribute"
    )  # the compiler asks plain results for it
    mesh = mesh_of_two()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    plain = model_of()
    (plain(x) ** 2).sum().backward()
    gelu = compiled(torch.nn.functional.gelu, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    mapped = local_map(gelu, [S1], ([S1],))
    sharded = custom_shard(gelu, mesh, ([S1],), ([S1],))
    for between, local in ((gelu, True), (mapped, False), (sharded, False)):
        model = parallelize_module(
            model_of(between=between), mesh, plan(use_local_output=local)
        )
        found = model(x) ** 2
        found.sum().backward()
        for mine, true in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), true.grad)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    leaf = distribute_tensor(x, mesh, [S0]).requires_grad_()
    gelu(leaf.to_local()).sum().backward()
    twin = x.clone().requires_grad_()
    torch.nn.functional.gelu(twin).sum().backward()
    torch.testing.assert_close(leaf.grad.full_tensor(), twin.grad)


@on_ranks(2)
def test_nothing_changes_outside_a_compilation():
    model = on_mesh()
    assert not hasattr(model.up.weight, "__tensor_flatten__")
    twin = copy.deepcopy(model).double()
    with pytest.raises(RuntimeError, match="HP143"):
        compiled(twin)(torch.ones(4, 8).double())
    assert twin(torch.ones(4, 8).double()).dtype is torch.float64
