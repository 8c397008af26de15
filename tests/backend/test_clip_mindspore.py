# SPDX-License-Identifier: Apache-2.0
"""Clipping of the gradients that value_and_grad returns: the norm and the gradients of one process."""

import frame
import mindspore
import numpy as np
import pytest
from mindspore import Parameter, mint, nn

from hyper_parallel import Layout, Replicate, Shard, get_platform, init_device_mesh
from hyper_parallel.testing import on_ranks

platform = get_platform()


class Model(nn.Cell):
    """Parameters that lie on the mesh in every way, one of them on one axis alone, one plain, one without use."""

    def __init__(self, wrap=lambda name, parameter: parameter):
        super().__init__()
        made = {
            "whole": (5,),
            "rows": (6, 5),
            "both": (5, 3),
            "plain": (3,),
            "unused": (2,),
        }
        for seed, (name, shape) in enumerate(made.items()):
            values = frame.tensor(frame.draw(*shape, seed=seed))
            setattr(self, name, wrap(name, Parameter(values, name=name)))

    def construct(self, x):
        hidden = mint.sin(mint.matmul(x, self.rows) + self.whole)
        return mint.matmul(hidden, self.both).exp()


X = frame.draw(4, 6, seed=9)


def gradients_of(model):
    parameters = [p for p in model.trainable_params() if p.name != "plain"]
    step = mindspore.value_and_grad(lambda x: model(x).sum(), None, weights=parameters)
    return parameters, step


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@on_ranks(4)
def test_the_norm_and_the_gradients_of_one_process(norm_type):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    places = {
        "whole": [Replicate(), Replicate()],
        "rows": [Replicate(), Shard(0)],
        "both": [Shard(0), Shard(1)],
        "unused": [Replicate(), Shard(0)],
    }

    def put(name, parameter):
        if name not in places:
            return parameter
        return platform.set_layout_into_parameter(
            parameter, Layout.from_device_mesh(mesh)(places[name])
        )

    one, many = Model(), Model(put)
    _, step = gradients_of(one)
    _, expected = step(frame.tensor(X))
    expected = [g.asnumpy() for g in expected]
    norm = np.linalg.norm(np.concatenate([g.reshape(-1) for g in expected]), norm_type)
    parameters, step = gradients_of(many)
    replicated = Layout.from_device_mesh(mesh)([Replicate(), Replicate()])
    _, gradients = step(replicated.tensor(frame.tensor(X), X.shape))
    total = platform.clip_grad_norm_(
        zip(parameters, gradients, strict=True), 0.5 * norm, norm_type
    )
    assert total.item() == pytest.approx(norm, rel=1e-10)
    for parameter, gradient, true in zip(parameters, gradients, expected, strict=True):
        whole = parameter.layout.tensor(gradient, tuple(parameter.shape)).full_tensor()
        frame.equal(whole, 0.5 * true, accuracy=1e-6)
    # A distributed gradient says itself how it lies.
    pairs = [
        (p, p.layout.tensor(g, tuple(p.shape)))
        for p, g in zip(parameters, gradients, strict=True)
    ]
    assert platform.clip_grad_norm_(pairs, norm, norm_type).item() == pytest.approx(
        0.5 * norm, rel=1e-5
    )


def test_one_gradient_of_two_parameters_is_scaled_once():
    first, second = (
        Parameter(frame.tensor([1.0, 2.0]), name="a"),
        Parameter(frame.tensor([3.0, 4.0]), name="b"),
    )
    shared = frame.tensor([3.0, 0.0])
    assert platform.clip_grad_norm_(
        [(first, shared), (second, shared)], 1.5 * 2**0.5
    ).item() == pytest.approx(3 * 2**0.5)
    frame.equal(shared, [1.5, 0.0], accuracy=1e-5)


def test_pairs_without_a_gradient_and_those_on_the_tape():
    parameter = Parameter(frame.tensor([1.0, 2.0]), name="a")
    assert platform.clip_grad_norm_([(parameter, None)], 1.0).item() == 0
    frame.set_grad(parameter, frame.tensor([3.0, 4.0]))
    assert platform.clip_grad_norm_([(parameter, None)], 1.0).item() == 5


def test_gradients_without_their_parameters_are_refused():
    gradient = frame.tensor([3.0, 4.0])
    with pytest.raises(
        ValueError,
        match=r"is no parameter and gets no gradient; .*zip\(parameters, gradients\)",
    ):
        platform.clip_grad_norm_((gradient,), 1.0)
    assert gradient.asnumpy().tolist() == [3.0, 4.0]
    parameter = Parameter(frame.tensor([1.0, 2.0, 3.0]), name="a")
    with pytest.raises(
        ValueError,
        match=r"a gradient of shape \(2,\) is not that of a parameter of which this rank",
    ):
        platform.clip_grad_norm_([(parameter, gradient)], 1.0)
    with pytest.raises(TypeError, match="found int in it"):
        platform.clip_grad_norm_([(parameter, 3)], 1.0)
