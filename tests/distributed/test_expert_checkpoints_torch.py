# SPDX-License-Identifier: Apache-2.0
"""Experts saved on one mesh and loaded on another, and written for Hugging Face one by one."""

import copy

import pytest
import torch
from expert_models import DIM, EXPERTS, HIDDEN, build
from safetensors.torch import load_file

from hyper_parallel import fully_shard, get_platform, init_device_mesh, load, save
from hyper_parallel.core.distributed_checkpoint.expert_names import (
    GATE_UP_DOWN,
    GROUPED,
    MIXTRAL,
)
from hyper_parallel.core.distributed_checkpoint.hugging_face import (
    HuggingFaceReader,
    save_hugging_face,
)
from hyper_parallel.core.expert_parallel import (
    ExpertParallel,
    ExpertTensorParallel,
    TensorParallel,
)
from hyper_parallel.testing import run_ranks


def on_mesh(how, model):
    """The model with its experts on all ranks in one of many ways."""
    ranks = get_platform().get_world_size()
    names = how.split("_")
    shape = (ranks,) if len(names) == 1 else (ranks // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(names))
    if how == "ep_tp":
        ExpertTensorParallel().apply(model.experts, mesh)
    elif "ep" in names:
        ExpertParallel().apply(model.experts, mesh["ep"])
    elif "tp" in names:
        TensorParallel().apply(model.experts, mesh["tp"])
    if "fsdp" in names:
        fully_shard(model.experts, mesh=mesh["fsdp"])
    return model


def check(folder, before, after):
    expected = build(2).state_dict()
    if before is not None:
        save(on_mesh(before, build(2)).state_dict(), checkpoint_id=folder)
        return
    for how in after:
        model = on_mesh(how, build(2))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load(model.state_dict(), checkpoint_id=folder)
        for name, value in model.state_dict().items():
            found = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert found.equal(expected[name]), (how, name)


ONE, TWO = ["ep", "tp", "fsdp"], ["ep", "ep_tp", "fsdp_ep", "fsdp_tp"]


@pytest.mark.parametrize(("ranks", "before"), [(2, "ep"), (4, "ep_tp"), (4, "fsdp_ep")])
def test_checkpoints_move_between_any_meshes(tmp_path, ranks, before):
    folder = str(tmp_path / "saved")
    run_ranks(check, ranks, folder, before, None)
    run_ranks(check, 2, folder, None, ONE)
    run_ranks(check, 4, folder, None, TWO)


class Stacked(torch.nn.Module):
    """Experts as transformers has them."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        shapes = {
            "gate_up_proj": (EXPERTS, 2 * HIDDEN, DIM),
            "down_proj": (EXPERTS, DIM, HIDDEN),
        }
        for name, shape in shapes.items():
            value = torch.nn.Parameter(torch.randn(shape, generator=draw))
            self.register_parameter(name, value)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise AssertionError


def names_of(kind):
    """(names, the model by its name in it)"""
    if kind == "grouped":
        return GROUPED, torch.nn.ModuleDict({"mlp": build(2)})
    block = torch.nn.ModuleDict({"experts": Stacked()})
    return {"mixtral": MIXTRAL, "qwen": GATE_UP_DOWN}[kind], torch.nn.ModuleDict(
        {"mlp": block}
    )


def check_names(folder, kind):
    names, start = names_of(kind)
    plain = names.separate(start.state_dict())
    for how in ("ep", "fsdp_ep", "ep_tp", "tp"):
        if how == "tp" and get_platform().get_world_size() > 2:
            continue
        model = copy.deepcopy(start)
        on_mesh(how, model["mlp"] if kind == "grouped" else Holder(model["mlp"]))
        target = f"{folder}/{how}"
        save_hugging_face(names.separate(model.state_dict()), target)
        written = load_file(f"{target}/model.safetensors")
        assert written.keys() == plain.keys()
        assert all(written[name].equal(value) for name, value in plain.items())
        again = copy.deepcopy(start)
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        on_mesh(how, again["mlp"] if kind == "grouped" else Holder(again["mlp"]))
        reader = HuggingFaceReader(target, rename=names.rename)
        load(again.state_dict(), storage_reader=reader)
        for name, value in again.state_dict().items():
            found = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert found.equal(start.state_dict()[name]), (how, name)


class Holder:
    """Gives ``experts`` of a dict of modules as an attribute."""

    def __init__(self, block):
        self.experts = block["experts"]


@pytest.mark.parametrize("kind", ["mixtral", "qwen", "grouped"])
def test_names_of_hugging_face_both_ways(tmp_path, kind):
    run_ranks(check_names, 4, str(tmp_path), kind)
    example = {
        "mixtral": "mlp.experts.3.w3.weight",
        "qwen": "mlp.experts.3.up_proj.weight",
        "grouped": "mlp.experts.3.w3.weight",
    }[kind]
    names, _ = names_of(kind)
    assert names.rename(example).index == 3
    assert names.rename("lm_head.weight") == "lm_head.weight"
