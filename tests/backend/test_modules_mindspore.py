# SPDX-License-Identifier: Apache-2.0
"""What Cells have in MindSpore alone: two families of layers, and optimizers of which some do nothing on a CPU."""

import warnings

import frame
import mindspore
import numpy as np
import pytest
from mindspore import Parameter, mint, nn
from mindspore.experimental import optim

from hyper_parallel import (
    Layout,
    Replicate,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.platform.mindspore import private
from hyper_parallel.testing import on_ranks


@pytest.fixture
def platform():
    return get_platform()


def test_the_dims_of_weights(platform):
    for module, dims in (
        (nn.Dense(2, 3), ("linear", 0, 1, -1)),
        (mint.nn.Linear(2, 3), ("linear", 0, 1, -1)),
        (nn.Embedding(5, 3), ("embedding", 1, 0, -1)),
        (mint.nn.Embedding(5, 3), ("embedding", 1, 0, -1)),
        (nn.Conv1d(2, 3, 1), ("convolution", 0, 1, -2)),
        (nn.Conv2d(2, 3, 1), ("convolution", 0, 1, -3)),
        (mint.nn.Conv3d(2, 3, 1), ("convolution", 0, 1, -4)),
        (nn.Conv2dTranspose(2, 3, 1), ("convolution", 1, 0, -3)),
        (mint.nn.ConvTranspose2d(2, 3, 1), ("convolution", 1, 0, -3)),
        (nn.LayerNorm((3,)), None),
    ):
        assert platform.projection(module) == dims
        assert platform.is_linear_module(module) == (
            dims is not None and dims[0] == "linear"
        )
        assert platform.is_embedding_module(module) == (
            dims is not None and dims[0] == "embedding"
        )


def stepped(make):
    layer = nn.Dense(2, 3)
    before = layer.weight.asnumpy().copy()
    optimizer = make(layer)
    gradients = {
        id(layer.weight): np.ones((3, 2), np.float32),
        id(layer.bias): np.ones(3, np.float32),
    }
    optimizer(tuple(mindspore.Tensor(gradients[id(p)]) for p in optimizer.parameters))
    assert (layer.weight.asnumpy() != before).all()
    return layer, optimizer


OPTIMIZERS = {
    "AdamW": (
        lambda m: optim.AdamW(m.trainable_params(), 0.1),
        {"exp_avg", "exp_avg_sq", "step"},
    ),
    "amsgrad": (
        lambda m: optim.Adam(m.trainable_params(), 0.1, amsgrad=True),
        {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"},
    ),
    "SGD": (
        lambda m: optim.SGD(m.trainable_params(), 0.1, momentum=0.9),
        {"momentum_buffer", "stat"},
    ),
    "nn.SGD": (
        lambda m: nn.SGD(m.trainable_params(), 0.1, momentum=0.9),
        {"momentum_buffer", "stat", "global_step"},
    ),
    "nn.Momentum": (
        lambda m: nn.Momentum(m.trainable_params(), 0.1, 0.9),
        {"momentum_buffer", "global_step"},
    ),
    "nn.Adam": (
        lambda m: nn.Adam(m.trainable_params(), 0.1),
        {"exp_avg", "exp_avg_sq", "global_step", "beta1_power", "beta2_power"},
    ),
    "nn.AdamWeightDecay": (
        lambda m: nn.AdamWeightDecay(m.trainable_params(), 0.1),
        {"exp_avg", "exp_avg_sq", "global_step"},
    ),
}


@pytest.mark.parametrize(("make", "keys"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_state_by_parameter(platform, make, keys):
    layer, optimizer = stepped(make)
    groups, state = platform.optimizer_parts(optimizer)
    assert [[id(p) for p in group["params"]] for group in groups] == [
        [id(layer.weight), id(layer.bias)]
    ]
    assert [id(p) for p in state] == [id(layer.weight), id(layer.bias)]
    assert state[layer.weight].keys() == keys
    moment = state[layer.weight]["exp_avg" if "exp_avg" in keys else "momentum_buffer"]
    assert tuple(moment.shape) == (3, 2)
    assert (moment.asnumpy() != 0).all()
    assert groups[0]["lr"].asnumpy() == np.float32(0.1)
    with pytest.raises(KeyError):
        state[Parameter(mindspore.Tensor([1.0]))]


@pytest.mark.parametrize(("make", "keys"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_state_taken_out_and_put_into_another(platform, make, keys):
    """A run that goes on with another optimizer of the same state makes the same steps."""
    layer, optimizer = stepped(make)
    twin = nn.Dense(2, 3)
    for name, value in layer.parameters_and_names():
        platform.load_into_param(getattr(twin, name), value)
    other = make(twin)
    _, state = platform.optimizer_parts(optimizer)
    _, theirs = platform.optimizer_parts(other)
    for mine, yours in ((layer.weight, twin.weight), (layer.bias, twin.bias)):
        theirs.pop(yours, None)
        theirs[yours] = dict(state[mine])
    gradients = tuple(
        mindspore.Tensor(np.full(p.shape, 0.5, np.float32))
        for p in optimizer.parameters
    )
    for _ in range(2):
        optimizer(gradients)
        other(gradients)
    assert twin.weight.asnumpy().tolist() == layer.weight.asnumpy().tolist()
    assert twin.bias.asnumpy().tolist() == layer.bias.asnumpy().tolist()


def test_momentum_of_torch_is_not_a_first_step(platform):
    layer = nn.Dense(2, 3)
    fresh = optim.SGD(layer.trainable_params(), 0.5, momentum=0.5)
    _, state = platform.optimizer_parts(fresh)
    for parameter in layer.trainable_params():
        state[parameter] = {
            "momentum_buffer": mindspore.Tensor(np.full(parameter.shape, 4, np.float32))
        }
    before = layer.weight.asnumpy().copy()
    fresh(
        (
            mindspore.Tensor(np.zeros((3, 2), np.float32)),
            mindspore.Tensor(np.zeros(3, np.float32)),
        )
    )
    np.testing.assert_allclose(
        layer.weight.asnumpy(), before - 0.5 * 0.5 * 4, rtol=1e-6
    )
    with pytest.raises(
        ValueError, match="SGD of MindSpore keeps no 'exp_avg' of a parameter; it has"
    ):
        state[layer.weight] = {"exp_avg": mindspore.Tensor(1.0)}


def test_groups_with_rates_of_their_own(platform):
    layer = nn.Dense(2, 3)
    for make in (optim.AdamW, nn.Adam):
        options = [
            {"params": [layer.weight], "lr": 0.2},
            {"params": [layer.bias]},
        ]  # the optimizer adds to them
        groups, _ = platform.optimizer_parts(make(options, 0.1))
        assert [[id(p) for p in group["params"]] for group in groups] == [
            [id(layer.weight)],
            [id(layer.bias)],
        ]
        np.testing.assert_allclose(
            [group["lr"].asnumpy() for group in groups], [0.2, 0.1]
        )


@pytest.mark.parametrize("name", ["Adam", "SGD", "AdamW"])
def test_an_optimizer_that_would_change_nothing_is_refused(platform, name):
    optimizer = getattr(mint.optim, name)(nn.Dense(2, 3).trainable_params(), lr=0.1)
    with pytest.raises(
        RuntimeError,
        match=rf"mint\.optim\.{name} does not .* mindspore\.experimental\.optim\.{name}",
    ):
        platform.optimizer_parts(optimizer)
    with pytest.raises(
        RuntimeError,
        match=rf"mint\.optim\.{name} does not .* mindspore\.experimental\.optim\.{name}",
    ):
        optimizer(tuple(mindspore.ops.ones_like(p) for p in optimizer.parameters))
    with pytest.raises(
        TypeError,
        match=r"expected an optimizer of mindspore\.experimental\.optim or .*, got int",
    ):
        platform.optimizer_parts(3)


@pytest.mark.parametrize(
    "make", [nn.AdamWeightDecay, nn.AdaFactor, nn.Adam, nn.SGD, optim.AdamW, optim.SGD]
)
def test_steps_are_the_same_where_operators_are_recorded(platform, make):
    found = []
    for is_recorded in (False, True):
        parameter = Parameter(mindspore.Tensor(np.ones((2, 3), np.float32)), name="w")
        optimizer = (
            make([parameter]) if make is nn.AdaFactor else make([parameter], 0.1)
        )
        private.executor().set_grad_flag(is_recorded)
        for step in (1, 2):
            optimizer((mindspore.Tensor(np.full((2, 3), 0.5 * step, np.float32)),))
            assert private.executor().grad_flag() == is_recorded
        found.append(parameter.asnumpy().tolist())
    private.executor().set_grad_flag(False)
    assert found[0] == found[1]
    assert found[0] != np.ones((2, 3)).tolist()


def test_a_new_parameter_has_the_name_of_its_place(platform):
    model = nn.SequentialCell(nn.Dense(2, 3), nn.Dense(3, 2))
    found = platform.search_parameter_by_name(model, "1.weight")
    platform.update_parameter_by_name(
        model, found, Parameter(mindspore.Tensor(np.ones((2, 3), np.float32)), name="x")
    )
    assert model[1].weight.name == "1.weight"
    assert model[1].weight.asnumpy().tolist() == [[1.0] * 3] * 2
    assert [p.name for p in optim.AdamW(model.trainable_params()).parameters][
        2
    ] == "1.weight"


def test_files_are_those_of_others(platform, tmp_path):
    """MindSpore itself, safetensors for numpy, and torch if it is installed, read what is written, bit for bit."""
    values = {
        name: platform.full((2, 3), 1, dtype=frame.dtype(name))
        for name in ("bfloat16", "bool", "int64")
    }
    values["number"] = platform.full((), 0.1)
    values["nothing"] = platform.zeros((0, 3))
    platform.save_checkpoint(values, tmp_path / "x.safetensors")
    theirs = mindspore.load_checkpoint(
        str(tmp_path / "x.safetensors"), format="safetensors"
    )
    back = platform.load_checkpoint(tmp_path / "x.safetensors")
    assert back.keys() == values.keys()
    for name, value in values.items():
        assert back[name].dtype == value.dtype
        assert tuple(back[name].shape) == tuple(value.shape)
        assert (
            platform.tensor_memory(back[name]).tobytes()
            == platform.tensor_memory(value).tobytes()
        )
        if value.numel():
            assert (
                theirs[name].asnumpy().tobytes()
                == platform.tensor_memory(value).tobytes()
            )
    import torch
    from safetensors.torch import load_file

    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded["bfloat16"].dtype is torch.bfloat16
    assert loaded["bfloat16"].tolist() == [[1.0] * 3] * 2


def test_backward_hooks_have_no_order_to_change(platform):
    with pytest.raises(ValueError, match="in the order in which they were set"):
        platform.register_full_backward_hook(nn.Dense(2, 2), print, prepend=True)


@on_ranks(2)
def test_backward_hooks_of_distributed_tensors_see_the_shards():
    platform = get_platform()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    layer = nn.Dense(4, 3)
    for name in ("weight", "bias"):
        found = platform.search_parameter_by_name(layer, name)
        replicated = platform.set_layout_into_parameter(
            found[2], Layout.from_device_mesh(mesh)([Replicate()])
        )
        platform.update_parameter_by_name(layer, found, replicated)
    log = []
    platform.register_full_backward_pre_hook(
        layer, lambda _, out: log.append(("before", out[0].shape))
    )
    platform.register_full_backward_hook(
        layer, lambda _, into, out: log.append((into[0].shape, out[0].shape))
    )
    x = distribute_tensor(frame.tensor(np.ones((6, 4)), "float32"), mesh, [Shard(0)])
    frame.recording()
    x.requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = layer(x)
    assert out.layout is x.layout
    frame.run_backward([out.to_local()], [mindspore.ops.ones((3, 3))])
    private.executor().set_grad_flag(False)
    assert log == [("before", (3, 3)), ((3, 4), (3, 3))]
    frame.equal(
        x.to_local()._grad,
        np.ones((3, 3)) @ frame.array(layer.weight.full_tensor()),
        accuracy=1e-6,
    )


@pytest.mark.parametrize("device", ["npu", "cuda:0"])
def test_a_device_that_is_not_in_use_is_refused(platform, device):
    makers = [
        lambda: platform.tensor([1.0], device=device),
        *(
            lambda make=make: make((2,), device=device)
            for make in (platform.empty, platform.zeros, platform.rand)
        ),
    ]
    for make in makers:
        with pytest.raises(
            ValueError,
            match=rf"device '{device}' is not the one in use: .* tensors on CPU, meta;",
        ):
            make()
    assert platform.tensor([1.0], device="cpu:0").device == "CPU"
