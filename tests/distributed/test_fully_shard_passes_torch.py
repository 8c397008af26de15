# SPDX-License-Identifier: Apache-2.0
"""fully_shard in unusual passes: accumulation, several forwards and backwards, frozen and unused parameters, errors."""

import copy
import gc

import pytest
import torch
from sharded_models import Block, Net, batches, both, check_gradients, part_of, wrap
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import CommunicationLedger, init_device_mesh
from hyper_parallel.core.fully_shard import (
    fully_shard,
    register_fsdp_forward_method,
)
from hyper_parallel.core.fully_shard.running import runner_of, runners_below
from hyper_parallel.core.fully_shard.unit import State
from hyper_parallel.testing import on_ranks


def new_mesh(shape=(2,)):
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def loss_of(net, x):
    return net(x).square().mean()


def states(net):
    return [runner.unit.state for runner in runners_below(net)]


def check_sharded(net):
    assert set(states(net)) == {State.SHARDED}


# --- accumulation


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
@on_ranks(4)
def test_accumulate_without_sync_equals_one_backward__ten_steps(shape):
    ranks = torch.distributed.get_rank()
    if len(shape) == 1 and ranks > 1:
        return
    mesh = new_mesh(shape)
    one, many = both(mesh)
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (one, many)]
    data = batches(30)
    for step in range(10):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(3):
            x = data[3 * step + micro]
            loss_of(one, x).backward()
            many.set_requires_gradient_sync(micro == 2)
            with CommunicationLedger(mesh) as ledger:
                loss_of(many, part_of(x, mesh)).backward()
            reductions = ledger.counts().get("reduce_scatter_tensor", 0)
            assert reductions == (4 if micro == 2 else 0)
            if micro < 2:
                assert all(p.grad is None for p in many.parameters())
        check_gradients(one, many)
        for optimizer in optimizers:
            optimizer.step()


@on_ranks(4)
def test_hsdp_accumulate_then_all_reduce_once():
    mesh = new_mesh((2, 2))
    one, many = both(mesh)
    data = batches(6)
    # Every order of (sync, all-reduce) that ends with both; the last micro batch completes the sum.
    flags = [(True, False), (False, True), (False, False), (True, False), (True, True)]
    for x, (syncs, sums) in zip(data, flags, strict=False):
        loss_of(one, x).backward()
        many.set_requires_gradient_sync(syncs)
        many.set_requires_all_reduce(sums)
        with CommunicationLedger(mesh) as ledger:
            loss_of(many, part_of(x, mesh)).backward()
        counts = ledger.counts()
        assert counts.get("reduce_scatter_tensor", 0) == (4 if syncs else 0)
        assert counts.get("all_reduce", 0) == (4 if syncs and sums else 0)
    check_gradients(one, many)


@on_ranks(2)
def test_a_unit_that_the_last_micro_batch_does_not_use_is_reduced():
    mesh = new_mesh()
    one, many = both(mesh)
    first, second = batches(2)
    loss_of(one, first).backward()
    many.set_requires_gradient_sync(False)
    loss_of(many, part_of(first, mesh)).backward()
    many.set_requires_gradient_sync(True)
    one.skipped = many.skipped = 1  # a block
    loss_of(one, second).backward()
    loss_of(many, part_of(second, mesh)).backward()
    check_gradients(one, many)


@on_ranks(2)
def test_divide_factor_and_reduce_op():
    mesh = new_mesh()
    x = batches(1)[0]
    for call, scale in (
        (lambda net: net.set_gradient_divide_factor(3.0), 2 / 3),
        (lambda net: net.set_reduce_op_type("sum"), 2.0),
        (lambda net: net.set_reduce_op_type("avg"), 1.0),
    ):
        one, many = both(mesh)
        call(many)
        (loss_of(one, x) * scale).backward()
        loss_of(many, part_of(x, mesh)).backward()
        check_gradients(one, many)
    for bad in (0, -1.0):
        with pytest.raises(ValueError, match="positive"):
            many.set_gradient_divide_factor(bad)
    with pytest.raises(ValueError, match="'avg' or 'sum'"):
        many.set_reduce_op_type("max")


# --- several passes


@pytest.mark.parametrize("setting", [None, True, False])
@on_ranks(2)
def test_two_forwards_then_two_backwards(setting):
    mesh = new_mesh()
    one, many = both(mesh, reshard_after_forward=setting)
    first, second = batches(2)
    for order in ((0, 1), (1, 0)):
        losses = [loss_of(one, first), loss_of(one, second)]
        mine = [loss_of(many, part_of(x, mesh)) for x in (first, second)]
        for index in order:
            losses[index].backward()
            mine[index].backward()
        check_gradients(one, many)
        check_sharded(many)


@on_ranks(2)
def test_two_forwards_one_backward__and_no_grad_between():
    mesh = new_mesh()
    one, many = both(mesh)
    first, second = batches(2)
    (loss_of(one, first) + 2 * loss_of(one, second)).backward()
    mine = loss_of(many, part_of(first, mesh))
    with torch.no_grad():
        evaluated = many(first)
    torch.testing.assert_close(evaluated, one(first).detach())
    mine = mine + 2 * loss_of(many, part_of(second, mesh))
    mine.backward()
    check_gradients(one, many)
    check_sharded(many)


@on_ranks(2)
def test_a_unit_called_twice_in_one_forward():
    mesh = new_mesh()
    torch.manual_seed(0)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.head = Block(4, 5), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.block(torch.tanh(self.block(x))))

    one = Twice().double()
    many = copy.deepcopy(one)
    fully_shard(many.block, mesh=mesh)
    fully_shard(many, mesh=mesh)
    x = batches(1)[0]
    loss_of(one, x).backward()
    with CommunicationLedger(mesh) as ledger:
        loss_of(many, part_of(x, mesh)).backward()
    check_gradients(one, many)
    assert ledger.counts()["reduce_scatter_tensor"] == 2


@on_ranks(2)
def test_retained_graph__backward_twice():
    mesh = new_mesh()
    one, many = both(mesh)
    x = batches(1)[0]
    loss = loss_of(one, x)
    loss.backward(retain_graph=True)
    loss.backward()
    mine = loss_of(many, part_of(x, mesh))
    many.set_is_last_backward(False)
    mine.backward(retain_graph=True)
    many.set_is_last_backward(True)
    mine.backward()
    check_gradients(one, many)
    check_sharded(many)


@on_ranks(2)
def test_a_unit_called_outside_the_models_forward():
    """A loss in chunks calls the head by itself, many times."""
    mesh = new_mesh()
    torch.manual_seed(0)

    class Headless(Net):
        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            return x

    one = Headless().double()
    many = copy.deepcopy(one)
    fully_shard(many.head, mesh=mesh)
    wrap(many, mesh)
    x = batches(1)[0]

    def chunked(net, rows):
        hidden = net(rows)
        parts = [net.head(part).square().sum() for part in hidden.chunk(2)]
        return sum(parts) / rows.shape[0]

    chunked(one, x).backward()
    chunked(many, part_of(x, mesh)).backward()
    check_gradients(one, many)


@on_ranks(2)
def test_list_unit_partial_forward__chunked_loss_and_reuse():
    mesh = new_mesh()
    torch.manual_seed(0)
    one = Net().double()
    many = copy.deepcopy(one)
    fully_shard([many.embed, many.head], mesh=mesh)
    wrap(many, mesh)
    for x in batches(2):
        loss_of(one, x).backward()
        loss_of(many, part_of(x, mesh)).backward()
        check_gradients(one, many)
        check_sharded(many)
        # A member that does not run must not keep the others whole.
        with torch.no_grad():
            many.embed(x)
            many(x)
        assert states(many)[1:] == [State.SHARDED] * 4


# --- frozen and unused parameters


@on_ranks(2)
def test_lora_mixed_dtypes_in_a_unit__frozen_and_trained():
    mesh = new_mesh()
    torch.manual_seed(0)
    one = Net().double()
    for block in one.blocks:
        block.up.requires_grad_(False)
        block.norm.float()

        def to_single(module, args):
            return tuple(arg.float() for arg in args)

        block.norm.register_forward_pre_hook(to_single)
        block.norm.register_forward_hook(lambda *given: given[-1].double())
    one.embed.requires_grad_(False)
    many = wrap(copy.deepcopy(one), mesh)
    for x in batches(2):
        loss_of(one, x).backward()
        loss_of(many, part_of(x, mesh)).backward()
    for own, true in zip(many.parameters(), one.parameters(), strict=True):
        assert own.requires_grad == true.requires_grad
        if not true.requires_grad:
            assert own.grad is None
            continue
        tolerance = 1e-5 if own.dtype == torch.float32 else 1e-8
        torch.testing.assert_close(
            own.grad.full_tensor(), true.grad, rtol=tolerance, atol=tolerance
        )
    check_sharded(many)


@on_ranks(2)
def test_a_frozen_trunk_is_freed():
    mesh = new_mesh()
    one, many = both(mesh)
    for net in (one, many):
        for parameter in (*net.embed.parameters(), *net.blocks.parameters()):
            parameter.requires_grad_(False)
    x = batches(1)[0]
    loss_of(one, x).backward()
    loss_of(many, part_of(x, mesh)).backward()
    torch.testing.assert_close(
        many.head.weight.grad.full_tensor(), one.head.weight.grad
    )
    check_sharded(many)


class Gated(nn.Module):
    """Uses another part on each rank, if it is told to."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.blocks = nn.ModuleList(Block(4, 5) for _ in range(2))
        self.chosen = 0
        self.used = (True, True)

    def forward(self, x):
        x = self.parts[self.chosen](x)
        for block, used in zip(self.blocks, self.used, strict=True):
            y = block(x)
            x = y if used else x + 0 * y.detach().sum()
        return x


def gated(mesh):
    torch.manual_seed(0)
    one = Gated().double()
    many = copy.deepcopy(one)
    for block in many.blocks:
        fully_shard(block, mesh=mesh)
    return one, fully_shard(many, mesh=mesh)


@on_ranks(2)
def test_parameters_used_on_some_ranks_only__reduced():
    mesh = new_mesh()
    rank = mesh.get_local_rank()
    one, many = gated(mesh)
    x = batches(1)[0]
    many.chosen = rank
    loss_of(many, part_of(x, mesh)).backward()
    for chosen, rows in enumerate(x.chunk(2)):
        one.chosen = chosen
        (loss_of(one, rows) / 2).backward()
    check_gradients(one, many)


@on_ranks(2)
def test_parameters_used_nowhere_have_no_gradient():
    mesh = new_mesh()
    one, many = gated(mesh)
    x = batches(1)[0]
    one.used = many.used = (False, True)
    loss_of(one, x).backward()
    loss_of(many, part_of(x, mesh)).backward()
    for own, true in zip(many.parameters(), one.parameters(), strict=True):
        assert (own.grad is None) == (true.grad is None)


@on_ranks(2)
def test_unit_without_used_parameters_on_one_rank__adds_zeros_if_asked():
    mesh = new_mesh()
    rank = mesh.get_local_rank()
    for used in ((True, False), (False, True)):
        one, many = gated(mesh)
        many.set_reduce_scatter_unused_params(True)
        x = batches(1)[0]
        many.used = (True, True) if rank == 0 else used
        loss_of(many, part_of(x, mesh)).backward()
        for rows, own in zip(x.chunk(2), ((True, True), used), strict=True):
            one.used = own
            (loss_of(one, rows) / 2).backward()
        check_gradients(one, many)


@on_ranks(2)
def test_unit_without_used_parameters_on_one_rank__is_told():
    mesh = new_mesh()
    rank = mesh.get_local_rank()
    _, many = gated(mesh)
    many.used = (True, True) if rank == 0 else (True, False)
    loss = loss_of(many, batches(1)[0])
    with pytest.raises(RuntimeError, match="the ranks part|another unit"):
        loss.backward()


# --- recompute


class Recomputed(Net):
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class RecomputedInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Block(6, 7)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


@on_ranks(2)
def test_recompute_around_units__number_of_gathers():
    mesh = new_mesh()
    torch.manual_seed(0)
    one = Recomputed().double()
    many = wrap(copy.deepcopy(one), mesh)
    for x in batches(2):
        loss_of(one, x).backward()
        with CommunicationLedger(mesh) as ledger:
            loss_of(many, part_of(x, mesh)).backward()
        check_gradients(one, many)
        check_sharded(many)
        assert ledger.counts() == {
            "all_gather_into_tensor": 7,  # as without recompute
            "reduce_scatter_tensor": 4,
        }


@on_ranks(2)
def test_recompute_inside_units_and_nested__number_of_gathers():
    mesh = new_mesh()
    torch.manual_seed(0)
    one = Net().double()
    one.blocks = nn.ModuleList(RecomputedInside() for _ in range(2)).double()
    many = copy.deepcopy(one)
    for block in many.blocks:
        fully_shard(block.inner, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(many, mesh=mesh)
    for x in batches(2):
        loss_of(one, x).backward()
        with CommunicationLedger(mesh) as ledger:
            loss_of(many, part_of(x, mesh)).backward()
        check_gradients(one, many)
        check_sharded(many)
    assert ledger.counts()["all_gather_into_tensor"] == 5
    assert ledger.counts()["reduce_scatter_tensor"] == 3


@on_ranks(2)
def test_two_forwards_one_backward_under_checkpoint():
    mesh = new_mesh()
    torch.manual_seed(0)
    one = Recomputed().double()
    many = wrap(copy.deepcopy(one), mesh)
    first, second = batches(2)
    (loss_of(one, first) + loss_of(one, second)).backward()
    mine = loss_of(many, part_of(first, mesh)) + loss_of(many, part_of(second, mesh))
    with torch.no_grad():
        many(first)
    mine.backward()
    check_gradients(one, many)
    check_sharded(many)


# --- errors


@pytest.mark.parametrize("place", ["forward", "backward"])
@on_ranks(2)
def test_exception_then_train(place):
    mesh = new_mesh()
    one, many = both(mesh)
    first, second = batches(2)

    def fail(*_):
        raise ArithmeticError("on purpose")

    if place == "forward":
        handle = many.blocks[1].up.register_forward_pre_hook(fail)
    else:
        handle = many.blocks[1].up.register_full_backward_hook(fail)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="on purpose"):
            loss_of(many, part_of(first, mesh)).backward()
    many.reset_iter_state()
    check_sharded(many)
    with pytest.raises(ArithmeticError, match="on purpose"):
        loss_of(many, part_of(first, mesh)).backward()
    handle.remove()
    many.zero_grad()
    loss_of(one, second).backward()
    loss_of(many, part_of(second, mesh)).backward()
    check_gradients(one, many)
    check_sharded(many)


@on_ranks(2)
def test_gradients_of_gradients_are_refused():
    mesh = new_mesh()
    _, many = both(mesh)
    loss = loss_of(many, batches(1)[0])
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        torch.autograd.grad(loss, list(many.parameters()), create_graph=True)


@on_ranks(2)
def test_backward_of_an_earlier_pass_with_other_units():
    mesh = new_mesh()
    one, many = both(mesh)
    first, second = batches(2)
    losses = []
    for net, rows in (
        (one, (first, second)),
        (many, [part_of(x, mesh) for x in (first, second)]),
    ):
        with_all = loss_of(net, rows[0])
        net.skipped = 1
        losses.append((with_all, loss_of(net, rows[1])))
        net.skipped = None
    for with_all, without in losses:
        without.backward()
        with_all.backward()
    check_gradients(one, many)
    check_sharded(many)


@on_ranks(2)
def test_parameters_changed_between_forward_and_backward_are_refused():
    mesh = new_mesh()
    _, many = both(mesh)
    loss = loss_of(many, batches(1)[0])
    with torch.no_grad():
        for parameter in many.parameters():
            parameter.mul_(2)
    with pytest.raises(RuntimeError, match="between forward and backward"):
        loss.backward()


@on_ranks(2)
def test_ranks_that_wrap_in_another_order_are_told():
    mesh = new_mesh()
    torch.manual_seed(0)
    many = Net().double()
    blocks = list(many.blocks)
    for block in blocks if mesh.get_local_rank() == 0 else reversed(blocks):
        fully_shard(block, mesh=mesh)
    fully_shard(many, mesh=mesh)
    with pytest.raises(RuntimeError, match="unit|number"):
        many(batches(1)[0])


# --- methods


@on_ranks(2)
def test_unshard_and_reshard_by_hand():
    mesh = new_mesh()
    _, many = both(mesh)
    x = batches(1)[0]
    block = many.blocks[0]
    many(x)
    handle = block.unshard(async_op=True)
    assert block.up.weight.shape == (7, 6)
    assert type(block.up.weight).__name__ != "Parameter"
    assert hasattr(block.up.weight, "to_local")
    handle.wait()
    handle.wait()
    assert not hasattr(block.up.weight, "to_local")
    with CommunicationLedger(mesh) as ledger:
        block.unshard()
        many(x)
    assert ledger.counts()["all_gather_into_tensor"] == 2  # of the other blocks
    block.reshard()
    block.reshard()
    assert runner_of(block).unit.state is State.SHARDED
    assert hasattr(block.up.weight, "to_local")


@on_ranks(2)
def test_forward_method_registered_and_not():
    mesh = new_mesh()

    class Model(Net):
        def generate(self, x):
            return self.head(self.embed(x))

    torch.manual_seed(0)
    one = Model().double()
    many = wrap(copy.deepcopy(one), mesh)
    x = batches(1)[0]
    many(x)
    runner_of(many).unit.release()
    with pytest.raises(Exception, match="register_fsdp_forward_method"):
        many.generate(x)
    register_fsdp_forward_method(many, "generate")
    with torch.no_grad():
        torch.testing.assert_close(many.generate(x), one.generate(x))
    loss = many.generate(part_of(x, mesh)).square().mean()
    one.generate(x).square().mean().backward()
    loss.backward()
    torch.testing.assert_close(
        many.head.weight.grad.full_tensor(), one.head.weight.grad
    )
    with pytest.raises(ValueError, match="no method"):
        register_fsdp_forward_method(many, "no_such_method")


@on_ranks(2)
def test_prefetch_lists_do_not_change_results():
    mesh = new_mesh()
    one, many = both(mesh)
    first, second, third = many.blocks
    many.set_modules_to_forward_prefetch([first, second])
    first.set_modules_to_forward_prefetch([third])
    third.set_modules_to_backward_prefetch([second, first])
    for x in batches(2):
        loss_of(one, x).backward()
        loss_of(many, part_of(x, mesh)).backward()
        check_gradients(one, many)
    check_sharded(many)
    with pytest.raises(ValueError, match="not a unit"):
        first.set_modules_to_forward_prefetch([many.head])


@on_ranks(2)
def test_peak_of_gathered_parameters__current_and_prefetched():
    mesh = new_mesh()
    torch.manual_seed(0)
    many = wrap(Net(layers=5).double(), mesh, reshard_after_forward=True)
    most = 0

    def count(*_):
        nonlocal most
        whole = [one for one in states(many) if one is not State.SHARDED]
        most = max(most, len(whole))

    for block in many.blocks:
        block.up.register_forward_hook(count)
        block.up.register_full_backward_hook(count)
    for x in batches(2):
        loss_of(many, x).backward()
    assert 2 <= most <= 3  # the root, the current one and the next


@on_ranks(2)
def test_a_forward_without_backward_leaks_nothing():
    mesh = new_mesh()
    _, many = both(mesh)
    x = batches(1)[0]

    def count_tensors():
        gc.collect()
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    for _ in range(20):  # memory for messages grows with how far ranks are apart
        many(x)
    before = count_tensors()
    forwards = 200
    for _ in range(forwards):
        many(x)
    assert count_tensors() - before < forwards


@on_ranks(2)
def test_an_in_place_operator_on_an_output_keeps_backward():
    mesh = new_mesh()
    torch.manual_seed(0)

    class Views(Net):
        def forward(self, x):
            x = self.embed(x)
            for block in self.blocks:
                x = block(x).view(-1, 6)
                x.mul_(2)
            return self.head(x)

    one = Views().double()
    many = wrap(copy.deepcopy(one), mesh)
    x = batches(1)[0]
    loss_of(one, x).backward()
    loss_of(many, part_of(x, mesh)).backward()
    check_gradients(one, many)
