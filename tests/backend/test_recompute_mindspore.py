# SPDX-License-Identifier: Apache-2.0
"""What recompute cannot do on MindSpore is refused, and not done wrongly."""

import frame
import mindspore
import numpy as np
import pytest
from mindspore import nn

from hyper_parallel import get_platform

platform = get_platform()


def test_reentrance_is_refused():
    with pytest.raises(ValueError, match="use_reentrant must be False"):
        platform.checkpoint(lambda x: x, frame.tensor([1.0]), use_reentrant=True)


def test_selection_by_operator_is_not_to_be_had():
    with pytest.raises(NotImplementedError, match="MindSpore has no way to see the operators"):
        platform.create_selective_checkpoint_contexts([])


def test_a_dropout_whose_mask_cannot_be_had_again_is_refused():
    model = nn.SequentialCell(nn.Dense(2, 2), nn.Dropout(p=0.5))
    wrapped = platform.ckpt_wrapper(model)
    x = frame.tensor(np.ones((1, 2)), "float32")
    model.set_train()
    with pytest.raises(RuntimeError, match="1 is a Dropout, whose mask on a CPU would be another one"):
        wrapped(x)
    with pytest.raises(RuntimeError, match="is a Dropout, whose mask"):
        platform.checkpoint(model, x)
    model.set_train(False)
    assert wrapped(x).shape == (1, 2)


def test_under_value_and_grad():
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.layer = nn.Dense(3, 3)

        def construct(self, x):
            return mindspore.ops.dropout(self.layer(x).sin(), 0.5).sin() * platform.rand((2, 3))

    net, x = Net(), frame.tensor(np.ones((2, 3)), "float32")
    found = []
    for model in (net, platform.ckpt_wrapper(net), platform.swap_wrapper(net)):
        platform.manual_seed(3)
        loss, gradients = mindspore.value_and_grad(lambda x, m=model: m(x).sum(), 0, net.trainable_params())(x)
        found.append([loss.asnumpy().tolist(), gradients[0].asnumpy().tolist(), gradients[1][0].asnumpy().tolist()])
    assert found[0] == found[1] == found[2]


def test_symmetric_memory_is_not_to_be_had():
    with pytest.raises(NotImplementedError, match="has no symmetric memory"):
        platform.get_symmetric_memory_handler()


@pytest.mark.parametrize("call", ["from_native_mesh", "to_native_mesh", "from_native_dtensor", "to_native_dtensor"])
def test_there_are_no_distributed_tensors_of_mindspore(call):
    with pytest.raises(TypeError, match=f"{call}: MindSpore has no distributed tensors"):
        getattr(platform, call)(frame.tensor([1.0]))
