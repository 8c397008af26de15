# SPDX-License-Identifier: Apache-2.0
"""Which framework get_platform() takes, in a process of its own where imports matter."""

import builtins
import subprocess
import sys

import pytest

from hyper_parallel import PlatformType
from hyper_parallel.platform import platform as contract


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(contract, "platform", None)
    monkeypatch.delenv(contract.HYPER_PARALLEL_PLATFORM, raising=False)
    return monkeypatch


def hide(monkeypatch, *hidden):
    """Makes modules impossible to import."""
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)


@pytest.mark.parametrize("value", ["torch", "TORCH", "Torch"])
def test_the_environment_decides_in_any_case(fresh, value):
    fresh.setenv(contract.HYPER_PARALLEL_PLATFORM, value)
    chosen = contract.get_platform()
    assert chosen.platform_type is PlatformType.PYTORCH
    assert contract.get_platform() is chosen is contract.platform


def test_another_value_lists_the_two(fresh):
    fresh.setenv(contract.HYPER_PARALLEL_PLATFORM, "jax")
    with pytest.raises(ValueError, match="must be 'torch' or 'mindspore', got 'jax'"):
        contract.get_platform()
    assert contract.platform is None


def test_the_one_imported_framework_is_taken(fresh):
    fresh.setitem(sys.modules, "mindspore", None)
    del sys.modules["mindspore"]
    assert "torch" in sys.modules
    assert contract._choose() is contract.get_torch_platform
    fresh.setitem(sys.modules, "mindspore", object())
    assert contract._choose() is contract._first_that_imports  # both: not exactly one
    fresh.delitem(sys.modules, "torch")
    assert contract._choose() is contract.get_mindspore_platform


def test_mindspore_first_then_torch_then_words(fresh):
    made = []
    fresh.setattr(
        contract,
        "get_mindspore_platform",
        lambda: made.append("mindspore") or "a mindspore platform",
    )
    assert contract._first_that_imports() == "a mindspore platform"
    fresh.undo()
    hide(fresh, "hyper_parallel.platform.mindspore")
    assert contract._first_that_imports().platform_type is PlatformType.PYTORCH
    hide(fresh, "hyper_parallel.platform.mindspore", "hyper_parallel.platform.torch")
    with pytest.raises(
        ImportError,
        match=r"pip install 'hyper_parallel\[torch\]' or 'hyper_parallel\[mindspore\]'",
    ):
        contract._first_that_imports()
    with pytest.raises(ImportError, match="PyTorch is not installed"):
        contract.get_torch_platform()


def test_nothing_is_imported_before_it_is_asked_for():
    code = (
        "import sys, hyper_parallel; assert 'torch' not in sys.modules; "
        "p = hyper_parallel.get_platform(); assert 'torch' in sys.modules; print(p.platform_type.value)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert run.stdout.strip() == "torch"


def test_attributes_of_a_platform():
    import torch

    platform = contract.get_platform()
    assert platform.Tensor is torch.Tensor
    assert platform.tensor([1, 2]).tolist() == [1, 2]
    assert isinstance(platform.Parameter(platform.zeros((2,))), torch.nn.Parameter)
    assert issubclass(platform.Module, torch.nn.Module)
    assert issubclass(platform.PipelineStageBase, torch.nn.Module)
    assert issubclass(platform.Function, torch.autograd.Function)
    assert issubclass(platform.DTensorBase, torch.Tensor)
    assert platform.tensor_dtype.float32 is torch.float32
