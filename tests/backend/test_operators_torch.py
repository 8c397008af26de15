# SPDX-License-Identifier: Apache-2.0
"""What the dispatch of operators asks of a framework: names, gradients, versions, memory, seeds, tensors of modules."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from torch import nn

from hyper_parallel.platform import get_platform

platform = get_platform()


@pytest.mark.parametrize(
    ("function", "name", "inplace"),
    [
        (torch.add, "add", False),
        (torch.Tensor.add, "add", False),
        (torch.Tensor.add_, "add", True),
        (torch.Tensor.__iadd__, "add", True),
        (torch.ops.aten.add.Tensor, "add", False),
        (torch.ops.aten.add_, "add", True),
        (torch.Tensor.__rsub__, "rsub", False),
        (torch.Tensor.__eq__, "eq", False),
        (torch.Tensor.__getitem__, "getitem", False),
        (torch.Tensor.__setitem__, "setitem", False),
        (torch.Tensor.T.__get__, "T", False),
        (F.softmax, "softmax", False),
        (torch.special.softmax, "softmax", False),
        (torch.concat, "cat", False),
        (torch.linalg.vector_norm, "vector_norm", False),
        (F.unfold, "im2col", False),
        (torch.Tensor.unfold, "unfold", False),
        (nn.init.normal_, "init", True),
        (torch._foreach_add_, "_foreach_add_", True),
    ],
)
def test_functions_have_one_name(function, name, inplace):
    found = platform.op_name_of(function)
    assert (found.name, found.inplace) == (name, inplace)


def test_parameters_have_one_name():
    assert platform.op_name_of(F.softmax).parameters[:2] == ("input", "dim")
    assert platform.op_name_of(torch.split).parameters == ("input", "split_size", "dim")
    assert platform.op_name_of(torch.add).parameters is None
    assert platform.canonical_kwargs({"axis": 1, "keepdims": True, "other": 2}) == {
        "dim": 1,
        "keepdim": True,
        "other": 2,
    }


def test_names_lead_back_to_functions():
    x = torch.tensor([-1.0, 2.0])
    for name, expected in (
        ("relu", x.relu()),
        ("abs", x.abs()),
        ("vector_norm", x.norm()),
        ("softmax", x.softmax(0)),
    ):
        arguments = {"dim": 0} if name == "softmax" else {}
        torch.testing.assert_close(platform.operator(name)(x, **arguments), expected)
    with pytest.raises(AttributeError, match="torch has no operator 'nonsense'"):
        platform.operator("nonsense")


def test_gradients_of_a_function():
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    dx, dy = platform.gradients(lambda a, b: (a * a * b).sum(), [x, y])
    assert torch.equal(dx, 2 * x * y)
    assert torch.equal(dy, x * x)
    assert not x.requires_grad


def test_what_is_recorded_and_what_was_changed():
    x = torch.ones(2, requires_grad=True)
    assert platform.is_recorded(x)
    assert not platform.is_recorded(x.detach())
    with torch.no_grad():
        assert not platform.is_recorded(x)
        before = platform.version_of(x)
        x.add_(1)
    assert platform.version_of(x) == before + 1
    platform.note_change(x)
    assert platform.version_of(x) == before + 2
    with torch.inference_mode():
        platform.note_change(torch.ones(2))
        assert platform.version_of(torch.ones(2)) is None


@pytest.mark.parametrize("leaf", [True, False])
def test_memory_lives_with_its_tensor_and_does_not_keep_it(leaf):
    """That of a leaf may, until backward has passed or others were remembered: all ranks must forget alike."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.detach()

        @staticmethod
        def backward(ctx, grad):
            return grad

    x = torch.ones(2, requires_grad=True)
    x = x if leaf else x * 1
    made = Twice.apply(x)
    platform.memory_of(x)["made"] = made
    assert platform.memory_of(x)["made"] is made
    gone = weakref.ref(x)
    made.sum().backward()
    del x, made
    gc.collect()
    assert gone() is None


def test_what_is_remembered_of_a_leaf_gives_way_to_others():
    leaves = [torch.ones(2, requires_grad=True) for _ in range(20)]
    for x in leaves:
        platform.memory_of(x)["made"] = x * 2
    assert [bool(platform.memory_of(x)) for x in leaves] == [False] * 12 + [True] * 8
    gone = [weakref.ref(x) for x in leaves]
    del leaves, x
    gc.collect()
    assert sum(one() is not None for one in gone) == 8


def test_seeds():
    torch.manual_seed(3)
    first, second = platform.draw_seed(), platform.draw_seed()
    assert first != second
    torch.manual_seed(3)
    assert (platform.draw_seed(), platform.draw_seed()) == (first, second)
    torch.manual_seed(5)
    expected = [torch.rand(2) for _ in range(2)]
    torch.manual_seed(5)
    assert torch.equal(torch.rand(2), expected[0])
    with platform.seeded(9):
        drawn = torch.rand(3)
    assert torch.equal(torch.rand(2), expected[1])  # as if nothing had been drawn
    with platform.seeded(9):
        assert torch.equal(torch.rand(3), drawn)
    with pytest.raises(ZeroDivisionError), platform.seeded(9):
        _ = 1 / 0


def test_a_modules_own_tensors_and_its_forward_hook():
    module = nn.BatchNorm1d(3)
    assert dict(platform.own_tensors(module)).keys() == {
        "weight", "bias", "running_mean", "running_var", "num_batches_tracked"
    }  # fmt: skip
    assert platform.own_tensors(nn.Sequential(module)) == []
    module.weight.requires_grad_(False)
    platform.set_own_tensor(module, "weight", torch.full((3,), 2.0))
    assert isinstance(module.weight, nn.Parameter)
    assert not module.weight.requires_grad
    platform.set_own_tensor(module, "running_mean", torch.full((3,), 5.0))
    assert module.running_mean.tolist() == [5.0] * 3
    assert "running_mean" in module.state_dict()
    seen = []
    linear = nn.Linear(2, 2)
    platform.register_forward_hook(
        linear, lambda m, args, out: seen.append(len(args)) or out * 0
    )
    assert linear(torch.ones(1, 2)).abs().sum() == 0
    platform.register_forward_hook(
        linear,
        lambda m, args, kwargs, out: seen.append(sorted(kwargs)),
        with_kwargs=True,
    )
    linear(input=torch.ones(1, 2))
    assert seen == [1, 0, ["input"]]
