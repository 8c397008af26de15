# SPDX-License-Identifier: Apache-2.0
"""A distributed tensor under the habits of torch's users: in place, out=, grad, data, item, hooks, recompute, modes."""

import copy
import io
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    SkipDTensorDispatch,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.dtensor.modes import explicit, implicit_replication, strict
from hyper_parallel.core.shard import OperatorError
from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER
from hyper_parallel.testing import on_ranks

R, S0, S1 = [Replicate()], [Shard(0)], [Shard(1)]
ALL = [R, S0, S1, [Partial()]]


def draw(*shape, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def same(mine, true):
    whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
    torch.testing.assert_close(whole.detach(), true.detach(), rtol=1e-10, atol=1e-10)


def put(tensor, mesh, placements, requires_grad=False):
    """The tensor on the mesh; in unequal parts where a sum is pending."""
    if placements[0].is_partial():
        part = tensor * (3.0 if mesh.rank == 0 else -2.0 / (mesh.size() - 1))
        return DTensor.from_local(part.requires_grad_(requires_grad), mesh, placements)
    return distribute_tensor(
        tensor.clone().requires_grad_(requires_grad), mesh, placements
    )


@on_ranks(2)
def test_in_place_keeps_the_layout_of_the_target():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x, y = draw(5, 4), draw(5, 4, seed=1)
    changes = {
        "add": lambda a, b: a.add_(b),
        "sub": lambda a, b: a.sub_(b, alpha=2),
        "mul": lambda a, b: a.mul_(b),
        "div": lambda a, b: a.div_(b),
        "number": lambda a, b: a.add_(1.5),
        "scaled": lambda a, b: a.mul_(1.5),
        "relu": lambda a, b: a.relu_(),
        "functional": lambda a, b: F.relu(a, inplace=True),
        "copy": lambda a, b: a.copy_(b),
        "zero": lambda a, b: a.zero_(),
        "fill": lambda a, b: a.fill_(2.5),
        "clamp": lambda a, b: a.clamp_(-0.5, 0.5),
        "addcmul": lambda a, b: a.addcmul_(b, b, value=0.5),
        "lerp": lambda a, b: a.lerp_(b, 0.25),
    }
    for name, change in changes.items():
        for first in ALL:
            for second in ALL:
                mine, other, true = put(x, mesh, first), put(y, mesh, second), x.clone()
                change(true, y)
                assert change(mine, other) is mine, name
                assert mine.placements == tuple(first), name
                same(mine, true)
    mine = put(x, mesh, S0)
    held = mine
    mine += 1
    mine *= put(y, mesh, R)
    assert held is mine
    same(mine, (x + 1) * y)


@on_ranks(2)
def test_in_place_is_differentiated():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x, y = draw(5, 4), draw(5, 4, seed=1)
    for first in ALL:
        for second in ALL:
            a, b = put(x, mesh, first, True), put(y, mesh, second, True)
            true, other = x.clone().requires_grad_(), y.clone().requires_grad_()
            h, g = a * 1, true * 1
            h.mul_(b).add_(b).tanh_()
            g.mul_(other).add_(other).tanh_()
            (h * h).sum().backward()
            (g * g).sum().backward()
            same(a.grad, true.grad)
            same(b.grad, other.grad)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        put(x, mesh, S0, True).add_(1)


@on_ranks(2)
def test_out_keeps_the_layout_of_its_tensor():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x, y = draw(5, 4), draw(5, 4, seed=1)
    for target in ALL:
        out = put(torch.zeros_like(x), mesh, target)
        assert torch.add(put(x, mesh, S0), put(y, mesh, S1), out=out) is out
        assert out.placements == tuple(target)
        same(out, x + y)
    with pytest.raises(
        ValueError, match=r"the result has the shape \(5, 4\), but its target \(4, 4\)"
    ):
        torch.add(put(x, mesh, S0), put(y, mesh, S1), out=put(draw(4, 4), mesh, S0))


@on_ranks(2)
def test_a_view_that_had_to_be_copied_refuses_to_be_changed():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = put(draw(6, 4), mesh, S0)
    x[:, 1:3].zero_()  # not along the sharded dim: a view
    assert x.full_tensor()[:, 1:3].abs().sum() == 0
    for piece in (x[1:3], x[1:3][:, :2], x.narrow(0, 1, 2), x.unbind(0)[0]):
        with pytest.raises(
            OperatorError,
            match="zero: the target is the result of .* along a sharded dim",
        ):
            piece.zero_()
    x[1:3].clone().zero_()


@on_ranks(2)
def test_the_graph_is_that_of_the_shards():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    data = draw(5, 4)
    for placements in ALL:
        x = put(data, mesh, placements, True)
        assert x.requires_grad
        assert x.is_leaf
        y = x * 2
        assert y.grad_fn is not None
        assert not y.is_leaf
        with torch.no_grad():
            assert not (x * 2).requires_grad
        assert not x.detach().requires_grad
        assert not x.data.requires_grad
        assert x.clone().requires_grad
        (first,) = torch.autograd.grad((y * y).sum(), x)
        same(first, 8 * data)
        assert first.placements == x.layout.reset_partial().placements
        (second,) = torch.autograd.grad(x.pow(3).sum(), [x], create_graph=True)
        (third,) = torch.autograd.grad(second.sum(), [x])
        same(third, 6 * data)
        grad = torch.autograd.grad(
            x * x, x, grad_outputs=put(draw(5, 4, seed=2), mesh, S1)
        )[0]
        same(grad, 2 * data * draw(5, 4, seed=2))
        y = x * 2
        y.backward(put(draw(5, 4, seed=2), mesh, S0))
        same(x.grad, 2 * draw(5, 4, seed=2))
        x.grad = None
        assert x.grad is None
        with pytest.raises(RuntimeError, match="only for scalar outputs"):
            (x * 2).backward()
    x = put(data, mesh, S0, True)
    x.grad = put(data, mesh, R)
    assert x.grad.placements == (Shard(0),)
    same(x.grad, data)
    with pytest.raises(TypeError, match="grad: expected a DTensor"):
        x.grad = data


@on_ranks(2)
def test_hooks_see_the_whole_gradient():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    data, w = draw(4, 6), draw(8, 6, seed=1)
    true = data.clone().requires_grad_()
    F.linear(true, w).pow(2).sum().backward()
    seen = []
    x, weight = put(data, mesh, S0, True), put(w, mesh, S0)
    h = (x * 1).redistribute()
    h.register_hook(lambda g: seen.append((g.placements, g.full_tensor())))
    h.retain_grad()
    F.linear(h, weight).pow(2).sum().backward()
    assert seen[0][0] == (Replicate(),)
    same(seen[0][1], true.grad)
    same(h.grad, true.grad)
    same(x.grad, true.grad)
    x = put(data, mesh, S0, True)
    x.register_hook(lambda g: g * 2)
    x.register_post_accumulate_grad_hook(lambda p: seen.append(p is x))
    F.linear(x.redistribute(), weight).pow(2).sum().backward()
    assert seen[-1] is True
    same(x.grad, 2 * true.grad)
    h = (put(data, mesh, S0, True) * 1).redistribute()
    F.linear(h, weight)
    with pytest.raises(
        RuntimeError, match="register_hook: the tensor was gathered and used already"
    ):
        h.register_hook(print)


@on_ranks(2)
def test_values_leave_as_numbers_arrays_and_text():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    data = draw(4, 3)
    for placements in ALL:
        x = put(data, mesh, placements)
        total = x.sum()
        assert total.item() == pytest.approx(data.sum().item())
        assert float(total) == pytest.approx(data.sum().item())
        assert f"{total:.6f}" == f"{data.sum():.6f}"
        same(torch.tensor(x.tolist(), dtype=torch.float64), data)
        same(torch.from_numpy(x.numpy()), data)
        assert bool(x.sum() > 1e9) is False
        assert int(put(torch.tensor(7.0), mesh, R)) == 7
        assert len(x) == 4
        assert x.size() == (4, 3)
        assert x.size(0) == 4
        assert x.dim() == x.ndim == 2
        assert x.numel() == 12
        assert "DTensor(shape=(4, 3)" in repr(x)
        assert "DTensor" in str(x)
        same(copy.deepcopy(x), data)
        same(copy.copy(x), data)
        same(sum(row for row in x), data.sum(0))
    parameter = nn.Parameter(put(data, mesh, S0))
    assert isinstance(parameter, DTensor)
    assert isinstance(parameter, nn.Parameter)
    assert isinstance(copy.deepcopy(parameter), nn.Parameter)
    parameter.data = put(data * 2, mesh, S0)
    same(parameter, data * 2)
    assert parameter.requires_grad
    with pytest.raises(ValueError, match="data: expected a DTensor of shape"):
        parameter.data = put(data, mesh, R)


@on_ranks(2)
def test_autocast_and_recompute():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    data, w = draw(4, 6).float(), draw(8, 6, seed=1).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, truth = F.linear(put(data, mesh, R), put(w, mesh, S0)), F.linear(data, w)
    assert y.dtype == truth.dtype == torch.bfloat16
    assert torch.equal(y.full_tensor(), truth)

    def block(x, weight):
        return torch.tanh(
            F.linear(torch.tanh(F.linear(x, weight)), weight.transpose(0, 1))
        )

    true = [data.clone().requires_grad_(), w.clone().requires_grad_()]
    block(*true).pow(2).sum().backward()
    for preserved in (True, False):
        x, weight = put(data, mesh, S0, True), put(w, mesh, S0, True)
        y = checkpoint(
            block, x, weight, use_reentrant=False, preserve_rng_state=preserved
        )
        y.pow(2).sum().backward()
        for mine, one in zip((x, weight), true, strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), one.grad)


@on_ranks(2)
def test_modes():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    data = draw(4, 6)
    rows, columns = put(data, mesh, S0), put(data, mesh, S1)
    with explicit():
        assert (rows * rows).placements == (Shard(0),)
        with pytest.raises(
            OperatorError,
            match=r"add: explicit mode: tensor \d of its arguments must go from .*(\n.*)*to_all",
        ):
            rows + columns
        with explicit(False):
            same(rows + columns, 2 * data)
        assert rows.redistribute(mesh, S1).placements == (Shard(1),)
    same(rows + columns, 2 * data)
    with CommunicationLedger(mesh) as ledger:
        _ = rows + columns  # moved for the sum before, and remembered
    assert ledger.entries == []
    columns = put(data, mesh, S1)
    with CommunicationLedger(mesh) as ledger:
        _ = rows + columns
        columns.redistribute()
    assert [entry.implicit for entry in ledger.entries] == [True, False]
    assert ledger.counts(implicit=False) == {"all_gather_into_tensor": 1}
    assert "implicit" in ledger.table()
    with pytest.raises(
        OperatorError,
        match=r"add: tensor 1 among its arguments, of shape \(4, 6\), is a plain tensor",
    ):
        rows + data
    with implicit_replication():
        same(rows + data, 2 * data)
        same(data + rows, 2 * data)
    same(rows + torch.tensor(2.0), data + 2)
    same(torch.tensor(2.0) * rows, data * 2)
    other = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    with pytest.raises(OperatorError, match="add: its tensors lie on different meshes"):
        rows + distribute_tensor(data, other, [Replicate(), Shard(0)])


def chosen(x):
    """How many there are depends on the values, so there is no rule."""
    return torch.masked_select(x, x > 0)


@on_ranks(2)
def test_an_operator_without_a_rule_is_right_and_told_once():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    data = draw(4, 4)
    _OP_DISPATCHER._warned.discard("masked_select")  # another test may have been told
    _OP_DISPATCHER.forget()
    for placements in ALL:
        x = put(data, mesh, placements, True)
        true = data.clone().requires_grad_()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            y = chosen(x)
            chosen(x)
        expected = 1 if placements is R else 0
        assert len(told) == expected
        if told:
            assert "masked_select has no rule (it is in no table)" in str(
                told[0].message
            )
            assert "A rule is one line" in str(told[0].message)
            assert told[0].filename == __file__
        assert y.placements == (Replicate(),)
        same(y, chosen(data))
        y.sum().backward()
        chosen(true).sum().backward()
        same(x.grad, true.grad)
    with strict():
        with pytest.raises(OperatorError, match="masked_select: no rule"):
            chosen(put(data, mesh, S0))
        with pytest.raises(
            OperatorError, match="unique: no rule: it is in no table; strict mode"
        ):
            torch.unique(put(data, mesh, S0))
    # In place: the target is changed as a whole and cut again.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = put(data, mesh, S0)
        assert x.fill_diagonal_(0.5) is x
        assert x.placements == (Shard(0),)
        same(x, data.clone().fill_diagonal_(0.5))


@on_ranks(2)
def test_skipped_dispatch_runs_on_the_shards():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = put(draw(4, 6), mesh, S0)
    with SkipDTensorDispatch():
        y = x + 1
        assert type(y) is torch.Tensor
        assert y.shape == (2, 6)
        assert x.add_(1) is x
        with SkipDTensorDispatch(no_skip=["add", torch.mul]):
            assert isinstance(x + 1, DTensor)
            assert isinstance(x * 2, DTensor)
            assert type(x - 1) is torch.Tensor
        assert type(x * 2) is torch.Tensor
        found = []
        thread = threading.Thread(target=lambda: found.append(x + 1))
        thread.start()
        thread.join()
        assert isinstance(found[0], DTensor)
    assert isinstance(x + 1, DTensor)
    skip = SkipDTensorDispatch()
    with pytest.raises(ZeroDivisionError), skip, skip:
        _ = 1 / 0
    assert isinstance(x + 1, DTensor)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@on_ranks(2)
def test_a_plain_autograd_function_is_refused_where_it_would_lose_the_gradient():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = put(draw(4, 6), mesh, S0, True)
    for lost in (
        Doubled.apply(x),
        Doubled.apply(x * 1),
        checkpoint(lambda t: t * 2, x, use_reentrant=True),
    ):
        with pytest.raises(
            OperatorError,
            match="came out of an autograd function .* derive the function from DFunction",
        ):
            lost.sum()
    same(Doubled.apply(x.detach()) + 0.0, draw(4, 6) * 2)
    with torch.no_grad():
        kept = x * 2
        same(Doubled.apply(x) + kept, draw(4, 6) * 4)
    same((kept * x).sum(), (draw(4, 6) ** 2 * 2).sum())


@on_ranks(2)
def test_a_change_in_place_of_what_was_gathered_is_differentiated():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    w = put(torch.ones(4, 6, dtype=torch.float64), mesh, S0)
    for change_origin in (False, True):
        x = put(draw(4, 6), mesh, S0, True)
        h = x * 1
        y = h.redistribute()
        (h if change_origin else y).mul_(2)
        F.linear(y, w).sum().backward()
        same(
            x.grad,
            torch.full((4, 6), 4.0 if change_origin else 8.0, dtype=torch.float64),
        )
    # An operator without a rule, in place.
    x, true = put(draw(4, 6), mesh, S0, True), draw(4, 6).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (x * 1).renorm_(2, 0, 1.0).mul(draw(4, 6, seed=1).sum()).pow(2).sum().backward()
    (true * 1).renorm_(2, 0, 1.0).mul(draw(4, 6, seed=1).sum()).pow(2).sum().backward()
    same(x.grad, true.grad)
    same(put(draw(4, 6), mesh, R).t_(), draw(4, 6).t())


@on_ranks(2)
def test_out_without_operands_and_what_is_saved():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for placements in (R, S0, S1):
        x = put(draw(4, 3), mesh, placements)
        assert torch.eye(4, 3, out=x) is x
        same(x, torch.eye(4, 3, dtype=torch.float64))
    whole = put(torch.zeros(4, 6, dtype=torch.int64), mesh, S0)
    with pytest.raises(
        OperatorError, match="a result of torch.float64 does not go into torch.int64"
    ):
        torch.add(put(draw(4, 6), mesh, S0), 1.0, out=whole)
    plain = torch.ones(3)
    DTensor.from_local(plain, mesh, R)
    file = io.BytesIO()
    torch.save(plain, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), plain)
