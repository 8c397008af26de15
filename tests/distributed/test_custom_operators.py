# SPDX-License-Identifier: Apache-2.0
"""Operators and autograd functions of users: DistributedOp DFunction, custom_shard, a rule in a line."""

import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.shard import OperatorError, pointwise
from hyper_parallel.core.shard.custom_shard import custom_shard
from hyper_parallel.core.shard.dfunction import DFunction
from hyper_parallel.core.shard.ops.parallel_ops import DistributedOp
from hyper_parallel.testing import on_ranks

R, S0, S1 = [Replicate()], [Shard(0)], [Shard(1)]


def draw(*shape, seed=0):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def same(mine, true):
    whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
    torch.testing.assert_close(whole.detach(), true.detach(), rtol=1e-10, atol=1e-10)


def leaf(tensor, mesh, placements):
    return distribute_tensor(tensor.clone().requires_grad_(), mesh, placements)


class ScaledProduct(DFunction):
    """gate * up * scale, with a backward written by hand; counts its calls."""

    _op_name = "scaled_product"
    seen = []  # noqa: RUF012 - of all calls

    @staticmethod
    def forward(ctx, gate, up, scale):
        ScaledProduct.seen.append((type(gate), tuple(gate.shape), scale))
        ctx.save_for_backward(gate, up)
        ctx.scale = scale
        return gate * up * scale

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        return grad * up * ctx.scale, grad * gate * ctx.scale, None


class Unnamed(DFunction):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad


class ByRule(DistributedOp):
    rule = pointwise(2, linear=[0, 1])


class ByLayouts(DistributedOp):
    """The first form; remembers what it was asked."""

    def infer_layout(self, layouts, extra_args):
        self.asked = layouts, extra_args
        return layouts[0]

    def get_expand_impl(self, func, output_layout, layouts, extra_args):
        self.expanded = output_layout, layouts, extra_args
        return lambda gate, up, scale: func(gate, up, scale) * 2


class ByPreprocess(DistributedOp):
    """The second form."""

    def preprocess(self, args, kwargs):
        gate, up, scale = args
        return (
            (gate.to_local(), up.to_local(), scale),
            kwargs,
            [gate.layout, up.layout, scale],
        )

    def infer_layout(self, cache_values):
        return cache_values[0]

    def get_expand_impl(self, func, infer_result, cache_values):
        assert infer_result is cache_values[0]
        assert cache_values[2] == 3.0


def check(mesh, factor=1.0):
    """A sharded gate and a replicated up: the gradient of up must be summed."""
    gate_data, up_data, weight = draw(5, 4), draw(5, 4, seed=1), draw(5, 4, seed=2)
    true_gate, true_up = (
        gate_data.clone().requires_grad_(),
        up_data.clone().requires_grad_(),
    )
    truth = true_gate * true_up[:1] * 3.0 * factor
    (truth * weight).sum().backward()
    gate, row = leaf(gate_data, mesh, S0), leaf(up_data[:1], mesh, R)
    y = ScaledProduct.apply(gate, row, 3.0)
    assert y.placements == (Shard(0),)
    same(y, truth)
    (y.full_tensor() * weight).sum().backward()
    same(gate.grad, true_gate.grad)
    same(row.grad, true_up.grad[:1])


@on_ranks(2)
def test_a_function_runs_on_shards_by_the_rule_of_its_name():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain = ScaledProduct.apply(torch.ones(2), torch.ones(2), 2.0)
    assert type(plain) is torch.Tensor
    ByRule("scaled_product")
    ScaledProduct.seen.clear()
    check(mesh)
    rows = 3 if mesh.rank == 0 else 2
    assert ScaledProduct.seen == [(torch.Tensor, (rows, 4), 3.0)]
    # A pending sum passes where the rule says so.
    part = DTensor.from_local(draw(4), mesh, [Partial()])
    assert ScaledProduct.apply(
        part, leaf(draw(4, seed=1), mesh, R), 1.0
    ).placements == (Partial(),)
    with pytest.raises(
        ValueError,
        match="Unnamed.apply: called with distributed tensors, but Unnamed has no _op_name",
    ):
        Unnamed.apply(part)


@on_ranks(2)
def test_the_two_forms_with_methods():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    op = ByLayouts("scaled_product")
    check(mesh, factor=2.0)
    layouts, extra = op.asked
    assert [layout and layout.placements for layout in layouts] == [
        (Shard(0),),
        (Replicate(),),
        None,
    ]
    assert extra == [3.0]
    assert op.expanded[0] is layouts[0]
    ByPreprocess("scaled_product")
    check(mesh)
    DistributedOp("scaled_product")
    with pytest.raises(
        NotImplementedError,
        match="scaled_product: DistributedOp must give a rule or define infer_layout",
    ):
        ScaledProduct.apply(
            distribute_tensor(draw(4), mesh, R),
            distribute_tensor(draw(4), mesh, R),
            1.0,
        )


@on_ranks(2)
def test_a_rule_for_a_function_of_the_framework():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = leaf(draw(6, 4), mesh, S0)

    class Erfcx(DistributedOp):
        rule = pointwise(1)

    Erfcx("erfcx")
    y = torch.special.erfcx(x)
    assert y.placements == (Shard(0),)
    same(y, torch.special.erfcx(draw(6, 4)))

    class Wrong(DistributedOp):
        rule = "a b -> a"

    Wrong("erfcx")
    with pytest.raises(
        OperatorError,
        match=r"erfcx: rank \d got a result of shape \(3, 4\), but by the rule it is \(3,\)",
    ):
        torch.special.erfcx(x)
    Erfcx("erfcx")  # these ranks serve other tests too


@on_ranks(4)
def test_custom_shard_runs_between_the_given_placements():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    data, w = draw(6, 8), draw(10, 8, seed=1)
    true, true_w = data.clone().requires_grad_(), w.clone().requires_grad_()
    truth = F.linear(true, true_w).relu()
    truth.pow(2).sum().backward()

    def column(x, weight):
        assert type(x) is torch.Tensor
        return F.linear(x, weight).relu()

    sharded = custom_shard(column, mesh, [Shard(1)], ([Replicate()], [Shard(0)]))
    x, weight = leaf(data, mesh, S0), leaf(w, mesh, S0)
    y = sharded(x, weight)  # 10 columns over 4 ranks: 3, 3, 3, 1
    assert y.shape == (6, 10)
    same(y, truth)
    y.redistribute().to_local().pow(2).sum().backward()
    same(x.grad, true.grad)
    same(weight.grad, true_w.grad)
    exact = custom_shard(
        column, mesh, [Shard(1)], ([Replicate()], [Shard(0)]), redistribute_inputs=False
    )
    with pytest.raises(
        ValueError,
        match=r"custom_shard\(column\): argument 0 lies in .*S\(0\).*, expected .*R",
    ):
        exact(x, weight)
    with pytest.raises(
        ValueError, match="expected in_placements for 1 positional arguments, got 2"
    ):
        sharded(x)
    with pytest.raises(
        TypeError, match="argument 0 must be a DTensor as in_placements say, got Tensor"
    ):
        sharded(data, weight)

    def both(a):
        return a.sum(1), a * 2

    rows, twice = custom_shard(both, mesh, ([Partial()], [Shard(1)]), ([Shard(1)],))(
        leaf(data, mesh, R)
    )
    same(rows, data.sum(1))
    same(twice, data * 2)
    with pytest.raises(
        ValueError, match="expected a layout for each of its 2 results, got 1"
    ):
        custom_shard(both, mesh, [Shard(1)], ([Shard(1)],))(leaf(data, mesh, R))
    with pytest.raises(ValueError, match="do not make a tensor of shape"):
        custom_shard(lambda a: a[:, : mesh.rank + 1], mesh, [Shard(0)], ([Shard(0)],))(
            leaf(data, mesh, S0)
        )
    plain = custom_shard(lambda a: (a * 1, 7), mesh, (None, None), ([Shard(1)],))(
        leaf(data, mesh, S0)
    )
    assert type(plain[0]) is torch.Tensor
    assert plain[1] == 7


@on_ranks(2)
def test_an_operator_without_a_rule_changes_its_arguments_wherever_they_lie():
    with torch.library._scoped_library("hyper_parallel_tests", "DEF") as library:
        library.define("accumulate(Tensor x, Tensor(a!) total) -> Tensor")
        library.impl("accumulate", lambda x, total: total.add_(x.sum(0)).sum(), "CPU")
        mesh, x = init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), draw(4, 3)
        for placements in (R, S0, [Partial()]):
            total = distribute_tensor(
                torch.ones(3, dtype=torch.float64), mesh, R
            ).redistribute(None, placements)
            with pytest.warns(UserWarning, match="accumulate has no rule"):
                found = torch.ops.hyper_parallel_tests.accumulate(
                    distribute_tensor(x, mesh, S0), total
                )
            assert total.placements == tuple(placements)
            same(total, x.sum(0) + 1)
            same(found, x.sum() + 3)
            dispatcher = DTensor.dispatch.__self__
            dispatcher._warned.clear()


@on_ranks(2)
def test_a_random_operator_without_a_rule_is_the_same_on_every_rank():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    x = distribute_tensor(draw(12, 12), mesh, S0)
    warnings.simplefilter("ignore")  # that there is no rule
    with torch.library._scoped_library("hyper_parallel_tests", "DEF") as library:
        library.define("noise(Tensor x) -> Tensor")
        library.impl("noise", torch.rand_like, "CPU")
        for seed in (mesh.rank, 3):
            torch.manual_seed(seed)
            found = torch.ops.hyper_parallel_tests.noise(x).to_local()
            first, second = DTensor.from_local(found[None], mesh, S0).full_tensor()
            assert torch.equal(first, second)
