# SPDX-License-Identifier: Apache-2.0
"""Gradients of gradients are refused on MindSpore, by the tape and by nested ``mindspore.grad``: its own are wrong.

And gradients beside averages, maxima, minima and products that are pending.
"""

import mindspore
import numpy as np
import pytest
from frame import draw, equal, gradient_in_graph, recording, reduce, tensor
from mindspore import mint, nn, ops

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.tensor_parallel import Replicated
from hyper_parallel.testing import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
ACCURACY = 1e-6  # a number that a float64 tensor is multiplied by counts as a float32 on MindSpore
platform = get_platform()


def mesh_of_two():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("x",))


def contraction(x, w):
    return mint.matmul(x, mint.transpose(w, 0, 1)).pow(2).mean()


def function_of_a_sum(x):
    return mint.sin(mint.sum(x * x))


def redistribution(x):
    if isinstance(x, DTensor):
        for placement in (S1, R, S0):
            x = x.redistribute(x.device_mesh, [placement])
    return mint.sin(mint.sum(x * x * x))


def pending_sum(x):
    if isinstance(x, DTensor):
        x = x.redistribute(x.device_mesh, [Partial()]).redistribute(x.device_mesh, [S0])
    return mint.sin(mint.sum(x * x * x))


CALLS = {
    "contraction": (
        contraction,
        [(4, 8), (5, 8)],
        [(R, S1), (S1, S1), (S0, R), (R, S0)],
    ),
    "contraction with empty shards": (
        contraction,
        [(1, 3), (1, 3)],
        [(R, S0), (S0, R), (R, S1)],
    ),
    "function of a sum": (function_of_a_sum, [(5,)], [(S0,)]),
    "redistribution": (redistribution, [(4, 3)], [(S0,), (S1,), (R,)]),
    "pending sum": (pending_sum, [(4, 3)], [(S0,), (S1,), (R,)]),
}


def as_distributed(gradient, like):
    """A gradient, which MindSpore hands out as this rank's plain tensor, as it lies."""
    if not isinstance(like, DTensor):
        return gradient
    return DTensor.from_local(
        gradient, like.device_mesh, like.placements, shape=tuple(like.shape)
    )


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def several(value):
    return value if isinstance(value, tuple) else (value,)


def penalty_of(gradients, leaves):
    laid_out = [as_distributed(g, x) for g, x in zip(gradients, leaves, strict=True)]
    return whole(sum(mint.sum(g * g) for g in laid_out))


def by_tape(call, leaves):
    recording()
    for leaf in leaves:
        platform.set_tensor_requires_grad(leaf)
    first = [gradient_in_graph(call(*leaves), leaf) for leaf in leaves]
    penalty = penalty_of(first, leaves)
    return penalty, [gradient_in_graph(penalty, leaf) for leaf in leaves]


def by_nesting(call, leaves):
    wanted = tuple(range(len(leaves)))

    def penalty(*given):
        return penalty_of(several(mindspore.grad(call, wanted)(*given)), given)

    value, second = mindspore.value_and_grad(penalty, wanted)(*leaves)
    return value, several(second)


@on_ranks(2)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("way", [by_tape, by_nesting])
def test_gradients_of_gradients_are_refused_on_all_ranks(way, name):
    call, shapes, layouts = CALLS[name]
    mesh = mesh_of_two()
    arrays = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    wanted = tuple(range(len(arrays)))
    expected = several(
        mindspore.grad(call, wanted)(*(tensor(array) for array in arrays))
    )
    for layout in layouts:
        leaves = [
            distribute_tensor(tensor(a), mesh, [p])
            for a, p in zip(arrays, layout, strict=True)
        ]
        with pytest.raises(
            NotImplementedError,
            match="gradients of gradients of distributed tensors.*HP142",
        ):
            way(call, leaves)
        # The first gradient is right, also after that.
        leaves = [
            distribute_tensor(tensor(a), mesh, [p])
            for a, p in zip(arrays, layout, strict=True)
        ]
        found = platform.gradients(lambda *given: whole(call(*given)), leaves)
        for gradient, true, leaf in zip(found, expected, leaves, strict=True):
            equal(whole(as_distributed(gradient, leaf)), true, ACCURACY)


def test_mindspore_itself_has_wrong_second_derivatives():
    """The reason; once this fails, the refusal can go. The term that is missing is that of the other operand."""
    a, b = mindspore.Tensor([[2.0]]), mindspore.Tensor([[3.0]])

    def penalty(product):
        def squared_gradient(a, b):
            by_a, _ = mindspore.grad(lambda a, b: mint.sum(product(a, b)), (0, 1))(a, b)
            return mint.sum(by_a * by_a)  # b * b

        return float(mindspore.grad(squared_gradient, 1)(a, b))

    assert penalty(mint.mul) == 6
    assert penalty(ops.MatMul()) == 6
    assert penalty(mint.matmul) != 6


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.up = nn.Dense(6, 8)
        self.down = nn.Dense(8, 6)
        for i, (_, parameter) in enumerate(self.parameters_and_names()):
            parameter.set_data(tensor(draw(*parameter.shape, seed=i), "float32"))

    def construct(self, x):
        return x + self.down(mint.tanh(self.up(x)))


def gradient_penalty(model, x):
    """The gradients of a sum of squares of the gradients of all parameters."""
    parameters = model.trainable_params()

    def loss(x):
        return whole((model(x) ** 2).mean())

    def penalty(x):
        return penalty_of(mindspore.grad(loss, None, weights=parameters)(x), parameters)

    return mindspore.grad(penalty, None, weights=parameters)(x)


@on_ranks(2)
def test_a_gradient_penalty_under_a_plan_is_refused():
    x = tensor(draw(4, 6, seed=9), "float32")
    gradient_penalty(Net(), x)
    local = {"use_local_output": False}
    plan = {
        "up": ColwiseParallel(**local),
        "down": RowwiseParallel(**local),
        "": Replicated(),
    }
    model = parallelize_module(Net(), mesh_of_two(), plan)
    with pytest.raises(NotImplementedError, match="HP142"):
        gradient_penalty(model, x)


# --- beside pending reductions, as tests/distributed/test_pending_reductions.py has it for torch

PARTS = np.array([[1.0, -2.0], [3.0, 0.5]])
USES = {
    "add": lambda a, x: (a + x) ** 2,
    "subtract": lambda a, x: (x - a) ** 3,
    "multiply": lambda a, x: mint.sin(x * a),
    "cat": lambda a, x: mint.cat([a, x]) ** 2,
    "a view between": lambda a, x: (
        mint.reshape(mint.reshape(a, (2, 1)) + mint.reshape(x, (2, 1)), (-1,)) ** 2
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "prod"])
def test_a_copy_beside_a_pending_reduction_gets_its_whole_gradient(op):
    mesh = mesh_of_two()
    beside = np.array([0.5, 2.0])
    for name, use in USES.items():

        def plain(first, second, beside, use=use):
            return mint.sum(use(reduce(op, [first, second]), beside))

        def on_mesh(part, beside, use=use):
            pending = DTensor.from_local(part, mesh, [Partial(op)])
            return whole(mint.sum(use(pending, beside)))

        expected = mindspore.grad(plain, (0, 1, 2))(
            tensor(PARTS[0]), tensor(PARTS[1]), tensor(beside)
        )
        copy = distribute_tensor(tensor(beside), mesh, [R])
        part, whole_gradient = mindspore.grad(on_mesh, (0, 1))(
            tensor(PARTS[mesh.rank]), copy
        )
        for mine, true in ((whole_gradient, expected[2]), (part, expected[mesh.rank])):
            np.testing.assert_allclose(
                mine.asnumpy(),
                true.asnumpy(),
                rtol=ACCURACY,
                atol=ACCURACY,
                err_msg=name,
            )
        # The same where nothing but the copy has a gradient.
        pending = DTensor.from_local(tensor(PARTS[mesh.rank]), mesh, [Partial(op)])
        alone = mindspore.grad(
            lambda x, p=pending, use=use: whole(mint.sum(use(p, x)))
        )(copy)
        np.testing.assert_allclose(
            alone.asnumpy(), expected[2].asnumpy(), rtol=ACCURACY, err_msg=name
        )
