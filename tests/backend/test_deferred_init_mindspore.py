# SPDX-License-Identifier: Apache-2.0
"""Initialisers of MindSpore: each is drawn later as it would have been, and numpy.random goes on as if it had been."""

import frame
import mindspore
import numpy as np
import pytest
from mindspore import Parameter, mint, nn
from mindspore.common import initializer as initializers
from mindspore.common.initializer import initializer

from hyper_parallel import get_platform

platform = get_platform()

INITIALISERS = {
    "Zero": initializers.Zero(),
    "One": initializers.One(),
    "Constant": initializers.Constant(3),
    "Uniform": initializers.Uniform(0.3),
    "Normal": initializers.Normal(0.3, 1.0),
    "TruncatedNormal": initializers.TruncatedNormal(0.3),
    "XavierUniform": initializers.XavierUniform(),
    "XavierNormal": initializers.XavierNormal(),
    "HeUniform": initializers.HeUniform(),
    "HeNormal": initializers.HeNormal(),
    "VarianceScaling": initializers.VarianceScaling(),
    "Orthogonal": initializers.Orthogonal(),
    "Sparse": initializers.Sparse(0.5),
    "Identity": initializers.Identity(),
}


class Between(nn.Cell):
    """A parameter of an initialiser between others, and numbers drawn directly."""

    def __init__(self, how, dtype):
        super().__init__()
        self.first = Parameter(initializer("normal", (3, 3)))
        self.it = Parameter(initializer(how, (6, 5), dtype), requires_grad=False)
        self.drawn = Parameter(mindspore.Tensor(np.random.rand(2).astype(np.float32)))
        self.last = Parameter(initializer("uniform", (3, 3)))


@pytest.mark.parametrize(
    "dtype", [mindspore.float32, mindspore.float16, mindspore.bfloat16], ids=str
)
@pytest.mark.parametrize("how", INITIALISERS.values(), ids=INITIALISERS.keys())
def test_every_initialiser(how, dtype):
    platform.manual_seed(5)
    real = Between(how, dtype)
    after = np.random.rand()
    platform.manual_seed(5)
    with platform.init_on_device(platform.meta_device):
        deferred = Between(how, dtype)
    assert np.random.rand() == after
    assert platform.is_meta(deferred.it)
    assert not platform.is_meta(deferred.drawn)
    before = np.random.get_state()
    platform.init_parameters(deferred, 0)
    assert np.array_equal(before[1], np.random.get_state()[1])
    for name, truth in real.parameters_and_names():
        found = getattr(deferred, name)
        assert (
            platform.tensor_memory(found).tobytes()
            == platform.tensor_memory(truth).tobytes()
        ), name
        assert (found.dtype, found.name, found.requires_grad) == (
            truth.dtype,
            truth.name,
            truth.requires_grad,
        )


def test_layers_of_both_families():
    def make():
        layers = [
            nn.Dense(3, 4),
            mint.nn.Linear(3, 4),
            nn.Embedding(5, 3),
            nn.LayerNorm((3,)),
            nn.Conv2d(2, 3, 2),
        ]
        return nn.SequentialCell(*layers, nn.LSTM(3, 4), nn.BatchNorm2d(3))

    platform.manual_seed(5)
    real = make()
    platform.manual_seed(5)
    with platform.init_on_device("meta"):
        deferred = make()
    platform.init_parameters(deferred, 0)
    left, right = frame.state(deferred), frame.state(real)
    assert list(left) == list(right)
    assert [name for name in left if not np.array_equal(left[name], right[name])] == []


def test_another_device_is_refused():
    with pytest.raises(ValueError, match="makes tensors on CPU or on meta, not npu"):
        platform.init_on_device("npu")
