# SPDX-License-Identifier: Apache-2.0
"""What recompute cannot do on MindSpore is refused, and not done wrongly."""

import frame
import mindspore
import numpy as np
import pytest
from mindspore import nn, ops

from hyper_parallel import get_platform
from hyper_parallel.platform.mindspore.cpu import randomness

platform = get_platform()


def test_reentrance_is_refused():
    with pytest.raises(ValueError, match="use_reentrant must be False"):
        platform.checkpoint(lambda x: x, frame.tensor([1.0]), use_reentrant=True)


class Dropping(nn.Cell):
    """Every kind of dropout, some of which keep numbers of their own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Dense(4, 4)
        self.kinds = nn.CellList(
            [nn.Dropout(p=0.5), nn.Dropout(keep_prob=0.7), nn.Dropout1d(0.4)]
        )
        self.planes, self.volumes = nn.Dropout2d(0.4), nn.Dropout3d(0.4)
        self.primitive = ops.Dropout(0.6)
        self.masks = []

    def construct(self, x):
        hidden = self.layer(x).exp()
        for kind in self.kinds:
            hidden = kind(hidden).sin()
        hidden = self.planes(hidden.reshape(4, 8, 2, 2)).sin() * 3
        hidden = self.volumes(hidden.reshape(4, 8, 2, 2, 1)).sin()
        hidden, mask = self.primitive(
            ops.dropout2d(hidden.reshape(4, 8, 4, 1), 0.3).sin()
        )
        self.masks.append(mask.asnumpy())
        return hidden.sin()


@pytest.mark.parametrize(
    "call",
    [
        platform.ckpt_wrapper,
        lambda model: lambda x: platform.checkpoint(model.construct, x),
    ],
)
def test_dropouts_drop_the_same_the_second_time(call):
    model, x = Dropping(), frame.draw(4, 8, 4).astype(np.float32)
    model.set_train()
    run = call(model)

    def loss(values):
        platform.manual_seed(3)
        leaf = frame.leaf(values, "float64")
        out = run(leaf.astype(mindspore.float32))
        return leaf, out

    leaf, out = loss(x)
    shares = [np.mean(mask) for mask in model.masks]
    frame.backward([out], [np.ones(out.shape)])
    assert len(model.masks) == 2
    assert np.array_equal(*model.masks)
    assert 0.4 < shares[0] < 0.8
    # Another run with the same seed drops the same, so that the gradient can be taken by differences.
    direction = frame.draw(4, 8, 4, seed=1)
    values = [
        float(
            loss(x + side * 2e-3 * direction)[1]
            .astype(mindspore.float64)
            .sum()
            .asnumpy()
        )
        for side in (1, -1)
    ]
    slope = (values[0] - values[1]) / 4e-3
    assert (
        abs(slope - np.sum(frame.array(leaf._grad) * direction))
        < 2e-2 * abs(slope) + 2e-2
    )


def test_dropouts_of_channels_and_of_elements():
    x = frame.tensor(np.ones((50, 20, 3, 2)), "float32")
    with randomness.replayable():
        platform.manual_seed(3)
        planes, mask = (found.asnumpy() for found in ops.Dropout2D(0.75)(x))
        assert np.array_equal(mask, planes != 0)
        assert np.array_equal(
            planes, np.broadcast_to(planes[:, :, :1, :1], planes.shape)
        )
        assert set(np.unique(planes)) == {0.0, np.float32(1 / 0.75)}
        assert abs(np.mean(mask) - 0.75) < 0.06
        assert not ops.Dropout2D(0.0)(x)[0].asnumpy().any()
        first, second = (nn.Dropout(p=0.5).set_train()(x).asnumpy() for _ in range(2))
        assert abs(np.mean(first != 0) - 0.5) < 0.05
        assert not np.array_equal(first, second)


def test_under_value_and_grad():
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.layer = nn.Dense(3, 3)

        def construct(self, x):
            return mindspore.ops.dropout(
                self.layer(x).sin(), 0.5
            ).sin() * platform.rand((2, 3))

    net, x = Net(), frame.tensor(np.ones((2, 3)), "float32")
    found = []
    for model in (net, platform.ckpt_wrapper(net), platform.swap_wrapper(net)):
        platform.manual_seed(3)
        loss, gradients = mindspore.value_and_grad(
            lambda x, m=model: m(x).sum(), 0, net.trainable_params()
        )(x)
        found.append(
            [
                loss.asnumpy().tolist(),
                gradients[0].asnumpy().tolist(),
                gradients[1][0].asnumpy().tolist(),
            ]
        )
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    "call",
    ["from_native_mesh", "to_native_mesh", "from_native_dtensor", "to_native_dtensor"],
)
def test_there_are_no_distributed_tensors_of_mindspore(call):
    with pytest.raises(
        TypeError, match=f"{call}: MindSpore has no distributed tensors"
    ):
        getattr(platform, call)(frame.tensor([1.0]))
