# SPDX-License-Identifier: Apache-2.0
"""Operators on distributed tensors by their rules, between real ranks, against the plain operator: any layouts."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import meshes, one_layout, split_up

from hyper_parallel import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.shard.call import call, plan_call
from hyper_parallel.core.shard.rule import Rule, einsum, lookup, move, pointwise, reduction
from hyper_parallel.testing import on_ranks, run_ranks

LINEAR = einsum("... k, n k, +n -> ... n")


# name -> (function, rule, shapes, attributes of the rule, keywords of the function)
CASES = {
    "linear": (F.linear, LINEAR, [(5, 4), (6, 4), (6,)], {}, {}),
    "matmul": (torch.matmul, einsum("... m k, ... k n -> ... m n"), [(2, 5, 4), (2, 4, 6)], {}, {}),
    "add": (torch.add, pointwise(2, linear=[(0, 1)]), [(6, 5), (5,)], {}, {}),
    "mul": (torch.mul, pointwise(2, linear=[0, 1]), [(6, 5), (6, 1)], {}, {}),
    "tanh": (torch.tanh, pointwise(1), [(7, 4)], {}, {}),
    "sum": (torch.sum, reduction("sum", "... {dim} -> ..."), [(7, 4)], {"dim": 0}, {"dim": 0}),
    "softmax": (F.softmax, pointwise("... {dim}! -> ... {dim}!"), [(7, 4)], {"dim": 1}, {"dim": 1}),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), Rule("... n!, n!, n! -> ... n!"),
                   [(6, 3, 5), (5,), (5,)], {}, {}),
    "transpose": (torch.transpose, move("... {a=x} {b=y} -> ... {a=y} {b=x}"), [(3, 4, 5)], {"a": 0, "b": 2},
                  {"dim0": 0, "dim1": 2}),
    "cat": (torch.cat, move("[... {dim}!] -> ... {dim}!"), [[(4, 3), (4, 5)]], {"dim": 1}, {"dim": 1}),
    "stack": (torch.stack, move("[...] -> ... {dim}!"), [[(4, 3), (4, 3)]], {"dim": 0}, {"dim": 0}),
    "split": (torch.split, move("... {dim=d}! -> [... {dim=part}!]"), [(4, 5)], {"dim": 1, "part": (2, 3)},
              {"split_size_or_sections": [2, 3], "dim": 1}),
}  # fmt: skip


def flat(operands):
    return [one for operand in operands for one in (operand if isinstance(operand, list) else [operand])]


def nested(items, like):
    items = iter(items)
    return [[next(items) for _ in one] if isinstance(one, list) else next(items) for one in like]


def weighted_sum(results, seed):
    rng = np.random.default_rng(seed)
    return sum((result * torch.tensor(rng.standard_normal(result.shape))).sum() for result in results)


def on_rank(name, layouts, shards, seed):
    """On a rank: the whole results, and the whole gradient of every operand."""
    function, rule, shapes, attrs, keywords = CASES[name]
    place = layouts[0].mesh.get_coordinate()
    leaves = [torch.tensor(shard[place], requires_grad=True) for shard in shards]
    tensors = [DTensor(leaf, layout, shape) for leaf, layout, shape in zip(leaves, layouts, flat(shapes), strict=True)]
    results = call(function, rule, nested(tensors, shapes), attrs, **keywords)
    wholes = [result.full_tensor() for result in (results if isinstance(results, tuple) else [results])]
    weighted_sum(wholes, seed).backward()
    gradients = [tensor.grad.full_tensor().numpy() for tensor in tensors]
    return [whole.detach().numpy() for whole in wholes], gradients


def in_one_process(name, values, seed):
    function, _, shapes, _, keywords = CASES[name]
    leaves = [torch.tensor(value, requires_grad=True) for value in values]
    results = function(*nested(leaves, shapes), **keywords)
    results = results if isinstance(results, tuple) else [results]
    weighted_sum(results, seed).backward()
    return [result.detach().numpy() for result in results], [leaf.grad.numpy() for leaf in leaves]


def check(name, layouts, seed):
    rng = np.random.default_rng(seed)
    shapes = flat(CASES[name][2])
    values = [rng.uniform(0.5, 2.0, shape) * rng.choice([-1.0, 1.0], shape) for shape in shapes]
    shards = [split_up(value, layout, rng) for value, layout in zip(values, layouts, strict=True)]
    expected = in_one_process(name, values, seed)
    for outputs, gradients in run_ranks(on_rank, layouts[0].mesh.size(), name, layouts, shards, seed):
        for found, true in zip((*outputs, *gradients), (*expected[0], *expected[1]), strict=True):
            np.testing.assert_allclose(found, true, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sorted(CASES))
def test_any_layouts_of_the_operands(name):
    shapes = flat(CASES[name][2])
    drawn = meshes(4).flatmap(lambda mesh: st.tuples(*(one_layout(mesh, len(s), ops=(None, "sum")) for s in shapes)))

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(drawn, st.integers(0, 99))
    def property_holds(layouts, seed):
        check(name, layouts, seed)

    property_holds()


@on_ranks(4)
def test_a_block_costs_what_a_person_would_write():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    data, first, second = torch.randn(6, 8), torch.randn(12, 8), torch.randn(8, 12)
    x = distribute_tensor(data.requires_grad_(), mesh, [Replicate()])
    up, down = distribute_tensor(first, mesh, [Shard(0)]), distribute_tensor(second, mesh, [Shard(1)])
    with CommunicationLedger(mesh) as ledger:
        hidden = call(torch.tanh, pointwise(1), [call(F.linear, LINEAR, [x, up, None])])
        y = call(F.linear, LINEAR, [hidden, down, None])
        assert y.placements == (Partial(),)
        y = y.reduce_partial()
        y.to_local().square().sum().backward()
    assert ledger.counts(backward=False) == {"all_reduce": 1}
    assert ledger.counts(backward=True) == {"all_reduce": 1}
    whole = data.detach().clone().requires_grad_()
    (torch.tanh(whole @ first.T) @ second.T).square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), whole.grad, rtol=1e-4, atol=1e-4)
    # With the sequence sharded: a gather and a reduce-scatter each way.
    x = distribute_tensor(data, mesh, [Shard(0)])
    with CommunicationLedger(mesh) as ledger:
        whole_x = x.redistribute(mesh, [Replicate()])
        hidden = call(torch.tanh, pointwise(1), [call(F.linear, LINEAR, [whole_x, up, None])])
        rows = call(F.linear, LINEAR, [hidden, down, None]).redistribute(mesh, [Shard(0)])
    assert rows.local_shape == x.local_shape
    assert sum(ledger.counts().values()) == 2


@on_ranks(4)
def test_a_gather_whose_gradient_comes_in_parts_is_a_reduce_scatter_in_backward():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    data, weight = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    torch.distributed.broadcast(data, 0)
    torch.distributed.broadcast(weight, 0)
    x = distribute_tensor(data.requires_grad_(), mesh, [Shard(1)])  # the contraction is not cut in the weight
    columns = distribute_tensor(weight, mesh, [Shard(0)])
    with CommunicationLedger(mesh) as ledger:
        y = call(F.linear, Rule("m k!, n k! -> m n"), [x, columns])
        (y.to_local() ** 2).sum().backward()
    assert y.placements == (Shard(1),)
    assert ledger.counts(backward=False) == {"all_gather_into_tensor": 1}
    assert ledger.counts(backward=True) == {"reduce_scatter_tensor": 1}
    true = data.detach().clone().requires_grad_()
    ((true @ weight.T) ** 2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), true.grad)


@on_ranks(2)
def test_plans_are_made_once_and_bad_calls_are_told():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    rows = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    rule = pointwise(1)
    assert plan_call(rule, [rows]) is plan_call(rule, [rows])
    with pytest.raises(ValueError, match=r"rule '... -> ...': operand 0 is a Tensor, not a DTensor; distribute_tensor"):
        call(torch.tanh, rule, [torch.ones(4)])
    with pytest.raises(ValueError, match="the function gave rank . a result of shape"):
        call(functools.partial(torch.sum, dim=1), rule, [rows])
    indices = distribute_tensor(torch.tensor([0, 3]), mesh, [Replicate()])
    with pytest.raises(ValueError, match="factor v is looked up and cut along axis 0"):
        call(lambda i, w: w[i], lookup("..., v@ d -> ... d"), [indices, rows])
