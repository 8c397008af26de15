# SPDX-License-Identifier: Apache-2.0
"""fully_shard on every framework: training on several ranks equals one process, and collectives are counted."""

import copy
import dataclasses

import frame
import numpy as np
import pytest

from hyper_parallel import init_device_mesh, init_empty_weights
from hyper_parallel.core.distributed_checkpoint import StateDictOptions
from hyper_parallel.core.dtensor.initialisation import init_parameters
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.fully_shard import (
    HSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    get_model_state_dict,
    register_fsdp_forward_method,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.errors import CommunicationError
from hyper_parallel.testing import on_ranks

platform = get_platform()

INPUTS, DIM, HIDDEN, OUTPUTS, ROWS = 4, 5, 7, 3, 8
MESHES = {
    2: [((2,), ("dp",))],
    4: [((4,), ("dp",)), ((2, 2), ("replicate", "shard"))],
}


class Block(platform.Module):
    """A layer of odd sizes, with a residual."""

    def __init__(self):
        super().__init__()
        self.up = frame.linear(DIM, HIDDEN)
        self.down = frame.linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        return x + self.down(frame.tanh(self.up(x)))

    construct = forward


class Net(platform.Module):
    """Two blocks between linear layers."""

    def __init__(self):
        super().__init__()
        self.embed = frame.linear(INPUTS, DIM)
        self.first, self.second = Block(), Block()
        self.head = frame.linear(DIM, OUTPUTS)

    def forward(self, x):
        return self.head(self.second(self.first(self.embed(x))))

    construct = forward


def new_net(kind=Net):
    """A net of known weights."""
    net = kind()
    fill(net)
    return net


def fill(net):
    for seed, parameter in enumerate(frame.cells(net)[0].values()):
        values = frame.draw(*parameter.shape, seed=seed).astype("float32") / 2
        with platform.no_grad():
            platform.copy_into(parameter, frame.tensor(values))


def wrap(net, mesh, **options):
    for block in (net.first, net.second):
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def mesh_of(shape=(2,), names=("dp",)):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def batch(step, rows=ROWS):
    return frame.draw(rows, INPUTS, seed=100 + step).astype("float32")


def part_of(x, mesh):
    position = mesh.rank_list.index(platform.get_rank())
    return frame.tensor(np.array_split(x, mesh.size())[position])


def loss_of(net, x):
    y = net(x)
    return (y * y).mean()


def trained(net):
    return [one for one in frame.cells(net)[0].values() if platform.requires_grad(one)]


def run_tape(net, losses):
    """One backward per loss; the gradients that they accumulate."""
    for parameter in trained(net):
        platform.forget_gradient(parameter)
    found = []
    for compute in losses:
        with platform.tape():
            loss = compute()
        platform.backward([loss])
        found.append(frame.array(platform.detach(loss)))
    return found, [frame.grad(parameter) for parameter in trained(net)]


def run_function(net, losses):
    """The gradients that a function of the loss returns."""
    (compute,) = losses
    found = []

    def noted():
        loss = compute()
        found.append(frame.array(platform.detach(loss)))
        return loss

    return found, frame.gradients_of(noted, trained(net))


def whole(mine, like):
    """The whole of a shard of a parameter, which MindSpore has as a plain tensor."""
    if not hasattr(mine, "full_tensor"):
        mine = type(like).from_local(
            mine, like.device_mesh, like.placements, shape=like.shape
        )
    return frame.array(platform.detach(mine.full_tensor()))


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def same_gradients(many, found, expected):
    for parameter, mine, true in zip(trained(many), found, expected, strict=True):
        close(whole(mine, parameter), frame.array(true))


def same_parameters(many, one):
    pairs = zip(
        frame.cells(many)[0].values(), frame.cells(one)[0].values(), strict=True
    )
    for mine, true in pairs:
        close(whole(mine, mine), frame.array(platform.detach(true)))


def same_training(one, many, mesh, run=run_tape, steps=5):
    """Trains both, and compares every loss, gradient and parameter."""
    for step in range(steps):
        x = batch(step)
        (loss,), expected = run(one, [lambda x=x: loss_of(one, frame.tensor(x))])
        own = part_of(x, mesh)
        (mine,), found = run(many, [lambda own=own: loss_of(many, own)])
        total = frame.tensor(np.array([mine], "float32"))
        platform.all_reduce(total, mesh_group(mesh))
        close(frame.array(total)[0] / mesh.size(), loss)
        same_gradients(many, found, expected)
        descend(one, expected)
        descend(many, found)
    same_parameters(many, one)


def mesh_group(mesh):
    return platform.create_group(list(mesh.rank_list))


def descend(net, gradients, rate=0.1):
    with platform.no_grad():
        for parameter, gradient in zip(trained(net), gradients, strict=True):
            local = platform.get_param_local_data(parameter)
            change = gradient._local if hasattr(gradient, "_local") else gradient
            platform.copy_into(local, local - rate * change)


@pytest.mark.parametrize("run", [run_tape, run_function])
@pytest.mark.parametrize("setting", [None, True, False])
@on_ranks(2)
def test_training_equals_one_process(setting, run):
    mesh = mesh_of()
    many = wrap(new_net(), mesh, reshard_after_forward=setting)
    assert isinstance(many, HSDPModule)
    assert isinstance(many, Net)
    same_training(new_net(), many, mesh, run)


@pytest.mark.parametrize("run", [run_tape, run_function])
@on_ranks(4)
def test_training_equals_one_process__four_ranks_and_hybrid(run):
    for shape, names in MESHES[4]:
        mesh = mesh_of(shape, names)
        same_training(new_net(), wrap(new_net(), mesh), mesh, run)


@on_ranks(4)
def test_shards_may_be_uneven_or_empty():
    many = wrap(new_net(), mesh_of((4,)))
    rows = [int(one._local.shape[0]) for one in trained(many)]
    rank = platform.get_rank()
    assert many.head.weight._local.shape[0] == (1, 1, 1, 0)[rank]
    assert many.embed.weight._local.shape[0] == (2, 2, 1, 0)[rank]
    assert 0 < sum(rows) < sum(int(one.shape[0]) for one in trained(many))


@on_ranks(2)
def test_collectives_are_counted():
    mesh = mesh_of()
    x = part_of(batch(0), mesh)
    # Forward gathers three units; backward those that were freed.
    for setting, gathers in {None: 5, True: 6, False: 3}.items():
        many = wrap(new_net(), mesh, reshard_after_forward=setting)
        for _ in range(2):
            with CommunicationLedger(mesh) as ledger:
                run_tape(many, [lambda many=many: loss_of(many, x)])
            backward = {"reduce_scatter_tensor": 3}
            if gathers > 3:
                backward["all_gather_into_tensor"] = gathers - 3
            assert ledger.counts(backward=True) == backward, ledger.table()
            forward = {"all_gather_into_tensor": 3}
            assert ledger.counts(backward=False) == forward, ledger.table()


@pytest.mark.parametrize("syncs", [True, False])
@on_ranks(2)
def test_gradients_of_several_backwards_add_up(syncs):
    mesh = mesh_of()
    many, one = wrap(new_net(), mesh), new_net()
    steps = [batch(step) for step in range(3)]
    _, expected = run_tape(
        one, [lambda x=x: loss_of(one, frame.tensor(x)) for x in steps]
    )

    def loss(step):
        many.set_requires_gradient_sync(syncs or step == 2)
        return loss_of(many, part_of(steps[step], mesh))

    for _ in range(2):  # nothing is left of the first time
        losses = [lambda step=step: loss(step) for step in range(3)]
        _, found = run_tape(many, losses)
        same_gradients(many, found, expected)


@on_ranks(4)
def test_hybrid_sums_may_wait_for_the_last_backward():
    mesh = mesh_of(*MESHES[4][1])
    many, one = wrap(new_net(), mesh), new_net()
    steps = [batch(step) for step in range(3)]
    _, expected = run_tape(
        one, [lambda x=x: loss_of(one, frame.tensor(x)) for x in steps]
    )

    def loss(step):
        many.set_requires_all_reduce(step == 2)
        return loss_of(many, part_of(steps[step], mesh))

    _, found = run_tape(many, [lambda step=step: loss(step) for step in range(3)])
    same_gradients(many, found, expected)


@pytest.mark.parametrize("run", [run_tape, run_function])
@on_ranks(2)
def test_frozen_parameters_stay(run):
    mesh = mesh_of()
    one, many = new_net(), new_net()
    for net in (one, many):
        for frozen in (net.embed.weight, net.first.down.weight, net.head.bias):
            platform.set_requires_grad(frozen, False)
        for frozen in frame.cells(net.second)[0].values():
            platform.set_requires_grad(frozen, False)
    wrap(many, mesh)
    assert not platform.requires_grad(many.embed.weight)
    same_training(one, many, mesh, run, steps=2)


class Twice(Net):
    """A block is used twice."""

    def forward(self, x):
        return self.head(self.first(self.second(self.first(self.embed(x)))))

    construct = forward


@pytest.mark.parametrize("run", [run_tape, run_function])
@on_ranks(2)
def test_a_unit_may_be_used_twice(run):
    mesh = mesh_of()
    same_training(new_net(Twice), wrap(new_net(Twice), mesh), mesh, run, steps=2)


class Tied(platform.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = frame.linear(DIM, DIM), frame.linear(DIM, DIM)
        self.embed, self.head = frame.linear(INPUTS, DIM), frame.linear(DIM, OUTPUTS)
        self.second.weight = self.first.weight

    forward = construct = Net.forward


@on_ranks(2)
def test_parameters_may_be_tied_within_a_unit():
    mesh = mesh_of()
    many = new_net(Tied)
    fully_shard([many.first, many.second], mesh=mesh)
    fully_shard(many, mesh=mesh)
    assert many.first.weight is many.second.weight
    same_training(new_net(Tied), many, mesh, steps=2)


@on_ranks(2)
def test_two_forwards_before_their_backward():
    mesh = mesh_of()
    many, one = wrap(new_net(), mesh), new_net()

    def loss(net, take):
        return loss_of(net, take(batch(0))) + loss_of(net, take(batch(1)))

    _, expected = run_tape(one, [lambda: loss(one, frame.tensor)])
    _, found = run_tape(many, [lambda: loss(many, lambda x: part_of(x, mesh))])
    same_gradients(many, found, expected)


@on_ranks(2)
def test_parameters_are_whole_between_unshard_and_reshard():
    many, one = wrap(new_net(), mesh_of()), new_net()
    many.unshard()
    seen = platform.clone(platform.detach(many.head.weight))
    close(frame.array(seen), frame.array(platform.detach(one.head.weight)))
    assert tuple(many.head.weight.shape) == (OUTPUTS, DIM)
    assert set(many.state_dict()) == set(one.state_dict())
    assert all(
        isinstance(value, platform.DTensorBase) for value in many.state_dict().values()
    )
    many.reshard()
    assert many.head.weight._local.shape[0] < OUTPUTS


@on_ranks(2)
def test_weights_that_change_are_gathered_anew():
    mesh = mesh_of()
    many, one = wrap(new_net(), mesh, reshard_after_forward=False), new_net()
    many.set_reshard_after_backward(False)
    same_training(one, many, mesh, steps=3)


@on_ranks(2)
def test_the_state_dict_has_the_keys_of_the_model():
    many, one = wrap(new_net(), mesh_of()), new_net()
    assert list(many.state_dict()) == list(one.state_dict())
    state = {
        name: frame.tensor(frame.draw(*value.shape).astype("float32"))
        for name, value in one.state_dict().items()
    }
    many.load_state_dict(state)
    for name, value in many.state_dict().items():
        close(whole(value, value), frame.array(state[name]))


@on_ranks(2)
def test_load_state_dict_takes_shards_and_refuses_other_shapes():
    many = wrap(new_net(), mesh_of())
    own = many.state_dict()
    full = {
        name: frame.tensor(frame.draw(*value.shape).astype("float32"))
        for name, value in own.items()
    }
    wrong = {**full, "head.weight": frame.tensor(np.ones((9, 9), "float32"))}
    before = whole(many.embed.weight, many.embed.weight)
    with pytest.raises(ValueError, match=r"HP433|head.weight.*\(9, 9\)"):
        many.load_state_dict(wrong)
    close(whole(many.embed.weight, many.embed.weight), before)
    many.load_state_dict(
        {name: value.layout.part_of(full[name]) for name, value in own.items()}
    )
    for name, value in many.state_dict().items():
        close(whole(value, value), frame.array(full[name]))


class Added(platform.Module):
    """The gradient of its parameter is the very tensor that the caller gives."""

    def __init__(self):
        super().__init__()
        self.inner = frame.linear(DIM, ROWS, bias=False)

    def forward(self, x):
        return x + self.inner.weight

    construct = forward


@on_ranks(2)
def test_gradients_that_wait_are_not_the_callers():
    """A pipeline gives the gradient of each micro batch in the same memory."""
    many = fully_shard(new_net(Added), mesh=mesh_of())
    x = frame.tensor(np.zeros((ROWS, DIM), "float32"))
    given = frame.tensor(np.zeros((ROWS, DIM), "float32"))
    for step, syncs in enumerate((False, False, True), start=1):
        many.set_requires_gradient_sync(syncs)
        platform.copy_into(given, frame.tensor(np.full((ROWS, DIM), step, "float32")))
        with platform.tape():
            output = many(x)
        platform.backward([output], [given])
        close(frame.array(given), np.full((ROWS, DIM), step))
    gradient = frame.grad(many.inner.weight)
    close(whole(gradient, many.inner.weight), np.full((ROWS, DIM), 6.0))


class Raises(platform.Function):
    """Does nothing in forward, and raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("on purpose")


class Failing(Net):
    """Backward raises between the blocks, if asked."""

    raises = False

    def forward(self, x):
        x = self.first(self.embed(x))
        return self.head(self.second(Raises.apply(x) if self.raises else x))

    construct = forward


@pytest.mark.parametrize("run", [run_tape, run_function])
@on_ranks(2)
def test_training_goes_on_after_a_backward_that_raised(run):
    mesh = mesh_of()
    many = wrap(new_net(Failing), mesh)
    many.raises = True
    with pytest.raises(ArithmeticError, match="on purpose"):
        run(many, [lambda: loss_of(many, part_of(batch(0), mesh))])
    many.raises = False
    many.zero_grad()
    same_training(new_net(Failing), many, mesh, run, steps=2)


@on_ranks(2)
def test_training_goes_on_after_a_forward_that_raised():
    mesh = mesh_of()
    many = wrap(new_net(), mesh)
    with pytest.raises((RuntimeError, ValueError)):
        run_tape(
            many,
            [lambda: loss_of(many, frame.tensor(np.ones((2, INPUTS + 1), "float32")))],
        )
    same_training(new_net(), many, mesh, steps=2)


@on_ranks(2)
def test_bad_calls_are_explained():
    mesh, net = mesh_of(), new_net()
    for code, call in {
        "HP427": lambda: fully_shard([], mesh=mesh),
        "HP429": lambda: fully_shard(net, mesh=mesh, reshard_after_forward=3),
        "HP426": lambda: fully_shard(net, mesh=mesh, shard_placement_fn=lambda _: 1),
    }.items():
        with pytest.raises(ValueError, match=code):
            call()
    wrap(net, mesh)
    with pytest.raises(ValueError, match="HP427"):
        fully_shard(net, mesh=mesh)
    with pytest.raises(ValueError, match="HP429"):
        net.set_reduce_op_type("max")
    with pytest.raises(ValueError, match="HP420"):
        fully_shard(new_net(), mesh=mesh_of((1, 2), ("dp", "tp")))
    tied = new_net(Tied)
    fully_shard(tied.first, mesh=mesh)
    with pytest.raises(ValueError, match="HP425"):
        fully_shard(tied.second, mesh=mesh)


class Recomputed(Net):
    """The blocks run again in backward."""

    def forward(self, x):
        x = platform.checkpoint(self.first, self.embed(x), use_reentrant=False)
        return self.head(platform.checkpoint(self.second, x, use_reentrant=False))

    construct = forward


@on_ranks(2)
def test_recompute_around_units():
    mesh = mesh_of()
    same_training(new_net(), wrap(new_net(Recomputed), mesh), mesh, steps=2)


@on_ranks(2)
def test_recompute_of_units():
    mesh = mesh_of()
    many = new_net()
    for name in ("first", "second"):
        setattr(many, name, platform.ckpt_wrapper(getattr(many, name)))
    same_training(new_net(), wrap(many, mesh), mesh, steps=2)


@on_ranks(2)
def test_recompute_inside_units():
    mesh = mesh_of()
    many = new_net()
    for block in (many.first, many.second):
        block.up = platform.ckpt_wrapper(block.up)
    same_training(new_net(), wrap(many, mesh), mesh, steps=2)


@on_ranks(4)
def test_copies_in_smaller_groups():
    mesh = mesh_of((4,))
    many = wrap(new_net(), mesh, reshard_after_forward=2)
    same_training(new_net(), many, mesh, steps=2)


@on_ranks(2)
def test_the_whole_batch_as_distributed_tensors():
    mesh = mesh_of()
    many, one = new_net(), new_net()
    for block in (many.first, many.second):
        fully_shard(block, mesh=mesh)
    fully_shard(many, mesh=mesh, batch_dim=0)
    (loss,), expected = run_tape(one, [lambda: loss_of(one, frame.tensor(batch(0)))])
    own = part_of(batch(0), mesh)
    with platform.tape():
        found = loss_of(many, own)
    platform.backward([found])
    close(frame.array(platform.detach(found.full_tensor())), loss)
    same_gradients(many, [frame.grad(one) for one in trained(many)], expected)


@on_ranks(2)
def test_dtypes_of_mixed_precision():
    mesh = mesh_of()
    policy = MixedPrecisionPolicy(
        param_dtype=frame.dtype("float16"),
        reduce_dtype=frame.dtype("float32"),
    )
    outer = dataclasses.replace(policy, output_dtype=frame.dtype("float32"))
    many, one = new_net(), new_net()
    for block in (many.first, many.second):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(many, mesh=mesh, mp_policy=outer)
    _, expected = run_tape(one, [lambda: loss_of(one, frame.tensor(batch(0)))])
    own = part_of(batch(0), mesh)
    assert many(own).dtype == frame.dtype("float32")
    _, found = run_tape(many, [lambda: loss_of(many, own)])
    for parameter, mine, true in zip(trained(many), found, expected, strict=True):
        assert parameter.dtype == mine.dtype == frame.dtype("float32")
        wanted = frame.array(true)
        far = np.abs(whole(mine, parameter) - wanted).max()
        assert far < 2e-2 * np.abs(wanted).max()


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@on_ranks(2)
def test_optimizers_train_the_shards(kind):
    mesh = mesh_of()
    nets = new_net(), wrap(new_net(), mesh)
    optimizers = [
        platform.new_optimizer(kind, [{"params": trained(net)}], lr=0.01)
        for net in nets
    ]
    for step in range(3):
        x = batch(step)
        for net, optimizer, own in zip(
            nets, optimizers, (frame.tensor(x), part_of(x, mesh)), strict=True
        ):
            _, gradients = platform.compute_gradients(
                lambda net=net, own=own: loss_of(net, own), trained(net)
            )
            platform.apply_gradients(optimizer, gradients)
    same_parameters(nets[1], nets[0])


class Skips(Net):
    """What the second block computes is used, or not."""

    uses_second = True

    def forward(self, x):
        x = self.first(self.embed(x))
        y = self.second(x)
        return self.head(y if self.uses_second else x)

    construct = forward


@on_ranks(2)
def test_ranks_that_skip_a_unit_add_zeros():
    mesh = mesh_of()
    many, one = wrap(new_net(Skips), mesh), new_net(Skips)
    many.set_reduce_scatter_unused_params(True)

    def loss(position):
        one.uses_second = position == 0
        rows = np.array_split(batch(0), 2)[position]
        return loss_of(one, frame.tensor(rows)) / 2

    _, expected = run_tape(one, [lambda: loss(0), lambda: loss(1)])
    many.uses_second = platform.get_rank() == 0
    _, found = run_tape(many, [lambda: loss_of(many, part_of(batch(0), mesh))])
    same_gradients(many, found, expected)


@on_ranks(2)
def test_evaluation_between_steps_changes_nothing():
    mesh = mesh_of()
    many, one = wrap(new_net(), mesh), new_net()
    for _ in range(2):
        with platform.no_grad():
            y = many(frame.tensor(batch(5)))
        close(frame.array(y), frame.array(platform.detach(one(frame.tensor(batch(5))))))
        same_training(one, many, mesh, steps=1)


@on_ranks(2)
def test_two_forwards_of_units_with_recompute_inside():
    mesh = mesh_of()
    many, one = new_net(), new_net()
    for block in (many.first, many.second):
        block.up = platform.ckpt_wrapper(block.up)
    wrap(many, mesh)

    def loss(net, take):
        return loss_of(net, take(batch(0))) + loss_of(net, take(batch(1)))

    _, expected = run_tape(one, [lambda: loss(one, frame.tensor)])
    _, found = run_tape(many, [lambda: loss(many, lambda x: part_of(x, mesh))])
    same_gradients(many, found, expected)


@on_ranks(2)
def test_a_graph_that_is_kept_is_used_twice():
    mesh = mesh_of()
    many, one = wrap(new_net(), mesh), new_net()
    found = []
    for net, x in ((one, frame.tensor(batch(0))), (many, part_of(batch(0), mesh))):
        with platform.tape():
            loss = loss_of(net, x)
        platform.backward([loss], keep_graph=True)
        platform.backward([loss])
        found.append([frame.grad(parameter) for parameter in trained(net)])
    same_gradients(many, found[1], found[0])


@on_ranks(2)
def test_parameters_that_no_rank_uses_get_nothing():
    mesh = mesh_of()
    many = wrap(new_net(Skips), mesh)
    many.uses_second = False
    many.second.set_reduce_scatter_unused_params(True)
    run_tape(many, [lambda: loss_of(many, part_of(batch(0), mesh))])
    for parameter in trained(many.second):
        gradient = frame.grad(parameter)
        assert gradient is None or not np.abs(whole(gradient, parameter)).any()


@on_ranks(2)
def test_prefetching_changes_nothing():
    mesh = mesh_of()
    many = wrap(new_net(), mesh)
    many.set_modules_to_forward_prefetch([many.first, many.second])
    many.first.set_modules_to_forward_prefetch([many.second])
    many.second.set_modules_to_backward_prefetch([many.first])
    same_training(new_net(), many, mesh, steps=2)


class Generates(Net):
    """With a method beside forward."""

    def generate(self, x):
        return self.forward(x) + 1


@on_ranks(2)
def test_a_method_may_gather_as_forward_does():
    many = wrap(new_net(Generates), mesh_of())
    register_fsdp_forward_method(many, "generate")
    with platform.no_grad():
        found = many.generate(frame.tensor(batch(0)))
        expected = new_net()(frame.tensor(batch(0)))
    close(frame.array(found), frame.array(expected) + 1)


@on_ranks(2)
def test_the_full_state_dict_is_that_of_the_model():
    many, one = wrap(new_net(), mesh_of()), new_net()
    options = StateDictOptions(full_state_dict=True)
    found = get_model_state_dict(many, options=options)
    expected = frame.state(one)
    assert list(found) == list(expected)
    for name, value in found.items():
        close(frame.array(platform.detach(value)), expected[name])


@on_ranks(2)
def test_a_unit_is_not_copied():
    many = wrap(new_net(), mesh_of())
    with pytest.raises(RuntimeError, match="HP423"):
        copy.deepcopy(many)


@on_ranks(2)
def test_ranks_that_wrap_in_another_order_are_told():
    mesh, many = mesh_of(), new_net()
    blocks = [many.first, many.second]
    for block in blocks if platform.get_rank() else reversed(blocks):
        fully_shard(block, mesh=mesh)
    fully_shard(many, mesh=mesh)
    with pytest.raises((RuntimeError, CommunicationError)):
        run_tape(many, [lambda: loss_of(many, part_of(batch(0), mesh))])


@on_ranks(2)
def test_clipping_gives_the_norm_of_one_process():
    mesh = mesh_of()
    norms = []
    for net, x in (
        (new_net(), frame.tensor(batch(0))),
        (wrap(new_net(), mesh), part_of(batch(0), mesh)),
    ):
        run_tape(net, [lambda net=net, x=x: loss_of(net, x)])
        norm = platform.clip_grad_norm_(trained(net), 0.5)
        norms.append(frame.array(norm))
    close(norms[1], norms[0])


@on_ranks(2)
def test_parameters_without_data_are_drawn_later():
    platform.manual_seed(3)
    one = Net()
    platform.manual_seed(3)
    with init_empty_weights():
        many = Net()
    wrap(many, mesh_of())
    with pytest.raises(RuntimeError, match="HP421"):
        many(frame.tensor(batch(0)))
    platform.manual_seed(3)
    init_parameters(many)
    same_parameters(many, one)
    with platform.no_grad():
        x = frame.tensor(batch(0))
        close(frame.array(many(x)), frame.array(one(x)))


@on_ranks(2)
def test_functions_return_the_gradients_of_all_micro_batches_at_the_last():
    mesh = mesh_of()
    many, one = wrap(new_net(), mesh), new_net()
    x = batch(0)
    _, expected = run_tape(one, [lambda: loss_of(one, frame.tensor(x))] * 2)
    for is_last in (False, True):
        many.set_requires_gradient_sync(is_last)
        found = accumulate(many, part_of(x, mesh))
        if is_last:
            same_gradients(many, found, expected)
        else:
            assert not any(one is not None and frame.array(one).any() for one in found)


def accumulate(net, x):
    """The gradients of one backward by the framework's usual way."""
    if frame.IS_TORCH:
        return run_tape(net, [lambda: loss_of(net, x)])[1]
    return run_function(net, [lambda: loss_of(net, x)])[1]
