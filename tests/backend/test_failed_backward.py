# SPDX-License-Identifier: Apache-2.0
"""After a backward that raised, the next one gives the gradients of one device: nothing is left of the failed one.

All values are small integers, so sums are exact in any order.
"""

import frame
import numpy as np
import pytest

from hyper_parallel import (
    DTensor,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.dtensor import reducer
from hyper_parallel.platform import get_platform
from hyper_parallel.testing import on_ranks

platform = get_platform()

WIDTH, ROWS = 3, 4
USES = (0, 1, 2, 0)  # the first layer is used twice
PLACES = range(len(USES) + 1)  # before, between and after the layers


class Raises(platform.Function):
    """Does nothing in forward, and raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("on purpose")


def integers(*shape, seed):
    drawn = np.random.default_rng(seed).integers(-2, 3, shape)
    return drawn.astype("float32")


def new_layers():
    """Linear layers of known weights."""
    layers = [frame.linear(WIDTH, WIDTH) for _ in range(len(set(USES)))]
    for seed, layer in enumerate(layers):
        for values, parameter in (
            (integers(WIDTH, WIDTH, seed=seed), layer.weight),
            (integers(WIDTH, seed=10 + seed), layer.bias),
        ):
            with platform.no_grad():
                platform.copy_into(parameter, frame.tensor(values))
    return frame.sequential(*layers)


def loss_of(layers, x, raises_at=None):
    """The sum of what comes out of the layers; backward raises before the layer at that place is reached."""
    for place in PLACES:
        if place == raises_at:
            local = Raises.apply(x.to_local())
            x = DTensor.from_local(local, x.device_mesh, x.placements, shape=x.shape)
        if place < len(USES):
            x = layers[USES[place]](x)
    return x.sum()


def parameters_of(layers):
    return [one for layer in layers for one in (layer.weight, layer.bias)]


def both_sides():
    """The layers on one device and on two, with the same input for both; its rows are sharded."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = frame.leaf(integers(ROWS, WIDTH, seed=20), "float32")
    many = distribute_module(new_layers(), mesh)
    return new_layers(), x, many, distribute_tensor(x, mesh, [Shard(0)])


def run_tape(layers, x, raises_at=None):
    """The gradients that backward accumulates."""
    for parameter in parameters_of(layers):
        frame.set_grad(parameter, None)
    with platform.tape():
        loss = loss_of(layers, x, raises_at)
    platform.backward([loss])
    return [frame.grad(parameter) for parameter in parameters_of(layers)]


def run_function(layers, x, raises_at=None):
    """The gradients that a function of the loss returns."""
    return frame.gradients_of(
        lambda: loss_of(layers, x, raises_at), parameters_of(layers)
    )


def check(found, expected):
    for mine, true in zip(found, expected, strict=True):
        whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
        np.testing.assert_array_equal(frame.array(whole), frame.array(true))


@on_ranks(2)
@pytest.mark.parametrize(
    ("run", "place"),
    [
        *((run_tape, place) for place in PLACES),
        # The function's gradient is not that of x, so backward does not reach the first place.
        *((run_function, place) for place in PLACES[1:]),
    ],
)
def test_nothing_of_a_failed_backward_is_in_the_next(run, place):
    one, x, many, rows = both_sides()
    expected = run(one, x)
    kept = []
    for _ in range(2):  # failing twice in a row
        with pytest.raises(ArithmeticError, match="on purpose") as raised:
            run(many, rows, place)
        kept.append(raised.value)  # and with it the frames of the failed backward
    for _ in range(2):
        check(run(many, rows), expected)
    assert not reducer._REDUCERS


@on_ranks(2)
def test_what_a_failed_backward_held_is_freed():
    _, _, many, rows = both_sides()
    with pytest.raises(ArithmeticError):
        run_tape(many, rows, 2)
    platform.forget_failed_backwards()
    assert not reducer._REDUCERS
