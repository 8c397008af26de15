# SPDX-License-Identifier: Apache-2.0
"""Modules, parameters, hooks, state dicts and single-file checkpoints."""

from pathlib import Path
from types import SimpleNamespace

import frame
import numpy as np
import pytest

from hyper_parallel import DTensor, Layout, Partial, get_platform
from hyper_parallel.testing import on_ranks


@pytest.fixture
def platform():
    return get_platform()


def values(tensor):
    return frame.array(get_platform().detach(tensor)).tolist()


class Tied(get_platform().Module):
    def __init__(self):
        super().__init__()
        self.embedding = frame.embedding(4, 3)
        self.blocks = frame.sequential(
            frame.linear(3, 3), frame.linear(3, 3, bias=False)
        )
        self.head = frame.linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", frame.tensor(0, "int64"))

    def forward(self, x):
        return self.head(self.blocks(self.embedding(x)))

    construct = forward


def parameter(array, **options):
    return get_platform().Parameter(frame.tensor(array, "float32"), **options)


def test_walking_a_module(platform):
    model = Tied()
    found = dict(platform.get_cells_and_names(model))
    parts = {
        "": model,
        "embedding": model.embedding,
        "blocks": model.blocks,
        "blocks.0": model.blocks[0],
    }
    parts |= {"blocks.1": model.blocks[1], "head": model.head}
    assert list(found) == list(parts)
    assert all(found[name] is part for name, part in parts.items())
    assert list(platform.parameters_dict(model)) == [
        "embedding.weight",
        "blocks.0.weight",
        "blocks.0.bias",
        "blocks.1.weight",
    ]
    assert platform.get_cell_construct(model) == (
        model.forward if frame.IS_TORCH else model.construct
    )
    assert platform.is_linear_module(model.head)
    assert not platform.is_linear_module(model)
    assert platform.is_embedding_module(model.embedding)
    assert not platform.is_embedding_module(model.head)
    assert not platform.is_compiled_module(model.head)


def test_own_tensors(platform):
    model = Tied()
    assert [name for name, _ in platform.own_tensors(model)] == ["steps"]
    layer = model.blocks[0]
    assert [name for name, _ in platform.own_tensors(layer)] == ["weight", "bias"]
    assert all(
        tensor is getattr(layer, name) for name, tensor in platform.own_tensors(layer)
    )
    platform.set_own_tensor(model, "steps", frame.tensor(3, "int64"))
    assert values(model.steps) == 3
    assert values(model.state_dict()["steps"]) == 3
    layer.bias.requires_grad = False
    platform.set_own_tensor(layer, "bias", frame.tensor(np.ones(3), "float32"))
    assert isinstance(layer.bias, platform.Parameter)
    assert not layer.bias.requires_grad
    assert values(model.state_dict()["blocks.0.bias"]) == [1, 1, 1]
    new = parameter(np.zeros(3))
    platform.set_own_tensor(layer, "bias", new)
    assert layer.bias is new


def test_a_removed_tensor_leaves_its_name(platform):
    layer = frame.linear(2, 3)
    platform.remove_own_tensor(layer, "weight")
    assert layer.weight is None
    assert list(platform.parameters_dict(layer)) == ["bias"]
    assert [name for name, _ in platform.own_tensors(layer)] == ["bias"]


def test_the_dims_of_weights(platform):
    assert platform.projection(frame.linear(2, 3)) == ("linear", 0, 1, -1)
    assert platform.projection(frame.embedding(5, 3)) == ("embedding", 1, 0, -1)
    assert platform.projection(Tied()) is None


@pytest.mark.parametrize("prefix", ["", "self."])
def test_finding_a_parameter(platform, prefix):
    model = Tied()
    owner, name, found = platform.search_parameter_by_name(
        model, f"{prefix}blocks.0.bias"
    )
    assert owner is model.blocks[0]
    assert name == "bias"
    assert found is model.blocks[0].bias


def test_finding_a_parameter_behind_wrappers(platform):
    model = frame.sequential(
        platform.swap_wrapper(platform.ckpt_wrapper(frame.linear(2, 2)))
    )
    owner, name, found = platform.search_parameter_by_name(model, "0.weight")
    assert found is platform.parameters_dict(model)["0.weight"]
    new = parameter(np.zeros((2, 2)))
    platform.update_parameter_by_name(model, (owner, name, found), new)
    assert values(model.state_dict()["0.weight"]) == [[0, 0], [0, 0]]
    assert platform.parameters_dict(model)["0.weight"] is new


@pytest.mark.parametrize(
    "name",
    ["", "blocks", "blocks.1.bias", "nowhere.weight", "steps", "blocks.0.weight.data"],
)
def test_what_is_no_parameter_is_not_found(platform, name):
    assert platform.search_parameter_by_name(Tied(), name) is None


def test_replacing_a_parameter_is_seen_everywhere(platform):
    model = Tied()
    found = platform.search_parameter_by_name(model, "head.weight")
    new = parameter(np.full((4, 3), 2.0))
    platform.update_parameter_by_name(model, found, new)
    assert model.head.weight is new
    assert model.embedding.weight is new  # tied weights stay tied
    assert values(model.state_dict()["embedding.weight"]) == [[2] * 3] * 4
    assert any(p is new for p in frame.optimized(frame.sgd(model, 0.1)))
    found = platform.search_parameter_by_name(model, "blocks.0.bias")
    platform.update_parameter_by_name(
        model, found, frame.tensor(np.zeros(3), "float32")
    )
    assert isinstance(model.blocks[0].bias, platform.Parameter)
    assert model.blocks[0].bias is not found[2]
    with pytest.raises(
        ValueError, match=f"{type(model.head).__name__} has no parameter 'nothing'"
    ):
        platform.update_parameter_by_name(model, (model.head, "nothing", new), new)


@on_ranks(4)
def test_a_parameter_with_a_layout_holds_its_shard():
    platform = get_platform()
    rank = platform.get_rank()
    full = np.arange(12.0).reshape(6, 2)  # rows 2, 2, 2, 0
    whole = parameter(full)
    layout = Layout((4,), ("x",))("x", "None")
    sharded = platform.set_layout_into_parameter(whole, layout)
    assert isinstance(sharded, platform.Parameter)
    assert isinstance(sharded, DTensor)
    assert platform.requires_grad(sharded)
    assert sharded.layout is layout
    assert sharded.shape == (6, 2)
    shard = full[2 * rank : 2 * rank + 2]
    assert (
        tuple(platform.get_param_local_shape(sharded))
        == tuple(sharded.local_shape)
        == shard.shape
    )
    assert values(platform.get_param_local_data(sharded)) == shard.tolist()
    assert platform.get_tensor_storage_size(sharded) == shard.size * 4
    assert platform.get_param_type_size(sharded) == 4
    assert f"shape={(6, 2)}" in repr(sharded)
    with pytest.raises(ValueError, match="already has the layout Layout"):
        platform.set_layout_into_parameter(sharded, layout)
    platform.load_into_param(sharded, frame.tensor(full * 2))  # full
    assert values(sharded.to_local()) == (shard * 2).tolist()
    platform.load_into_param(sharded, frame.tensor(shard * 3))  # local
    assert values(sharded.to_local()) == (shard * 3).tolist()
    platform.load_into_param(
        sharded, platform.set_layout_into_parameter(parameter(full * 4), layout)
    )
    assert values(sharded.to_local()) == (shard * 4).tolist()
    with pytest.raises(
        ValueError,
        match=r"data of shape \(5, 2\) fits neither of \[\(., 2\), \(6, 2\)\]",
    ):
        platform.load_into_param(sharded, frame.tensor(np.ones((5, 2))))
    frozen = platform.set_layout_into_parameter(
        parameter(full, requires_grad=False), layout
    )
    assert not platform.requires_grad(frozen)
    with pytest.raises(
        ValueError,
        match=r"leaves a reduction pending, but a parameter of shape \(6, 2\) has its values",
    ):
        platform.set_layout_into_parameter(whole, Layout((4,), ("x",))([Partial()]))


@on_ranks(4)
def test_a_layout_may_come_before_the_data():
    platform = get_platform()
    rank = platform.get_rank()
    platform.manual_seed(2)
    reference = frame.linear(3, 6)
    platform.manual_seed(2)
    with platform.init_on_device(platform.meta_device):
        layer = frame.linear(3, 6)
    found = platform.search_parameter_by_name(layer, "weight")
    sharded = platform.set_layout_into_parameter(
        found[2], Layout((4,), ("x",))("x", "None")
    )
    platform.update_parameter_by_name(layer, found, sharded)
    platform.init_parameters(layer, 0)
    assert layer.weight.shape == (6, 3)
    shard = platform.get_param_local_data(layer.weight)
    assert values(shard) == values(
        platform.chunk(platform.detach(reference.weight), 0, 4, rank)
    )
    assert (
        shard.untyped_storage().nbytes() == shard.nbytes
    )  # the rest of the parameter is not held on to
    assert values(layer.bias) == values(reference.bias)


def test_loading_and_replacing_data_keeps_the_parameter(platform):
    held = parameter(np.zeros((2, 2)))
    memory = held.data_ptr()
    platform.load_into_param(held, np.ones((2, 2)))
    assert values(held) == [[1, 1], [1, 1]]
    assert held.data_ptr() == memory
    assert held.dtype is frame.dtype("float32")
    with pytest.raises(ValueError, match=r"data of shape \(3,\) does not fit \(2, 2\)"):
        platform.load_into_param(held, frame.tensor(np.ones(3)))
    platform.update_param_data(held, frame.tensor(np.ones(5), "float32"))
    assert tuple(platform.get_param_local_shape(held)) == (5,)
    data = platform.get_param_local_data(held)
    assert data.data_ptr() == held.data_ptr()
    assert not platform.requires_grad(data)
    assert platform.get_param_type_size(held) == 4


def test_hooks_run_in_order_and_can_be_removed(platform):
    log = []
    layer = frame.linear(2, 2)
    handles = [
        platform.register_forward_pre_hook(
            layer, lambda m, args, kw: log.append(("pre", kw)), with_kwargs=True
        ),
        platform.register_forward_pre_hook(
            layer, lambda m, args: log.append("first"), prepend=True
        ),
        platform.register_full_backward_pre_hook(
            layer, lambda m, g: log.append("backward pre")
        ),
        platform.register_full_backward_hook(
            layer, lambda m, gi, go: log.append(tuple(gi[0].shape))
        ),
    ]
    x = frame.leaf([[1.0, 1.0]], "float32")
    frame.backward([layer(x)], [[[1.0, 1.0]]])
    assert log == ["first", ("pre", {}), "backward pre", (1, 2)]
    for handle in handles:
        handle.remove()
    frame.backward([layer(x)], [[[1.0, 1.0]]])
    assert len(log) == 4


def test_forward_hooks_replace_outputs_and_see_errors(platform):
    log = []
    layer = frame.linear(2, 2)
    x = frame.tensor([[1.0, 1.0]], "float32")
    handle = platform.register_forward_hook(layer, lambda m, args, out: out * 0)
    assert values(layer(x)) == [[0, 0]]
    handle.remove()
    assert values(layer(x)) != [[0, 0]]
    platform.register_forward_hook(
        layer, lambda m, args, kw, out: log.append((len(args), kw)), with_kwargs=True
    )
    platform.register_forward_hook(
        layer, lambda m, args, out: log.append("always"), always_call=True
    )
    layer(x)
    assert log == [(1, {}), "always"]
    with pytest.raises((ValueError, RuntimeError)):
        values(layer(frame.tensor(np.ones((1, 3)), "float32")))
    assert log[2:] == ["always"]


@on_ranks(2)
def test_state_dicts_with_options():
    platform = get_platform()
    model = Tied()
    model.blocks[0].weight.requires_grad = False
    everything = platform.get_model_state_dict(model)
    assert list(everything) == list(model.state_dict())
    trained = platform.get_model_state_dict(
        model, options=SimpleNamespace(ignore_frozen_params=True)
    )
    assert set(everything) - set(trained) == {"blocks.0.weight"}
    whole = SimpleNamespace(full_state_dict=True, cpu_offload=True)
    on_host = platform.get_model_state_dict(model, options=whole)
    assert list(on_host) == (list(everything) if platform.get_rank() == 0 else [])


def test_a_checkpoint_holds_all_and_ties(platform, tmp_path):
    model, path = Tied(), tmp_path / "model"
    turned = platform.detach(model.blocks[0].weight).T
    assert not turned.is_contiguous()
    platform.update_param_data(model.blocks[0].weight, turned)
    expected = frame.state(model)
    platform.save_checkpoint(model, path)
    platform.save_checkpoint(model, path)  # over the old one
    loaded = platform.load_checkpoint(path)
    assert set(loaded) == set(expected)
    assert {"head.weight", "embedding.weight", "steps"} <= set(loaded)
    for name, value in expected.items():
        assert values(loaded[name]) == value.tolist(), name
        assert loaded[name].dtype == model.state_dict()[name].dtype
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_safetensors_file_is_readable_by_others(platform, tmp_path):
    from safetensors.numpy import load_file

    x, y = frame.tensor(np.arange(3.0)), frame.tensor(np.arange(6.0))[::2]
    platform.save_checkpoint({"x": x, "y": y}, tmp_path / "f")
    assert {k: v.tolist() for k, v in load_file(tmp_path / "f").items()} == {
        "x": [0, 1, 2],
        "y": [0, 2, 4],
    }


def test_a_failed_save_leaves_the_old_file(platform, tmp_path, monkeypatch):
    path = tmp_path / "model"
    platform.save_checkpoint({"x": frame.tensor([1.0])}, path)

    def fail(*arguments):
        temporary = next(
            argument for argument in arguments if isinstance(argument, Path)
        )
        temporary.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(platform, "_write_checkpoint", fail)
    with pytest.raises(OSError, match="disk full"):
        platform.save_checkpoint({"x": frame.tensor([0.0])}, path)
    assert values(platform.load_checkpoint(path)["x"]) == [1]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_bad_checkpoints(platform, tmp_path):
    with pytest.raises(
        ValueError, match="ckpt_format must be one of safetensors.*, got 'ckpt'"
    ):
        platform.save_checkpoint({}, tmp_path / "x", "ckpt")
    with pytest.raises(
        ValueError, match=r"only tensors can be saved in one file; \['lr'\] are none"
    ):
        platform.save_checkpoint({"lr": 0.1, "w": frame.tensor([1.0])}, tmp_path / "x")
    (tmp_path / "broken").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    with pytest.raises(ValueError, match="broken is not a whole safetensors file"):
        platform.load_checkpoint(tmp_path / "broken")
    with pytest.raises(FileNotFoundError):
        platform.load_checkpoint(tmp_path / "nothing")


def with_grads():
    params = [
        get_platform().Parameter(frame.tensor(np.ones(shape))) for shape in (3, (2, 2))
    ]
    frame.set_grad(params[0], frame.tensor([3.0, -4.0, 0.0]))
    frame.set_grad(params[1], frame.tensor([[12.0, 0.0], [0.0, 0.0]]))
    return params


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize(
    ("norm_type", "norm"),
    [(2.0, 13.0), (1.0, 19.0), (float("inf"), 12.0), (3, 1819 ** (1 / 3))],
)
def test_clipping_to_the_total_norm(platform, norm_type, norm, foreach):
    params = [*with_grads(), parameter([1.0])]  # the last has no gradient
    total = platform.clip_grad_norm_(iter(params), 6.5, norm_type, foreach=foreach)
    assert total.item() == pytest.approx(norm)
    clipped = np.concatenate(
        [frame.array(frame.grad(p)).reshape(-1) for p in params[:2]]
    )
    assert np.linalg.norm(clipped, norm_type) == pytest.approx(6.5, rel=1e-5)
    assert frame.grad(params[2]) is None
    params = with_grads()
    platform.clip_grad_norm_(params, 100.0, norm_type, foreach=foreach)
    assert values(frame.grad(params[0])) == [3, -4, 0]  # small enough: untouched


def test_clipping_a_module_a_tensor_and_nothing(platform):
    frame.recording()
    layer = frame.linear(2, 2)
    frame.backward([layer(frame.tensor([[1.0, 1.0]], "float32"))], [[[1.0, 1.0]]])
    gradients = [
        frame.array(frame.grad(p)).reshape(-1)
        for p in platform.parameters_dict(layer).values()
    ]
    expected = np.linalg.norm(np.concatenate(gradients))
    assert platform.clip_grad_norm_(layer, 1.0).item() == pytest.approx(expected)
    assert platform.clip_grad_norm_(with_grads()[0], 1.0).item() == 5
    assert platform.clip_grad_norm_([], 1.0).item() == 0
    shared = with_grads()[0]
    assert (
        platform.clip_grad_norm_([shared, shared], 100.0).item() == 5
    )  # a tied parameter counts once


def test_bad_clipping(platform):
    params = with_grads()
    frame.set_grad(params[0], frame.tensor([float("nan"), 0.0, 0.0]))
    with pytest.raises(RuntimeError, match="non-finite"):
        platform.clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="max_norm must be a number of at least 0"):
        platform.clip_grad_norm_(params, -1)
    with pytest.raises(ValueError, match="norm_type must be positive or inf"):
        platform.clip_grad_norm_(params, 1, 0)
    with pytest.raises(TypeError, match="found str in it"):
        platform.clip_grad_norm_("ab", 1)


def test_a_linear_layer_of_the_framework(platform):
    layer = platform.new_linear(3, 2, True)
    assert platform.is_linear_module(layer)
    assert (tuple(layer.weight.shape), tuple(layer.bias.shape)) == ((2, 3), (2,))
    names = list(platform.parameters_dict(platform.new_linear(3, 2, False)))
    assert names == ["weight"]


def test_a_module_with_other_tensors(platform):
    """It shares all else with the first one, which keeps its own."""
    layer = platform.new_linear(3, 2, True)
    before = values(layer.weight)
    other = frame.tensor(np.ones((1, 3)), "float32")
    bias = frame.tensor(np.full(1, 2.0), "float32")
    twin = platform.with_tensors(layer, type(layer), {"weight": other, "bias": bias})
    assert type(twin) is type(layer)
    assert twin.weight is other
    output = platform.get_cell_construct(twin)(frame.tensor(np.ones((2, 3)), "float32"))
    assert values(output) == [[5.0], [5.0]]
    assert values(layer.weight) == before
    assert dict(platform.parameters_dict(layer)).keys() == {"weight", "bias"}
