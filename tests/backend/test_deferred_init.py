# SPDX-License-Identifier: Apache-2.0
"""Parameters that get their data later get exactly the numbers that one device draws."""

import frame
import numpy as np
import pytest

from hyper_parallel import (
    Layout,
    Replicate,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.testing import on_ranks

platform = get_platform()
meta = platform.meta_device


class Model(platform.Module):
    def __init__(self):
        super().__init__()
        self.embedding = frame.embedding(7, 4)
        self.blocks = frame.sequential(
            frame.linear(4, 6), frame.linear(6, 4, bias=False)
        )
        self.head = frame.linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.given = platform.Parameter(
            frame.tensor(np.arange(3.0), "float32"), requires_grad=False
        )
        self.register_buffer("scale", frame.tensor(0.5, "float32"))


def build(make, seed=7):
    """(on one device, on meta), each from the same seed."""
    platform.manual_seed(seed)
    real = make()
    platform.manual_seed(seed)
    with platform.init_on_device(meta):
        deferred = make()
    return real, deferred


def assert_same(left, right):
    left, right = frame.state(left), frame.state(right)
    assert list(left) == list(right)
    assert [name for name in left if not np.array_equal(left[name], right[name])] == []
    assert [array.dtype for array in left.values()] == [
        array.dtype for array in right.values()
    ]


def test_the_numbers_of_one_device():
    real, deferred = build(Model)
    drawn = {
        name: p
        for name, p in platform.parameters_dict(deferred).items()
        if name != "given"
    }
    assert all(platform.is_meta(p) for p in drawn.values())
    assert all(
        isinstance(p, platform.Parameter) and p.requires_grad for p in drawn.values()
    )
    assert not platform.is_meta(deferred.scale)
    assert tuple(deferred.embedding.weight.shape) == (7, 4)
    platform.init_parameters(deferred, 0)
    assert_same(deferred, real)
    assert not deferred.given.requires_grad
    assert deferred.head.weight is deferred.embedding.weight  # ties hold
    assert not any(
        platform.is_meta(p) for p in platform.parameters_dict(deferred).values()
    )


def test_buffers_if_asked():
    class Outer(platform.Module):
        def __init__(self):
            super().__init__()
            self.model = Model()
            self.register_buffer("steps", frame.tensor(np.arange(3)))
            self.register_buffer("nothing", None)

    platform.manual_seed(7)
    real = Outer()
    platform.manual_seed(7)
    with platform.init_on_device(meta, include_buffers=True):
        deferred = Outer()
    assert platform.is_meta(deferred.steps)
    assert platform.is_meta(deferred.model.scale)
    assert deferred.nothing is None
    assert tuple(deferred.steps.shape) == (3,)
    platform.init_parameters(deferred, 0)
    assert_same(deferred, real)
    assert not platform.is_meta(Outer().steps)


def test_every_stage_gets_the_numbers_of_one_device():
    real, deferred = build(Model)
    platform.rand((5,))
    for part in ("blocks", "embedding"):
        platform.init_parameters(getattr(deferred, part), stage_index=1)
        assert_same(getattr(deferred, part), getattr(real, part))
        assert platform.is_meta(deferred.embedding.weight) == (part == "blocks")


def test_it_computes_and_learns():
    real, deferred = build(
        lambda: frame.sequential(frame.linear(4, 6), frame.linear(6, 4))
    )
    platform.init_parameters(deferred, 0)
    found = []
    for model in (real, deferred):
        frame.recording()
        out = model(frame.tensor(np.ones((2, 4)), "float32"))
        frame.backward([out], [np.ones((2, 4))])
        found.append(
            [
                frame.array(frame.grad(p)).tolist()
                for p in platform.parameters_dict(model).values()
            ]
        )
    assert found[0] == found[1]


def test_a_second_init_changes_nothing():
    _, deferred = build(Model)
    platform.init_parameters(deferred, 0)
    platform.load_into_param(deferred.blocks[0].weight, np.ones((6, 4)))
    platform.init_parameters(deferred, 0)
    assert frame.state(deferred)["blocks.0.weight"].tolist() == [[1] * 4] * 6


def test_undone_on_error_and_on_other_devices():
    with pytest.raises(KeyError), platform.init_on_device(meta):
        raise KeyError
    assert not platform.is_meta(frame.linear(2, 2).weight)
    with platform.init_on_device(platform.device()):
        assert not platform.is_meta(frame.linear(2, 2).weight)
    with pytest.raises((ValueError, RuntimeError), match="nowhere"):
        platform.init_on_device("nowhere")


def test_data_cannot_be_loaded_before():
    _, deferred = build(Model)
    with pytest.raises(
        ValueError,
        match="is on the meta device and cannot hold data; call init_parameters",
    ):
        platform.load_into_param(deferred.blocks[0].weight, np.ones((6, 4)))
    assert platform.tensor_memory(deferred.blocks[0].weight) is None


def test_nobody_knows_how():
    class Bare(platform.Module):
        def __init__(self):
            super().__init__()
            self.w = platform.Parameter(platform.empty((2,), device="meta"))

    with pytest.raises(
        ValueError, match=r"init_parameters: nobody knows how to initialise w"
    ):
        platform.init_parameters(Bare(), 0)


@pytest.mark.parametrize("stage_index", [-1, None, 1.0, True])
def test_a_bad_stage(stage_index):
    with pytest.raises(ValueError, match="stage_index must be an int of at least 0"):
        platform.init_parameters(frame.linear(2, 2), stage_index)


@pytest.mark.parametrize("module", [None, 3, "linear"])
def test_a_bad_module(module):
    with pytest.raises(ValueError, match="init_parameters: expected a"):
        platform.init_parameters(module, 0)


@on_ranks(2)
def test_shards_of_one_device_whatever_comes_first():
    real, deferred = build(Model)
    rank = platform.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    layer = deferred.blocks[0]
    found = platform.search_parameter_by_name(layer, "weight")
    sharded = platform.set_layout_into_parameter(
        found[2], Layout.from_device_mesh(mesh)([Shard(1)])
    )
    platform.update_parameter_by_name(layer, found, sharded)
    platform.set_own_tensor(
        layer, "bias", distribute_tensor(layer.bias, mesh, [Shard(0)])
    )
    last = deferred.blocks[1]
    platform.set_own_tensor(
        last, "weight", distribute_tensor(last.weight, mesh, [Replicate()])
    )
    platform.init_parameters(deferred, 0)
    truth = frame.state(real)
    local = {
        name: frame.array(platform.get_param_local_data(p))
        for name, p in platform.parameters_dict(deferred).items()
    }
    assert np.array_equal(
        local["blocks.0.weight"], truth["blocks.0.weight"][:, 2 * rank : 2 * rank + 2]
    )
    assert np.array_equal(
        local["blocks.0.bias"], truth["blocks.0.bias"][3 * rank : 3 * rank + 3]
    )
    assert np.array_equal(local["blocks.1.weight"], truth["blocks.1.weight"])
    assert np.array_equal(local["embedding.weight"], truth["embedding.weight"])
    assert tuple(layer.weight.shape) == (6, 4)
    assert isinstance(layer.bias, platform.Parameter)
