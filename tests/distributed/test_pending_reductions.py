# SPDX-License-Identifier: Apache-2.0
"""Averages, maxima, minima and products that are pending: exact gradients beside copies, for hooks and for leaves."""

import pytest
import torch

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.testing import on_ranks

R, S0 = Replicate(), Shard(0)
OPS = ("sum", "avg", "max", "min", "prod")


def mesh_of_two():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("x",))


def parts_of(op):
    """Two parts, and what they are reduced to."""
    parts = torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=torch.float64)
    reduce = {
        "sum": parts.sum,
        "avg": parts.mean,
        "max": parts.amax,
        "min": parts.amin,
        "prod": parts.prod,
    }
    return parts, reduce[op](0)


def pending(mesh, op, recorded):
    parts, _ = parts_of(op)
    return DTensor.from_local(
        parts[mesh.rank].clone().requires_grad_(recorded), mesh, [Partial(op)]
    )


USES = {
    "add": lambda a, x: (a + x) ** 2,
    "subtract": lambda a, x: (x - a) ** 3,
    "multiply": lambda a, x: (x * a).sin(),
    "cat": lambda a, x: torch.cat([a, x]) ** 2,
    "stack": lambda a, x: torch.stack([a, x]) ** 2,
    "scatter_add": lambda a, x: a.scatter_add(0, torch.tensor(0).expand(2), x) ** 2,
    "two terms": lambda a, x: a.sum() + (x**2).sum(),
    "a view between": lambda a, x: (a.view(2, 1) + x.view(2, 1)).flatten() ** 2,
}


@on_ranks(2)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("recorded", [False, True])
def test_a_copy_beside_it_gets_its_whole_gradient(op, recorded):
    mesh, (_, value) = mesh_of_two(), parts_of(op)
    for name, use in USES.items():
        plain = [
            value.clone().requires_grad_(),
            torch.tensor([0.5, 2.0], dtype=torch.float64, requires_grad=True),
        ]
        if name == "scatter_add":
            use(*plain).sum().backward()
            index = distribute_tensor(torch.zeros(2, dtype=torch.int64), mesh, [R])
            mine = [
                pending(mesh, op, recorded),
                distribute_tensor(plain[1].detach(), mesh, [R]).requires_grad_(),
            ]
            (mine[0].scatter_add(0, index, mine[1]) ** 2).sum().backward()
        else:
            use(*plain).sum().backward()
            mine = [
                pending(mesh, op, recorded),
                distribute_tensor(plain[1].detach(), mesh, [R]).requires_grad_(),
            ]
            use(*mine).sum().backward()
        torch.testing.assert_close(
            mine[1].grad.full_tensor(),
            plain[1].grad,
            msg=lambda m, name=name: f"{name}: {m}",
        )
        if recorded:
            torch.testing.assert_close(
                mine[0].grad.full_tensor(),
                plain[0].grad,
                msg=lambda m, n=name: f"{n}: {m}",
            )


@on_ranks(2)
@pytest.mark.parametrize("op", OPS)
def test_the_plain_part_gets_its_own_derivative(op):
    """Of the tensor that from_local was given: by this rank's part, as the chain rule has it."""
    mesh, (parts, _) = mesh_of_two(), parts_of(op)
    leaf = parts[mesh.rank].clone().requires_grad_()
    (DTensor.from_local(leaf, mesh, [Partial(op)]) ** 2).sum().backward()
    every = parts.clone().requires_grad_()
    reduce = {
        "sum": every.sum,
        "avg": every.mean,
        "max": every.amax,
        "min": every.amin,
        "prod": every.prod,
    }
    (reduce[op](0) ** 2).sum().backward()
    torch.testing.assert_close(leaf.grad, every.grad[mesh.rank])


@on_ranks(2)
@pytest.mark.parametrize("op", OPS)
def test_hooks_and_kept_gradients_are_of_the_value(op):
    mesh, (_, value) = mesh_of_two(), parts_of(op)

    def run(tensor):
        seen = []
        tensor.register_hook(lambda g: seen.append(g) or g * 2)
        tensor.retain_grad()
        (tensor * tensor).sum().backward(retain_graph=True)
        (again,) = torch.autograd.grad((tensor**3).sum(), tensor)
        return seen[0], tensor.grad, again

    expected = run(value.clone().requires_grad_() * 1)
    leaf = pending(mesh, op, recorded=True)
    found = run(leaf.view(2) if op in ("sum", "avg") else leaf)
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.full_tensor(), true)


@on_ranks(2)
@pytest.mark.parametrize("op", OPS)
def test_the_whole_passes_the_gradient_of_the_value_too(op):
    """By full_tensor, which hands out a tensor of the caller's own."""
    mesh, (_, value) = mesh_of_two(), parts_of(op)
    leaf, seen = pending(mesh, op, recorded=True), []
    leaf.register_hook(lambda g: seen.append(g) or g * 2)
    whole = leaf.full_tensor()
    (whole * whole).sum().backward()
    torch.testing.assert_close(seen[0].full_tensor(), 2 * value)
    torch.testing.assert_close(leaf.grad.full_tensor(), 4 * value)
    with torch.no_grad():
        whole.zero_()
    torch.testing.assert_close(leaf.full_tensor().detach(), value)


@on_ranks(2)
def test_a_product_that_is_recorded_after_one_that_is_not():
    mesh, gradients = mesh_of_two(), []
    for recorded in (False, True):
        x = distribute_tensor(torch.tensor([[2.0], [3.0]]), mesh, [S0]).requires_grad_(
            recorded
        )
        product = x.prod(0)
        if recorded:
            product.register_hook(lambda g: gradients.append(g.full_tensor().item()))
            product.view(1).square().sum().backward()
            assert x.grad.full_tensor().flatten().tolist() == [36.0, 24.0]
    assert gradients == [12.0]


@on_ranks(2)
def test_a_product_over_a_sharded_dim():
    mesh = mesh_of_two()
    x = distribute_tensor(torch.tensor([2.0, 3.0]), mesh, [S0]).requires_grad_()
    product = x.prod(0)
    assert product.placements == (Partial("prod"),)
    (gradient,) = torch.autograd.grad(product * 1.0, product, retain_graph=True)
    assert gradient.full_tensor() == 1
    product.backward()
    assert x.grad.full_tensor().tolist() == [3.0, 2.0]


@on_ranks(2)
@pytest.mark.parametrize("place", [S0, Shard(1), R])
def test_hooks_survive_changes_in_place_of_empty_shards(place):
    mesh = mesh_of_two()

    def run(x):
        y, seen = x * 1, []
        y.register_hook(lambda g: seen.append(g) or g * 10)
        y.mul_(3)
        y.sum().backward()
        z = x * 1
        z.register_hook(seen.append)
        z.add_(z)
        z.sum().backward()
        return [x.grad, *seen]

    expected = run(torch.ones(1, 2, requires_grad=True))
    found = run(distribute_tensor(torch.ones(1, 2), mesh, [place]).requires_grad_())
    assert [g.full_tensor().tolist() for g in found] == [g.tolist() for g in expected]


@on_ranks(2)
def test_ranks_remember_alike_where_one_has_no_queries():
    """Attention asks for the reduced key; whether that is there for the next who asks must not depend on the shard."""
    mesh = mesh_of_two()
    for queries in (1, 2):
        q = distribute_tensor(torch.randn(1, 2, queries, 2), mesh, [Shard(2)])
        parts = torch.ones(1, 2, 3, 2).requires_grad_()
        k = DTensor.from_local(parts, mesh, [Partial()])
        v = distribute_tensor(torch.randn(1, 2, 3, 2), mesh, [R])
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
        assert (k.relu().full_tensor() == 2).all()


@on_ranks(2)
def test_what_one_rank_keeps_does_not_change_what_it_communicates():
    mesh = mesh_of_two()
    kept = []
    for recorded in (False, True):
        leaf = torch.full((2,), float(mesh.rank)).requires_grad_(recorded)
        for _ in range(3):
            moved = DTensor.from_local(leaf, mesh, [S0]).redistribute(mesh, [R])
            if mesh.rank == 0:
                kept.append(moved)
            assert moved.to_local().tolist() == [0, 0, 1, 1]
