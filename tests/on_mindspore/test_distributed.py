# SPDX-License-Identifier: Apache-2.0
"""Distributed tensors of MindSpore on real ranks: gradients, changes in place, parameters, what does not mix.

Operators run in the background here, as they do for users; the ranks of other tests run them at once.
"""

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.experimental import optim

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.core.shard.arguments import OperatorError
from hyper_parallel.testing import close_ranks, on_ranks


@pytest.fixture(scope="module", autouse=True)
def _ranks_of_their_own():
    """The first operator of a process decides for good how all of them run."""
    close_ranks()
    yield
    close_ranks()


@on_ranks(2)
def test_operators_run_in_the_background():
    outside = Tensor(np.array([[5, 0]]))
    found = ops.gather_elements(Tensor(draw(2, 2)), 0, outside)
    with pytest.raises(RuntimeError, match="GatherD"):
        found.asnumpy()


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@on_ranks(2)
def test_gradients_through_value_and_grad_are_the_shards_of_those_of_one_process():
    x, w = draw(4, 6), draw(3, 6, seed=1)
    mesh, rank = init_device_mesh("cpu", (2,)), get_platform().get_rank()

    def loss(x, w):
        return (mint.nn.functional.linear(x, w) ** 2).sum()

    def on_mesh(x, w):
        return loss(x, w).full_tensor()

    expected, gradients = mindspore.value_and_grad(loss, (0, 1))(Tensor(x), Tensor(w))
    for placements in (
        ([Shard(1)], [Shard(1)]),
        ([Shard(0)], [Replicate()]),
        ([Replicate()], [Shard(0)]),
    ):
        operands = [
            distribute_tensor(Tensor(a), mesh, p)
            for a, p in zip((x, w), placements, strict=True)
        ]
        found, shards = mindspore.value_and_grad(on_mesh, (0, 1))(*operands)
        np.testing.assert_allclose(found.asnumpy(), expected.asnumpy(), rtol=1e-5)
        for shard, gradient, (placement,) in zip(
            shards, gradients, placements, strict=True
        ):
            whole = gradient.asnumpy()
            part = (
                whole
                if placement.is_replicate()
                else np.array_split(whole, 2, placement.dim)[rank]
            )
            np.testing.assert_allclose(shard.asnumpy(), part, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_changes_in_place_do_change_the_tensor():
    mesh = init_device_mesh("cpu", (2,))
    start = np.arange(12, dtype=np.float32).reshape(4, 3)
    other = distribute_tensor(Tensor(start + 1), mesh, [Shard(0)])
    for change, expected in [
        (lambda x: x.add_(other), start + start + 1),
        (lambda x: x.mul_(2.0), start * 2),
        (lambda x: x.sub_(other), -np.ones((4, 3))),
        (lambda x: x.div_(2.0), start / 2),
        (lambda x: x.copy_(other), start + 1),
        (lambda x: ops.assign(x, other), start + 1),
        (lambda x: ops.assign_add(x, other), start + start + 1),
    ]:
        x = distribute_tensor(Tensor(start), mesh, [Shard(0)])
        change(x)
        np.testing.assert_array_equal(x.full_tensor().asnumpy(), expected)
    x = distribute_tensor(Tensor(start), mesh, [Shard(0)])
    x += other
    x[1] = 7.0
    expected = start + start + 1
    expected[1] = 7
    np.testing.assert_array_equal(x.full_tensor().asnumpy(), expected)


@on_ranks(2)
def test_changes_in_place_for_which_a_cpu_has_no_kernel():
    """And those by a number, whose operators have names of their own."""
    mesh, start = (
        init_device_mesh("cpu", (2,)),
        np.arange(12, dtype=np.float32).reshape(4, 3),
    )

    def on_mesh(array):
        return distribute_tensor(Tensor(array), mesh, [Replicate()])

    row, places, one = (
        on_mesh(np.array([1])),
        on_mesh(np.array([[1, 2, 0]])),
        on_mesh(np.ones((1, 3), np.float32)),
    )
    with_row, with_places, with_sums = start.copy(), start.copy(), start.copy()
    with_row[1] = 1
    with_places[[1, 2, 0], [0, 1, 2]] = 1
    with_sums[[1, 2, 0], [0, 1, 2]] += 1
    for change, expected in [
        (lambda x: x.__iadd__(1), start + 1),
        (lambda x: x.__isub__(1), start - 1),
        (lambda x: x.__imul__(3), start * 3),
        (lambda x: x.__itruediv__(2), start / 2),
        (lambda x: x.__ifloordiv__(2), start // 2),
        (lambda x: x.floor_divide_(x + 1), start * 0),
        (lambda x: x.zero_(), start * 0),
        (lambda x: x.fill_(2.5), start * 0 + 2.5),
        (lambda x: x.clamp_(2, 5), start.clip(2, 5)),
        (lambda x: x.masked_fill_(x > 3, 0.0), np.where(start > 3, 0, start)),
        (lambda x: x.index_fill_(0, row, 1.0), with_row),
        (lambda x: x.index_copy_(0, row, one), with_row),
        (lambda x: x.scatter_(0, places, 1.0), with_places),
        (lambda x: x.scatter_(0, places, one), with_places),
        (lambda x: x.scatter_add_(0, places, one), with_sums),
    ]:
        x = distribute_tensor(Tensor(start), mesh, [Shard(0)])
        assert change(x) is x
        np.testing.assert_array_equal(x.full_tensor().asnumpy(), expected)


@on_ranks(2)
def test_numbers_drawn_in_place_lie_where_they_should():
    mesh = init_device_mesh("cpu", (2,))
    for change, low, high, mean in [
        (lambda x: x.uniform_(1.0, 3.0), 1, 3, 2),
        (lambda x: x.normal_(5.0, 0.5), 2, 8, 5),
        (lambda x: x.bernoulli_(0.25), 0, 1, 0.25),
        (lambda x: x.random_(3, 8), 3, 7, 5),
        (lambda x: x.exponential_(2.0), 0, 20, 0.5),
    ]:
        x = distribute_tensor(mint.zeros((64, 64)), mesh, [Shard(0)])
        assert change(x) is x
        drawn = x.full_tensor().asnumpy()
        assert low <= drawn.min() < drawn.max() <= high
        assert not np.array_equal(
            drawn[:32], drawn[32:]
        )  # the ranks' halves are no copies
        np.testing.assert_allclose(drawn.mean(), mean, rtol=0.1)


@on_ranks(2)
def test_running_sums_get_their_dtype_as_of_plain_tensors():
    x = np.full((3, 2), 1.6, np.float32)
    on_mesh = distribute_tensor(Tensor(x), init_device_mesh("cpu", (2,)), [Shard(1)])
    found, expected = (
        one.cumsum(axis=0, dtype=mindspore.int32) for one in (on_mesh, Tensor(x))
    )
    np.testing.assert_array_equal(found.full_tensor().asnumpy(), expected.asnumpy())
    np.testing.assert_array_equal(expected.asnumpy()[:, 0], [1, 3, 4])


@on_ranks(2)
def test_another_device_is_asked_for_and_not_passed_over():
    x = distribute_tensor(Tensor(draw(4, 3)), init_device_mesh("cpu", (2,)), [Shard(0)])
    for device in ("CPU", "cpu", "CPU:0"):
        np.testing.assert_array_equal(
            x.to(device, mindspore.float64).full_tensor().asnumpy(), draw(4, 3)
        )
    for way in (
        lambda: x.to("Ascend"),
        lambda: x.to(device="Ascend"),
        lambda: x.to("Ascend", mindspore.float16),
    ):
        with pytest.raises(RuntimeError, match="target device"):
            way()


@on_ranks(2)
def test_what_is_not_changed_in_place_says_so():
    x = distribute_tensor(Tensor(draw(4, 3)), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(
        NotImplementedError, match="InplaceFillDiagonal: .*assign a result to it"
    ):
        x.fill_diagonal_(1.0)


@on_ranks(4)
@pytest.mark.parametrize("cut", ["constants", "history", "integers"])
def test_backward_communicates_on_all_ranks_or_on_none(cut):
    """The last rank has nothing: what is cut from the graph elsewhere is cut there too."""
    mesh, data = init_device_mesh("cpu", (4,)), draw(5, 3, 3)
    lines = distribute_tensor(Tensor(data), mesh, [Shard(2)])

    def function(x):
        first = x[..., 0]  # which one rank has
        if cut == "constants":
            return (x.sum() + mint.ones_like(first).sum()).full_tensor()
        if cut == "history":
            return (x.sum() + ops.stop_gradient(first).sum()).full_tensor()
        return (
            get_platform().operator("nanmean")(x, 2).sum().full_tensor()
        )  # divides by how many there are

    _, gradient = mindspore.value_and_grad(function)(lines)
    gradient.asnumpy()
    lines.full_tensor()  # after backward all are at the same place
    expected = 1 / 3 if cut == "integers" else 1.0
    np.testing.assert_allclose(
        gradient.asnumpy(), np.full(gradient.shape, expected), rtol=1e-5
    )


@on_ranks(2)
def test_plain_and_distributed_tensors_do_not_mix_unless_the_plain_one_is_a_number():
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(Tensor(draw(4, 3)), mesh, [Shard(0)])
    for mixed in (
        lambda: x + Tensor(draw(4, 3)),
        lambda: Tensor(draw(4, 3)) + x,
        lambda: mint.matmul(x, Tensor(draw(3, 2))),
    ):
        with pytest.raises(
            OperatorError, match="is a plain tensor among distributed ones"
        ):
            mixed()
    number = Tensor(2.0, mindspore.float32)
    for sum_ in (x + number, number + x):
        assert isinstance(sum_, DTensor)
        np.testing.assert_array_equal(sum_.full_tensor().asnumpy(), draw(4, 3) + 2)


@on_ranks(4)
def test_sums_and_products_of_empty_shards():
    mesh = init_device_mesh("cpu", (4,))
    x, w = draw(3, 5), draw(2, 3, seed=1)  # the last rank has nothing of three rows
    cut = distribute_tensor(Tensor(x), mesh, [Shard(0)])
    np.testing.assert_allclose(cut.sum().full_tensor().asnumpy(), x.sum(), rtol=1e-5)
    np.testing.assert_allclose(
        mint.sum(cut, dim=0).full_tensor().asnumpy(), x.sum(0), rtol=1e-5
    )
    product = mint.matmul(distribute_tensor(Tensor(w), mesh, [Shard(1)]), cut)
    np.testing.assert_allclose(product.full_tensor().asnumpy(), w @ x, rtol=1e-5)


class MLP(nn.Cell):
    def __init__(self):
        super().__init__()
        self.up, self.down = mint.nn.Linear(6, 8), mint.nn.Linear(8, 6)
        for number, parameter in enumerate(self.get_parameters()):
            parameter.set_data(Tensor(draw(*parameter.shape, seed=number) * 0.3))

    def construct(self, x):
        return self.down(mint.nn.functional.silu(self.up(x)))


def trained(model, optimizer, x, steps=4):
    def loss(x):
        y = model(x)
        found = ((y - 1) ** 2).mean()
        return found.full_tensor() if isinstance(found, DTensor) else found

    step = mindspore.value_and_grad(loss, None, weights=model.trainable_params())
    losses = []
    for _ in range(steps):
        value, gradients = step(x)
        optimizer(gradients)
        losses.append(float(value))
    return losses


OPTIMIZERS = {
    "AdamW": lambda parameters: optim.AdamW(parameters, lr=0.05),
    "Adam": lambda parameters: optim.Adam(parameters, lr=0.05),
    "SGD": lambda parameters: optim.SGD(parameters, lr=0.05, momentum=0.9),
    "nn.SGD": lambda parameters: nn.SGD(parameters, learning_rate=0.05, momentum=0.9),
    "nn.Momentum": lambda parameters: nn.Momentum(
        parameters, learning_rate=0.05, momentum=0.9
    ),
    "nn.Adam": lambda parameters: nn.Adam(parameters, learning_rate=0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2, timeout=120)
def test_training_on_a_mesh_is_training_on_one_process(name):
    x = draw(5, 6, seed=9)
    plain = MLP()
    expected = trained(plain, OPTIMIZERS[name](plain.trainable_params()), Tensor(x))
    assert expected[-1] < expected[0]
    model, mesh = MLP(), init_device_mesh("cpu", (2,))
    plan = {
        "up": ColwiseParallel(use_local_output=False),
        "down": RowwiseParallel(use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    assert isinstance(model.up.weight, DTensor)
    assert isinstance(model.up.weight, Parameter)
    assert model.up.weight.local_shape == (4, 6)
    names = [name for name, _ in model.parameters_and_names()]
    assert names == ["up.weight", "up.bias", "down.weight", "down.bias"]
    losses = trained(
        model,
        OPTIMIZERS[name](model.trainable_params()),
        distribute_tensor(Tensor(x), mesh, [Replicate()]),
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    whole = dict(plain.parameters_and_names())
    for name, parameter in model.parameters_and_names():
        np.testing.assert_allclose(
            parameter.full_tensor().asnumpy(),
            whole[name].asnumpy(),
            rtol=1e-3,
            atol=1e-4,
        )


@on_ranks(2)
def test_the_padding_of_an_embedding_gets_no_gradient():
    table, ids, mesh = (
        draw(6, 4),
        np.array([[0, 2, 5], [2, 2, 1]], np.int32),
        init_device_mesh("cpu", (2,)),
    )
    embed = get_platform().operator("embedding")
    weights = Tensor(draw(2, 3, 4, seed=1))
    expected = np.zeros((6, 4), np.float32)
    np.add.at(expected, ids, weights.asnumpy())
    expected[2] = 0
    places = distribute_tensor(Tensor(ids), mesh, [Replicate()])
    for placement in (Shard(0), Shard(1), Replicate()):
        cut = distribute_tensor(Tensor(table), mesh, [placement])

        def loss(table):
            return (embed(places, table, 2).full_tensor() * weights).sum()

        found = mindspore.grad(loss)(cut)
        whole = DTensor.from_local(found, mesh, [placement]).full_tensor()
        np.testing.assert_allclose(whole.asnumpy(), expected, rtol=1e-6)


@on_ranks(2)
def test_changes_in_place_are_part_of_the_graph():
    mesh, start = init_device_mesh("cpu", (2,)), np.array([1.0, 2.0, 3.0], np.float32)

    def tripled(x):
        changed = x * 1
        changed.mul_(3.0)
        return (changed * changed).sum()

    def doubled(x):
        changed = x * 1
        changed += x
        return (changed * changed).sum()

    for function, expected in ((tripled, 18 * start), (doubled, 8 * start)):
        x = distribute_tensor(Tensor(start), mesh, [Shard(0)])
        found = mindspore.grad(lambda x, function=function: function(x).full_tensor())(
            x
        )
        np.testing.assert_allclose(
            found.asnumpy(), x.layout.part_of(Tensor(expected)).asnumpy(), rtol=1e-6
        )
