# SPDX-License-Identifier: Apache-2.0
"""Modules, parameters, hooks, state dicts and single-file checkpoints."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hyper_parallel import DTensor, Layout, Partial, get_platform
from hyper_parallel.testing import on_ranks


@pytest.fixture
def platform():
    return get_platform()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.blocks = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.head(self.blocks(self.embedding(x)))


def test_walking_a_module(platform):
    model = Tied()
    assert dict(platform.get_cells_and_names(model)) == dict(model.named_modules())
    assert list(platform.parameters_dict(model)) == [
        "embedding.weight",
        "blocks.0.weight",
        "blocks.0.bias",
        "blocks.1.weight",
    ]
    assert platform.get_cell_construct(model) == model.forward
    assert platform.is_linear_module(model.head)
    assert not platform.is_linear_module(model)
    assert platform.is_embedding_module(model.embedding)
    assert not platform.is_embedding_module(model.head)


def test_the_dims_of_weights(platform):
    for module, dims in (
        (nn.Linear(2, 3), ("linear", 0, 1, -1)),
        (nn.Embedding(5, 3), ("embedding", 1, 0, -1)),
        (nn.Conv2d(2, 3, 1), ("convolution", 0, 1, -3)),
        (nn.ConvTranspose1d(2, 3, 1), ("convolution", 1, 0, -2)),
        (nn.LayerNorm(3), None),
    ):
        assert platform.projection(module) == dims
    transposed = type("Conv1D", (nn.Module,), {"__module__": "transformers.pytorch_utils"})
    assert platform.projection(transposed()) == ("linear", 1, 0, -1)
    assert platform.projection(type("Conv1D", (nn.Module,), {})()) is None


@pytest.mark.parametrize("prefix", ["", "self."])
def test_finding_a_parameter(platform, prefix):
    model = Tied()
    owner, name, parameter = platform.search_parameter_by_name(model, f"{prefix}blocks.0.bias")
    assert owner is model.blocks[0]
    assert name == "bias"
    assert parameter is model.blocks[0].bias


def test_finding_a_parameter_behind_wrappers(platform):
    model = nn.Sequential(platform.swap_wrapper(platform.ckpt_wrapper(nn.Linear(2, 2))))
    owner, name, parameter = platform.search_parameter_by_name(model, "0.weight")
    assert parameter is dict(model.named_parameters())["0.weight"]
    new = nn.Parameter(torch.zeros(2, 2))
    platform.update_parameter_by_name(model, (owner, name, parameter), new)
    assert model.state_dict()["0.weight"].eq(0).all()
    assert dict(model.named_parameters())["0.weight"] is new


@pytest.mark.parametrize("name", ["", "blocks", "blocks.1.bias", "nowhere.weight", "steps", "blocks.0.weight.data"])
def test_what_is_no_parameter_is_not_found(platform, name):
    assert platform.search_parameter_by_name(Tied(), name) is None


def test_replacing_a_parameter_is_seen_everywhere(platform):
    model = Tied()
    found = platform.search_parameter_by_name(model, "head.weight")
    new = nn.Parameter(torch.full((4, 3), 2.0))
    platform.update_parameter_by_name(model, found, new)
    assert model.head.weight is new
    assert model.embedding.weight is new  # tied weights stay tied
    assert model.state_dict()["embedding.weight"].eq(2).all()
    assert any(p is new for group in torch.optim.SGD(model.parameters(), 0.1).param_groups for p in group["params"])
    found = platform.search_parameter_by_name(model, "blocks.0.bias")
    platform.update_parameter_by_name(model, found, torch.zeros(3))
    assert isinstance(model.blocks[0].bias, nn.Parameter)
    with pytest.raises(ValueError, match="Linear has no parameter 'nothing'"):
        platform.update_parameter_by_name(model, (model.head, "nothing", new), new)


@on_ranks(4)
def test_a_parameter_with_a_layout_holds_its_shard():
    platform = get_platform()
    rank = platform.get_rank()
    full = torch.arange(12.0).view(6, 2)  # rows 2, 2, 2, 0
    parameter = nn.Parameter(full.clone())
    layout = Layout((4,), ("x",))("x", "None")
    sharded = platform.set_layout_into_parameter(parameter, layout)
    assert isinstance(sharded, nn.Parameter)
    assert isinstance(sharded, DTensor)
    assert sharded.requires_grad
    assert sharded.layout is layout
    assert sharded.shape == (6, 2)
    shard = full[2 * rank : 2 * rank + 2]
    assert platform.get_param_local_shape(sharded) == sharded.local_shape == shard.shape
    assert torch.equal(platform.get_param_local_data(sharded), shard)
    assert platform.get_tensor_storage_size(sharded) == shard.numel() * 4
    assert platform.get_param_type_size(sharded) == 4
    assert f"shape={(6, 2)}" in repr(sharded)
    with pytest.raises(ValueError, match="already has the layout Layout"):
        platform.set_layout_into_parameter(sharded, layout)
    platform.load_into_param(sharded, full * 2)  # full
    assert torch.equal(sharded.to_local().detach(), shard * 2)
    platform.load_into_param(sharded, shard * 3)  # local
    assert torch.equal(sharded.to_local().detach(), shard * 3)
    platform.load_into_param(sharded, platform.set_layout_into_parameter(nn.Parameter(full * 4), layout))
    assert torch.equal(sharded.to_local().detach(), shard * 4)
    with pytest.raises(ValueError, match=r"data of shape \(5, 2\) fits neither of \[\(., 2\), \(6, 2\)\]"):
        platform.load_into_param(sharded, torch.ones(5, 2))
    frozen = platform.set_layout_into_parameter(nn.Parameter(full, requires_grad=False), layout)
    assert not frozen.requires_grad
    with pytest.raises(
        ValueError, match=r"leaves a reduction pending, but a parameter of shape \(6, 2\) has its values"
    ):
        platform.set_layout_into_parameter(parameter, Layout((4,), ("x",))([Partial()]))


@on_ranks(4)
def test_a_layout_may_come_before_the_data():
    platform = get_platform()
    rank = platform.get_rank()
    torch.manual_seed(2)
    reference = nn.Linear(3, 6)
    torch.manual_seed(2)
    with platform.init_on_device(platform.meta_device):
        layer = nn.Linear(3, 6)
    found = platform.search_parameter_by_name(layer, "weight")
    sharded = platform.set_layout_into_parameter(found[2], Layout((4,), ("x",))("x", "None"))
    platform.update_parameter_by_name(layer, found, sharded)
    platform.init_parameters(layer, 0)
    assert layer.weight.shape == (6, 3)
    shard = platform.get_param_local_data(layer.weight)
    assert torch.equal(shard, platform.chunk(reference.weight.detach(), 0, 4, rank))
    assert shard.untyped_storage().nbytes() == shard.nbytes  # the rest of the parameter is not held on to
    assert torch.equal(layer.bias, reference.bias)


def test_loading_and_replacing_data_keeps_the_parameter(platform):
    parameter = nn.Parameter(torch.zeros(2, 2))
    memory = parameter.data_ptr()
    platform.load_into_param(parameter, torch.ones(2, 2, dtype=torch.float64).numpy())
    assert parameter.tolist() == [[1, 1], [1, 1]]
    assert parameter.data_ptr() == memory
    assert parameter.dtype is torch.float32
    with pytest.raises(ValueError, match=r"data of shape \(3,\) does not fit \(2, 2\)"):
        platform.load_into_param(parameter, torch.ones(3))
    platform.update_param_data(parameter, torch.ones(5))
    assert platform.get_param_local_shape(parameter) == (5,)
    data = platform.get_param_local_data(parameter)
    assert data.data_ptr() == parameter.data_ptr()
    assert not data.requires_grad
    assert platform.get_param_type_size(parameter) == 4


def test_hooks_run_in_order_and_can_be_removed(platform):
    log = []
    layer = nn.Linear(2, 2)
    handles = [
        platform.register_forward_pre_hook(layer, lambda m, args, kw: log.append(("pre", kw)), with_kwargs=True),
        platform.register_forward_pre_hook(layer, lambda m, args: log.append("first"), prepend=True),
        platform.register_full_backward_pre_hook(layer, lambda m, g: log.append("backward pre")),
        platform.register_full_backward_hook(layer, lambda m, gi, go: log.append(tuple(gi[0].shape))),
    ]
    x = torch.ones(1, 2, requires_grad=True)
    layer(x).sum().backward()
    assert log == ["first", ("pre", {}), "backward pre", (1, 2)]
    for handle in handles:
        handle.remove()
    layer(x).sum().backward()
    assert len(log) == 4


@on_ranks(2)
def test_state_dicts_with_options():
    platform = get_platform()
    model = Tied()
    model.blocks[0].weight.requires_grad_(False)
    everything = platform.get_model_state_dict(model)
    assert list(everything) == list(model.state_dict())
    trained = platform.get_model_state_dict(model, options=SimpleNamespace(ignore_frozen_params=True))
    assert set(everything) - set(trained) == {"blocks.0.weight"}
    whole = SimpleNamespace(full_state_dict=True, cpu_offload=True)
    on_host = platform.get_model_state_dict(model, options=whole)
    assert list(on_host) == (list(everything) if platform.get_rank() == 0 else [])


@pytest.mark.parametrize("ckpt_format", ["safetensors", "pt"])
def test_a_checkpoint_holds_all_and_ties(platform, tmp_path, ckpt_format):
    model, path = Tied(), tmp_path / "model"
    model.blocks[0].weight.data = model.blocks[0].weight.data.t()  # not contiguous
    platform.save_checkpoint(model, path, ckpt_format)
    platform.save_checkpoint(model, path, ckpt_format)  # over the old one
    loaded = platform.load_checkpoint(path, ckpt_format)
    assert set(loaded) == set(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value), name
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_safetensors_file_is_readable_by_others(platform, tmp_path):
    from safetensors.numpy import load_file

    platform.save_checkpoint({"x": torch.arange(3.0), "y": torch.arange(6.0)[::2]}, tmp_path / "f")
    assert {k: v.tolist() for k, v in load_file(tmp_path / "f").items()} == {"x": [0, 1, 2], "y": [0, 2, 4]}


def test_a_failed_save_leaves_the_old_file(platform, tmp_path, monkeypatch):
    from hyper_parallel.platform.torch import modules

    path = tmp_path / "model"
    platform.save_checkpoint({"x": torch.ones(1)}, path)

    def fail(tensors, temporary, ckpt_format):
        temporary.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(modules, "_write", fail)
    with pytest.raises(OSError, match="disk full"):
        platform.save_checkpoint({"x": torch.zeros(1)}, path)
    assert platform.load_checkpoint(path)["x"].item() == 1
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_bad_checkpoints(platform, tmp_path):
    with pytest.raises(ValueError, match="ckpt_format must be one of safetensors, pt, got 'ckpt'"):
        platform.save_checkpoint({}, tmp_path / "x", "ckpt")
    with pytest.raises(ValueError, match=r"only tensors can be saved in one file; \['lr'\] are none"):
        platform.save_checkpoint({"lr": 0.1, "w": torch.ones(1)}, tmp_path / "x")
    (tmp_path / "broken").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    with pytest.raises(ValueError, match="broken is not a whole safetensors file"):
        platform.load_checkpoint(tmp_path / "broken")
    with pytest.raises(FileNotFoundError):
        platform.load_checkpoint(tmp_path / "nothing")


def test_pickles_are_not_run(platform, tmp_path):
    import pickle

    class Attack:
        def __reduce__(self):
            return (exec, ("raise SystemExit('ran')",))

    path = tmp_path / "attack.pt"
    torch.save({"x": Attack()}, path)
    with pytest.raises(pickle.UnpicklingError):
        platform.load_checkpoint(path, "pt")


def grads(dtype=torch.float64):
    params = [nn.Parameter(torch.ones(3, dtype=dtype)), nn.Parameter(torch.ones(2, 2, dtype=dtype))]
    params[0].grad = torch.tensor([3.0, -4.0, 0.0], dtype=dtype)
    params[1].grad = torch.tensor([[12.0, 0.0], [0.0, 0.0]], dtype=dtype)
    return params


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 13.0), (1.0, 19.0), (float("inf"), 12.0), (3, 1819 ** (1 / 3))])
def test_clipping_to_the_total_norm(platform, norm_type, norm, foreach):
    params = [*grads(), nn.Parameter(torch.ones(1))]  # the last has no gradient
    total = platform.clip_grad_norm_(iter(params), 6.5, norm_type, foreach=foreach)
    assert total.item() == pytest.approx(norm)
    clipped = torch.cat([p.grad.reshape(-1) for p in params[:2]])
    assert torch.linalg.vector_norm(clipped, norm_type).item() == pytest.approx(6.5, rel=1e-5)
    assert params[2].grad is None
    params = grads()
    platform.clip_grad_norm_(params, 100.0, norm_type, foreach=foreach)
    assert params[0].grad.tolist() == [3, -4, 0]  # small enough: untouched


def test_clipping_a_module_a_tensor_and_nothing(platform):
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    expected = torch.cat([p.grad.reshape(-1) for p in layer.parameters()]).norm()
    assert platform.clip_grad_norm_(layer, 1.0).item() == pytest.approx(expected.item())
    assert platform.clip_grad_norm_(grads()[0], 1.0).item() == 5
    assert platform.clip_grad_norm_([], 1.0).item() == 0
    shared = grads()[0]
    assert platform.clip_grad_norm_([shared, shared], 100.0).item() == 5  # a tied parameter counts once


def test_bad_clipping(platform):
    params = grads()
    params[0].grad[0] = float("nan")
    with pytest.raises(RuntimeError, match="non-finite"):
        platform.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="max_norm must be a number of at least 0"):
        platform.clip_grad_norm_(params, -1)
    with pytest.raises(ValueError, match="norm_type must be positive or inf"):
        platform.clip_grad_norm_(params, 1, 0)
    with pytest.raises(TypeError, match="found str in it"):
        platform.clip_grad_norm_("ab", 1)


def test_parts_of_an_optimizer(platform):
    layer = nn.Linear(2, 3)
    optimizer = torch.optim.SGD([{"params": [layer.bias], "lr": 0.5}, {"params": [layer.weight]}], 0.1, momentum=0.9)
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    groups, state = platform.optimizer_parts(optimizer)
    assert [(group["params"], group["lr"]) for group in groups] == [([layer.bias], 0.5), ([layer.weight], 0.1)]
    assert torch.equal(state[layer.weight]["momentum_buffer"], layer.weight.grad)
    groups[0]["lr"] = 0.25
    assert optimizer.param_groups[0]["lr"] == 0.25
