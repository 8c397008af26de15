# SPDX-License-Identifier: Apache-2.0
"""A step of training as a whole, against the formulas of the optimizers in numpy."""

import math

import frame
import numpy as np
import pytest

from hyper_parallel.core.training import training_step
from hyper_parallel.platform import get_platform

platform = get_platform()

X, Y = (
    frame.draw(5, 3, seed=1).astype("float32"),
    frame.draw(5, 2, seed=2).astype("float32"),
)


def model():
    """A linear layer of known weights."""
    made = platform.prepare_module(frame.linear(3, 2), "float32")
    with platform.no_grad():
        platform.copy_into(
            made.weight, frame.tensor(frame.draw(2, 3, seed=3).astype("float32"))
        )
        platform.copy_into(
            made.bias, frame.tensor(frame.draw(2, seed=4).astype("float32"))
        )
    return made


def groups(module, decay):
    return [
        {"params": [module.weight], "weight_decay": decay},
        {"params": [module.bias], "weight_decay": 0.0},
    ]


def gradients(weight, bias):
    """(loss, d weight, d bias) of half the squared distance from Y."""
    rest = X.astype("float64") @ weight.T + bias - Y
    return (rest**2).sum() / 2, rest.T @ X, rest.sum(0)


def clipped(found, largest):
    norm = math.sqrt(sum((g**2).sum() for g in found))
    return norm, [g * min(1.0, largest / (norm + 1e-6)) for g in found]


class Sgd:
    """With momentum, as torch has it."""

    def __init__(self):
        self.moved = None

    def __call__(self, values, found, rate, decay):
        found = [g + d * v for g, v, d in zip(found, values, (decay, 0.0), strict=True)]
        self.moved = (
            found
            if self.moved is None
            else [0.9 * m + g for m, g in zip(self.moved, found, strict=True)]
        )
        return [v - rate * m for v, m in zip(values, self.moved, strict=True)]


class Adam:
    """``apart``: decay is apart from the gradient, as AdamW has it.

    MindSpore's Adam, but not its AdamW, adds eps before the correction of the first steps, as Adam's authors propose.
    """

    def __init__(self, apart):
        self.apart, self.step, self.first, self.second = (
            apart,
            0,
            [0.0, 0.0],
            [0.0, 0.0],
        )
        self.adds_early = not (apart or frame.IS_TORCH)

    def __call__(self, values, found, rate, decay):
        self.step += 1
        made = []
        for i, (v, g, d) in enumerate(zip(values, found, (decay, 0.0), strict=True)):
            value, slope = (v * (1 - rate * d), g) if self.apart else (v, g + d * v)
            self.first[i] = 0.8 * self.first[i] + 0.2 * slope
            self.second[i] = 0.9 * self.second[i] + 0.1 * slope**2
            mean, spread = (
                self.first[i] / (1 - 0.8**self.step),
                self.second[i] / (1 - 0.9**self.step),
            )
            eps = 1e-3 / np.sqrt(1 - 0.9**self.step) if self.adds_early else 1e-3
            made.append(value - rate * mean / (np.sqrt(spread) + eps))
        return made


BETAS = {"betas": (0.8, 0.9), "eps": 1e-3}
KINDS = {
    "sgd": (Sgd, {"momentum": 0.9}),
    "adam": (lambda: Adam(False), BETAS),
    "adamw": (lambda: Adam(True), BETAS),
}


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_the_formula(kind, max_norm):
    make, options = KINDS[kind]
    truth, module = make(), model()
    optimizer = platform.new_optimizer(kind, groups(module, 0.1), lr=1.0, **options)
    values = [
        frame.array(platform.detach(p)).astype("float64")
        for p in (module.weight, module.bias)
    ]
    x, y = frame.tensor(X), frame.tensor(Y)

    def loss_of():
        rest = module(x) - y
        return (rest * rest).sum() / 2

    for rate in (0.01, 0.03, 0.002):
        platform.set_learning_rate(optimizer, rate)
        loss, norm = training_step(module, optimizer, loss_of, max_norm)
        true_loss, *found = gradients(*values)
        true_norm, found = clipped(found, math.inf if max_norm is None else max_norm)
        values = truth(values, found, rate, 0.1)
        assert (loss, norm) == pytest.approx((true_loss, true_norm), rel=1e-5)
        frame.equal(
            platform.detach(module.weight), values[0].astype("float32"), accuracy=2e-6
        )
        frame.equal(
            platform.detach(module.bias), values[1].astype("float32"), accuracy=2e-6
        )


def values_of(module):
    """Copies of the weight and the bias."""
    return [
        frame.array(platform.detach(one)).copy() for one in (module.weight, module.bias)
    ]


def half_squares(module):
    rest = module(frame.tensor(X)) - frame.tensor(Y)
    return (rest * rest).sum() / 2


def test_gradients_are_computed_apart_from_the_update():
    """The primitives under training_step: gradients of the loss, which only the optimizer's call uses."""
    module = model()
    before = values_of(module)
    optimizer = platform.new_optimizer("sgd", groups(module, 0.0), lr=0.5)
    true_loss, *true = gradients(*before)
    # In another order than that of the optimizer's groups.
    loss, found = platform.compute_gradients(
        lambda: half_squares(module), [module.bias, module.weight]
    )
    assert loss.item() == pytest.approx(true_loss, rel=1e-5)
    for value, unchanged in zip(values_of(module), before, strict=True):
        np.testing.assert_array_equal(value, unchanged)
    platform.apply_gradients(optimizer, found)
    for value, old, gradient in zip(values_of(module), before, true, strict=True):
        np.testing.assert_allclose(value, old - 0.5 * gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("max_norm", [None, 1e-3])
def test_the_norm_is_that_before_clipping(max_norm):
    module = model()
    optimizer = platform.new_optimizer("sgd", groups(module, 0.0), lr=0.0)
    _, *true = gradients(*values_of(module))
    norm = math.sqrt(sum((gradient**2).sum() for gradient in true))
    found = training_step(module, optimizer, lambda: half_squares(module), max_norm)
    assert found[1] == pytest.approx(norm, rel=1e-5)


def test_a_module_is_in_the_dtype_that_is_asked_for():
    """MindSpore's modules say theirs themselves, and any other is refused."""
    if frame.IS_TORCH:
        assert platform.prepare_module(
            frame.linear(3, 2), "float64"
        ).weight.dtype == frame.dtype("float64")
    else:
        with pytest.raises(
            ValueError, match=r"parameter weight is not float64; .*change it there"
        ):
            platform.prepare_module(frame.linear(3, 2), "float64")


def test_the_peak_of_memory_grows_with_what_is_held():
    before = platform.peak_memory()
    assert before > 2**24  # a process that has imported a framework
    held = np.ones(before + 2**24, np.uint8)  # more than there ever was
    assert platform.peak_memory() >= before + 2**24 - 2**20
    assert held[-1] == 1
