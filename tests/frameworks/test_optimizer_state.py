# SPDX-License-Identifier: Apache-2.0
"""The number of steps, which torch counts for each parameter in float32 and MindSpore once in int32."""

import mindspore
import numpy as np
import pytest
import torch
from mindspore import Tensor, mint
from mindspore.experimental import optim

from hyper_parallel import get_platform


@pytest.fixture
def made():
    """A layer, and the state of its optimizer after two steps."""
    layer = mint.nn.Linear(3, 2)
    optimizer = optim.AdamW(layer.trainable_params(), lr=0.1)
    for _ in range(2):
        optimizer(
            tuple(
                Tensor(np.ones(p.shape, np.float32)) for p in layer.trainable_params()
            )
        )
    return layer, optimizer, get_platform().optimizer_parts(optimizer)[1]


def test_steps_have_the_dtype_and_the_shape_of_torchs(made):
    layer, _, state = made
    twin = torch.nn.Linear(3, 2)
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.1)
    for _ in range(2):
        for parameter in twin.parameters():
            parameter.grad = torch.ones_like(parameter)
        theirs.step()
    for mine, true in ((layer.weight, twin.weight), (layer.bias, twin.bias)):
        step, expected = state[mine]["step"], theirs.state[true]["step"]
        assert (step.dtype, tuple(step.shape)) == (
            mindspore.float32,
            tuple(expected.shape),
        )
        assert expected.dtype == torch.float32
        assert float(step) == float(expected) == 2


def test_steps_that_are_set_count_on(made):
    layer, optimizer, state = made
    for parameter in layer.trainable_params():
        state[parameter] = {**state[parameter], "step": Tensor(7.0, mindspore.float32)}
    assert optimizer.state_step.dtype == mindspore.int32
    assert int(optimizer.state_step) == 7


def test_steps_that_differ_are_refused(made):
    layer, _, state = made
    state[layer.weight] = {
        **state[layer.weight],
        "step": Tensor(7.0, mindspore.float32),
    }
    with pytest.raises(
        ValueError,
        match=r"keeps one 'step' for all parameters, got 7\.0 for .*weight and 4\.0 for .*bias",
    ):
        state[layer.bias] = {
            **state[layer.bias],
            "step": Tensor(4.0, mindspore.float32),
        }
