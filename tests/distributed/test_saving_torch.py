# SPDX-License-Identifier: Apache-2.0
"""Ways in which people save and load a model: each works on a mesh, or says which one does."""

import copy
import io
import pickle
import warnings

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from hyper_parallel import (
    DTensor,
    FusedShard,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.tensor_parallel import (
    ColwiseParallel,
    FusedColwiseParallel,
    Replicated,
    RowwiseParallel,
    replicate,
)
from hyper_parallel.testing import on_ranks, run_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
WAYS_OUT = r"save\(state_dict, checkpoint_id=folder\).*save_hugging_face.*full_tensor\(\).*HP230"


class Attention(nn.Module):
    """Projections, a norm and a buffer, with a weight that two modules share."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.qkv = nn.Linear(8, 12)
        self.out = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.arange(4.0))

    def forward(self, ids):
        q, k, v = self.qkv(self.embed(ids)).chunk(3, -1)
        return self.head(self.norm(self.out((q * k + v) * self.scale)))


def model_of(seed=0):
    torch.manual_seed(seed)
    return Attention()


def plan():
    return {
        "embed": RowwiseParallel(use_local_output=False),
        "qkv": FusedColwiseParallel(sections=3, use_local_output=False),
        "out": RowwiseParallel(use_local_output=False),
        "head": ColwiseParallel(use_local_output=False, output_layouts=Replicate()),
        "": Replicated(),
    }


def on_mesh(seed=0, data=False):
    if not data:
        return parallelize_module(
            model_of(seed),
            init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)),
            plan(),
        )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return replicate(parallelize_module(model_of(seed), mesh["tp"], plan()), mesh["dp"])


def same_state(mine, true):
    assert list(mine) == list(true)
    for name, value in mine.items():
        found = value.full_tensor() if isinstance(value, DTensor) else value
        torch.testing.assert_close(
            found,
            true[name],
            rtol=0,
            atol=0,
            msg=lambda m: f"{name}: {m}",  # noqa: B023
        )


def raised(call):
    try:
        call()
    except BaseException as error:  # as that of torch.distributed.checkpoint
        return f"{type(error).__name__}: {error}"
    return "nothing"


# --- what is refused


@on_ranks(2)
def test_pickles_of_shards_are_refused():
    model = on_mesh()
    for call in (
        lambda: torch.save(model.state_dict(), io.BytesIO()),
        lambda: torch.save(model, io.BytesIO()),
        lambda: pickle.dumps(model),
        lambda: pickle.dumps(model.qkv.weight),
        lambda: safetensors.torch.save(dict(model.state_dict())),
        lambda: safetensors.torch.save_model(model, "never"),
    ):
        with pytest.raises((TypeError, ValueError), match=WAYS_OUT):
            call()
    pending = DTensor.from_local(
        torch.ones(2), model.qkv.weight.device_mesh, [Partial()]
    )
    with pytest.raises(TypeError, match=r"shape \(2,\) in .*rank . has"):
        pickle.dumps(pending)


def save_pretrained(folder):
    from transformers.models.gpt2 import modeling_gpt2 as home

    sizes = {
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 4,
        "n_positions": 32,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    model = home.GPT2LMHeadModel(home.GPT2Config(vocab_size=61, **sizes))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(
        model,
        mesh,
        {"transformer.h.*.mlp.c_fc": ColwiseParallel(use_local_output=False)},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return raised(lambda: model.save_pretrained(folder))


def test_save_pretrained_is_refused(tmp_path):
    told = run_ranks(save_pretrained, 2, str(tmp_path), timeout=300)[
        0
    ]  # only the first rank writes
    assert "c_fc.weight" in told
    assert "save_hugging_face(state_dict, folder)" in told


@on_ranks(2)
def test_copies_are_no_pickles():
    model = on_mesh()
    ids = torch.tensor([[1, 2, 3]])
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(ids), model(ids))
    shallow = copy.copy(model.qkv.weight)
    assert shallow.to_local() is model.qkv.weight.to_local()
    assert isinstance(shallow, nn.Parameter)


# --- what is saved


@on_ranks(2)
def test_what_every_rank_has_is_saved_and_loaded():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    value = torch.arange(6.0)
    state = {
        "a": distribute_tensor(value, mesh, [R]),
        "b": nn.Parameter(distribute_tensor(value, mesh, [R])),
    }
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file)  # weights_only, as by default
    assert isinstance(loaded["b"], nn.Parameter)
    assert loaded["b"].requires_grad
    for name, found in loaded.items():
        assert found.layout is state[name].layout
        torch.testing.assert_close(found, value, check_device=False)
    restored = safetensors.torch.load(safetensors.torch.save(state))
    assert all(
        type(one) is torch.Tensor and torch.equal(one, value)
        for one in restored.values()
    )


def test_a_file_of_copies_is_loaded_without_a_job():
    data = run_ranks(saved_copies, 2)[0]
    (found,) = torch.load(io.BytesIO(data)).values()
    assert torch.equal(found.full_tensor(), torch.arange(6.0))


def saved_copies():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    file = io.BytesIO()
    torch.save({"a": distribute_tensor(torch.arange(6.0), mesh, [R])}, file)
    return file.getvalue()


# --- torch.distributed.checkpoint


def save_by_dcp(folder, data):
    dcp.save({"m": on_mesh(data=data).state_dict(), "step": 7}, checkpoint_id=folder)


def load_by_dcp(folder, data):
    model = on_mesh(seed=1, data=data)
    state = {"m": model.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["m"])
    same_state(model.state_dict(), model_of().state_dict())
    assert state["step"] == 7


def test_torchs_distributed_checkpoint_on_any_mesh(tmp_path):
    for writers, data in ((2, False), (4, True)):
        folder = str(tmp_path / str(writers))
        run_ranks(save_by_dcp, writers, folder, data)
        for readers, other in ((2, False), (4, True)):
            run_ranks(load_by_dcp, readers, folder, other)
        state = {"m": model_of(seed=1).state_dict(), "step": 0}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            dcp.load(state, checkpoint_id=folder)
        same_state(state["m"], model_of().state_dict())


def many_layouts(seed):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    found = {}
    for shape in ((8, 6), (5, 3), (1, 4), (0, 2)):
        torch.manual_seed(seed)
        values = torch.randn(shape)
        layouts = [
            [S0, R],
            [S0, S0],
            [S0, S1],
            [StridedShard(0, 2), S0],
            [R, R],
            [S1, S0],
        ]
        if shape[0] > 1:
            layouts.append([FusedShard(0, (2, shape[0] - 2)), S1])
        found |= {
            f"{shape} {lies}": distribute_tensor(values, mesh, lies) for lies in layouts
        }
    return found


def dcp_of_many_layouts(folder):
    dcp.save({"x": many_layouts(0)}, checkpoint_id=folder)
    state = {"x": many_layouts(1)}
    before = {name: value.full_tensor().clone() for name, value in state["x"].items()}
    # Each is loaded from what another one stored.
    names = list(state["x"])
    for name in names:
        like = [other for other in names if other.split(")")[0] == name.split(")")[0]]
        source = like[(like.index(name) + 1) % len(like)]
        wanted = {"x": {source: state["x"][name]}}
        dcp.load(wanted, checkpoint_id=folder)
    for name, value in many_layouts(0).items():
        torch.testing.assert_close(
            state["x"][name], value.full_tensor(), rtol=0, atol=0
        )
        assert value.numel() == 0 or not torch.equal(before[name], value.full_tensor())


def test_torchs_distributed_checkpoint_of_every_layout(tmp_path):
    run_ranks(dcp_of_many_layouts, 4, str(tmp_path / "a"))


@on_ranks(2)
def test_torchs_distributed_checkpoint_refuses_a_pending_sum():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    pending = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    told = raised(lambda: dcp.save({"x": pending}, checkpoint_id="never"))
    assert "reduce_partial() first" in told


# --- load_state_dict


@on_ranks(2)
def test_a_plain_state_dict_is_loaded_onto_the_mesh():
    for assign in (False, True):
        model = on_mesh()
        layouts = {name: value.layout for name, value in model.state_dict().items()}
        other = model_of(seed=1)
        state = other.state_dict()
        pointers = {name: value.data_ptr() for name, value in state.items()}
        model.load_state_dict(state, assign=assign)
        assert {
            name: value.data_ptr() for name, value in state.items()
        } == pointers  # the caller's own are left alone
        same_state(model.state_dict(), other.state_dict())
        assert {
            name: value.layout for name, value in model.state_dict().items()
        } == layouts
        assert all(
            isinstance(p, nn.Parameter) and p.requires_grad for p in model.parameters()
        )
        ids = torch.tensor([[1, 2, 3]])
        torch.testing.assert_close(model(ids), other(ids))
        model(ids).sum().backward()
        other(ids).sum().backward()
        torch.testing.assert_close(model.qkv.weight.grad, other.qkv.weight.grad)
        part = {
            name.removeprefix("norm."): v
            for name, v in model_of(2).state_dict().items()
            if name[:5] == "norm."
        }
        model.norm.load_state_dict(part, assign=assign)
        torch.testing.assert_close(model.norm.weight, part["weight"])


@on_ranks(2)
def test_a_state_dict_that_does_not_fit_is_told_in_torchs_words():
    model = on_mesh()
    state = model_of(seed=1).state_dict()
    state["qkv.weight"] = state["qkv.weight"][:6]  # this rank's shard, say
    with pytest.raises(
        RuntimeError, match=r"size mismatch for qkv.weight: .*\[6, 8\].*\[12, 8\]"
    ):
        model.load_state_dict(state)
    del state["qkv.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*qkv.weight"):
        model.load_state_dict(state)


@on_ranks(2)
def test_another_layout_is_loaded_into_ones_own():
    model, other = on_mesh(), on_mesh(seed=1)
    state = {name: value.redistribute() for name, value in other.state_dict().items()}
    for assign in (False, True):
        twin = copy.deepcopy(model)
        twin.load_state_dict(state, assign=assign)
        assert twin.qkv.weight.layout is model.qkv.weight.layout
        same_state(twin.state_dict(), model_of(seed=1).state_dict())
    assert get_platform().get_world_size() == 2
