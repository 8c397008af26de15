# SPDX-License-Identifier: Apache-2.0
"""What modules have in PyTorch alone: its convolutions and transposed linear layers, its pickles, its optimizers."""

import pickle

import pytest
import torch
from torch import nn

from hyper_parallel import get_platform


@pytest.fixture
def platform():
    return get_platform()


def test_the_dims_of_weights(platform):
    for module, dims in (
        (nn.Conv2d(2, 3, 1), ("convolution", 0, 1, -3)),
        (nn.ConvTranspose1d(2, 3, 1), ("convolution", 1, 0, -2)),
        (nn.LayerNorm(3), None),
    ):
        assert platform.projection(module) == dims
    transposed = type(
        "Conv1D", (nn.Module,), {"__module__": "transformers.pytorch_utils"}
    )
    assert platform.projection(transposed()) == ("linear", 1, 0, -1)
    assert platform.projection(type("Conv1D", (nn.Module,), {})()) is None


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.blocks = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def test_a_checkpoint_in_torchs_own_format(platform, tmp_path):
    model, path = Tied(), tmp_path / "model"
    model.blocks[0].weight.data = model.blocks[0].weight.data.t()  # not contiguous
    platform.save_checkpoint(model, path, "pt")
    platform.save_checkpoint(model, path, "pt")  # over the old one
    loaded = platform.load_checkpoint(path, "pt")
    assert set(loaded) == set(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value), name
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    with pytest.raises(
        ValueError, match="ckpt_format must be one of safetensors, pt, got 'ckpt'"
    ):
        platform.save_checkpoint({}, tmp_path / "x", "ckpt")


def test_pickles_are_not_run(platform, tmp_path):
    class Attack:
        def __reduce__(self):
            return (exec, ("raise SystemExit('ran')",))

    path = tmp_path / "attack.pt"
    torch.save({"x": Attack()}, path)
    with pytest.raises(pickle.UnpicklingError):
        platform.load_checkpoint(path, "pt")


def test_parts_of_an_optimizer(platform):
    layer = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(
        [{"params": [layer.bias], "lr": 0.5}, {"params": [layer.weight]}],
        0.1,
        momentum=0.9,
    )
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    groups, state = platform.optimizer_parts(optimizer)
    assert [(group["params"], group["lr"]) for group in groups] == [
        ([layer.bias], 0.5),
        ([layer.weight], 0.1),
    ]
    assert torch.equal(state[layer.weight]["momentum_buffer"], layer.weight.grad)
    groups[0]["lr"] = 0.25
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_compiled_modules_are_known(platform):
    by_method = nn.Linear(2, 2)
    by_method.compile(backend="eager")
    assert platform.is_compiled_module(by_method)
    assert platform.is_compiled_module(torch.compile(nn.Linear(2, 2), backend="eager"))
    assert not platform.is_compiled_module(nn.Linear(2, 2))
