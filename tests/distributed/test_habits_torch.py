# SPDX-License-Identifier: Apache-2.0
"""What people do around a model on a mesh: it works, or the error names what to call instead."""

import io
import os
import subprocess
import sys
import warnings
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hyper_parallel
from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.modes import implicit_replication
from hyper_parallel.core.tensor_parallel import (
    ColwiseParallel,
    Replicated,
    RowwiseParallel,
    replicate,
)
from hyper_parallel.testing import on_ranks, run_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def line():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))


def plan():
    styles = {
        "0": ColwiseParallel(use_local_output=False),
        "2": RowwiseParallel(use_local_output=False),
    }
    return {**styles, "": Replicated()}


# --- arguments


class Outputs(nn.Module):
    """A module whose argument is an output of another one of transformers, or a mapping."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 6)

    def forward(self, given):
        return {"y": self.up(given["last_hidden_state"]), "given": given}


def call_with_mappings():
    from transformers.modeling_outputs import BaseModelOutput

    x = torch.ones(2, 4)
    true = model_of()[0]
    model = Outputs()
    model.up.load_state_dict(true.state_dict())
    parallelize_module(
        model, line(), {"up": ColwiseParallel(use_local_output=False), "": Replicated()}
    )
    for given in (
        BaseModelOutput(last_hidden_state=x),
        BaseModelOutput(last_hidden_state=x, hidden_states=(x, x)),
        UserDict(last_hidden_state=x),
        {"last_hidden_state": x},
    ):
        found = model(given)
        torch.testing.assert_close(found["y"], true(x))
        assert type(found["given"]) is type(given)
        assert isinstance(found["given"]["last_hidden_state"], DTensor)
        assert (
            type(given["last_hidden_state"]) is torch.Tensor
        )  # the caller's own is left alone
        if isinstance(given, BaseModelOutput):
            assert (
                found["given"].last_hidden_state is found["given"]["last_hidden_state"]
            )
    return True


def test_outputs_of_transformers_and_mappings_are_arguments():
    assert run_ranks(call_with_mappings, 2, timeout=300) == [True, True]


@on_ranks(2)
def test_hooks_that_return_no_tensor_are_told_as_on_one_device():
    for register, expected in (
        (
            lambda m: m[1].register_forward_hook(lambda *_: 3),
            "Linear: expected a tensor|must be Tensor, not int",
        ),
        (lambda m: m[0].register_forward_hook(lambda *_: 3), "must be Tensor, not int"),
        (
            lambda m: m[1].register_full_backward_hook(lambda *_: 3),
            "hook returned 'int'",
        ),
        (lambda m: m[0].weight.register_hook(lambda _: 3), "hook returned 'int'"),
    ):
        for model in (model_of(), parallelize_module(model_of(), line(), plan())):
            register(model)
            with pytest.raises((TypeError, ValueError), match=expected):
                model(torch.ones(2, 4)).sum().backward()
    model = parallelize_module(model_of(), line(), plan())
    model.register_forward_hook(lambda *_: "a report")
    assert model(torch.ones(2, 4)) == "a report"


# --- optimizers


@on_ranks(2)
def test_an_optimizer_made_before_the_plan_is_refused_at_its_first_step():
    mesh = line()
    for place in (
        lambda m: parallelize_module(m, mesh, plan()),
        lambda m: distribute_module(m, mesh),
        lambda m: replicate(m, mesh),
    ):
        model = model_of()
        early = torch.optim.AdamW(model.parameters())
        place(model)
        with implicit_replication():
            model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(
            RuntimeError,
            match=r"AdamW.step: 4 of its 4 .*weight \(6, 4\) of Linear.*HP231",
        ):
            early.step()
        before = model[0].weight.full_tensor().clone()
        late = torch.optim.AdamW(model.parameters())
        late.step()
        assert not torch.equal(model[0].weight.full_tensor(), before)
    plain = nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()


@on_ranks(4)
def test_an_optimizer_made_between_two_axes_is_refused():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(model_of(), mesh["tp"], plan())
    between = torch.optim.SGD(model.parameters(), lr=0.1)
    replicate(model, mesh["dp"])
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="construct the optimizer after"):
        between.step()


@on_ranks(2)
def test_torch_takes_lists_of_distributed_tensors_for_what_they_are():
    from torch.optim.optimizer import _foreach_supported_types
    from torch.utils import _foreach_utils

    assert DTensor in _foreach_supported_types
    tensors = [distribute_tensor(torch.ones(4), line(), [S0])]
    assert _foreach_utils._has_foreach_support(tensors, torch.device("cpu"))


# --- plans and wrappers


@on_ranks(2)
def test_plans_and_wrappers_that_cannot_be():
    mesh = line()
    with pytest.raises(
        TypeError, match=r"expected a style, or a dict .*got a list.*HP402"
    ):
        parallelize_module(model_of(), mesh, [("0", ColwiseParallel())])
    for style in (ColwiseParallel(), RowwiseParallel()):
        model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)))
        with pytest.raises(
            ValueError,
            match=r"0: .*no weight of its own.*remove_parametrizations.*HP407",
        ):
            parallelize_module(model, mesh, {"0": style})
        nn.utils.parametrize.remove_parametrizations(model[0], "weight")
        parallelize_module(model, mesh, {"0": style})
    with pytest.raises(
        TypeError,
        match=r"DistributedDataParallel.*replicate\(model, mesh\['dp'\]\).*HP320",
    ):
        DistributedDataParallel(parallelize_module(model_of(), mesh, plan()))


# --- tensors


@on_ranks(4)
def test_assert_close_compares_what_lies_anywhere():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = torch.arange(10.0).reshape(5, 2)
    cut, other = (
        distribute_tensor(x, mesh, [S0, R]),
        distribute_tensor(x, mesh, [S1, S0]),
    )
    torch.testing.assert_close(cut, other)
    torch.testing.assert_close(cut, x)
    torch.testing.assert_close({"a": [x, cut]}, {"a": [other, x]})
    pending = DTensor.from_local(x / 2, mesh, [Partial(), R])
    torch.testing.assert_close(pending, cut)
    wrong = x.clone()
    wrong[4, 1] += 1  # which one rank has
    with pytest.raises(
        AssertionError, match=r"Mismatched elements: 1 / 10[^$]*index \(4, 1\)"
    ):
        torch.testing.assert_close(cut, distribute_tensor(wrong, mesh, [S0, R]))
    with pytest.raises(AssertionError, match="dtype"):
        torch.testing.assert_close(cut, cut.double())
    with pytest.raises(AssertionError, match="shape"):
        torch.testing.assert_close(cut, cut[:, :1])


@on_ranks(4)
def test_a_rank_outside_the_mesh_is_refused():
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("x",))
    if mesh.get_coordinate() is None:
        for placements in ([S0], [R]):
            with pytest.raises(RuntimeError, match="HP205"):
                DTensor.from_local(torch.ones(2), mesh, placements)
            with pytest.raises(RuntimeError, match="HP205"):
                distribute_tensor(torch.ones(2), mesh, [S0])
    else:
        assert DTensor.from_local(torch.ones(2), mesh, [S0]).shape == (4,)


@on_ranks(2)
def test_what_a_distributed_tensor_keeps_of_its_source():
    mesh = line()
    for source in (None, 0, 1):
        for wanted in (True, False):
            leaf = torch.ones(4, requires_grad=wanted)
            made = distribute_tensor(leaf, mesh, [S0], src_data_rank=source)
            assert made.requires_grad is wanted
            assert made.is_leaf
        computed = torch.ones(4, requires_grad=True) * 2
        with pytest.raises(
            RuntimeError, match=r"was computed from others.*from_local.*HP222"
        ):
            distribute_tensor(computed, mesh, [S0], src_data_rank=source)
        distribute_tensor(computed.detach(), mesh, [S0], src_data_rank=source)
        with torch.no_grad():
            assert not distribute_tensor(
                torch.ones(4, requires_grad=True) * 2, mesh, [S0]
            ).requires_grad
    leaf = torch.ones(4, requires_grad=True)
    DTensor.from_local(leaf * 2, mesh, [R]).redistribute(mesh, [S0]).sum().backward()
    assert leaf.grad.tolist() == [2.0] * 4


# --- one process, as in a notebook


def test_the_names_that_are_offered():
    offered = dir(hyper_parallel)
    assert set(hyper_parallel.__all__) <= set(offered)
    assert not {"Any", "TYPE_CHECKING"} & set(offered)


def test_a_device_that_is_not_there():
    assert not torch.cuda.is_available()  # as wherever these tests run
    with pytest.raises(
        ValueError, match=r"no device of type 'cuda'.*init_backend=False.*HP201"
    ):
        init_device_mesh("cuda", (1,))
    assert init_device_mesh("cuda", (1,), init_backend=False).device_type == "cuda"


ALONE = """
import torch
from torch import nn
from hyper_parallel import ColwiseParallel, RowwiseParallel, get_platform, init_device_mesh, parallelize_module
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
try:
    parallelize_module(model, mesh, plan)
except RuntimeError as error:
    print(error)
get_platform().init_process_group()
x = torch.ones(2, 4)
true = model(x)
parallelize_module(model, mesh, plan)
torch.testing.assert_close(model(x), true)
model(x).sum().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
print("done", get_platform().get_world_size(), get_platform().get_rank())
"""


def test_a_process_that_nobody_launched(tmp_path):
    launched = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"}
    environment = {
        name: value for name, value in os.environ.items() if name not in launched
    }
    run = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "call init_process_group() first" in run.stdout
    assert "done 1 0" in run.stdout


def test_a_pickle_of_a_plain_model_is_as_it_was():
    file = io.BytesIO()
    torch.save(model_of(), file)
    file.seek(0)
    assert isinstance(torch.load(file, weights_only=False), nn.Sequential)


@on_ranks(2)
def test_functions_of_torch_masked():
    mesh = line()
    x = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) / 7
    mask = torch.tensor([[True, False, True]] * 3 + [[False] * 3])
    cut, cut_mask = (
        distribute_tensor(x, mesh, [S0]).requires_grad_(),
        distribute_tensor(mask, mesh, [S1]),
    )
    plain = x.clone().requires_grad_()
    for name in ("sum", "mean", "softmax", "amax", "std", "normalize"):
        arguments = (2.0, 1) if name == "normalize" else (1,)
        function = getattr(torch.masked, name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it runs on whole tensors
            mine = function(cut, *arguments, mask=cut_mask)
        true = function(plain, *arguments, mask=mask)
        torch.testing.assert_close(mine, true, equal_nan=True)
        for result in (mine, true):
            result[:3].square().sum().backward()
    torch.testing.assert_close(cut.grad, plain.grad, equal_nan=True)
