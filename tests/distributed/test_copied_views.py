# SPDX-License-Identifier: Apache-2.0
"""Views that had to be copies follow their base, as views do; changing them is refused."""

import pytest
import torch

from hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.core.shard import OperatorError
from hyper_parallel.testing import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)

VIEWS = {
    "slice": lambda x: x[1:3],
    "slice of a slice": lambda x: x[1:][:, 1:],
    "narrow": lambda x: x.narrow(0, 1, 2),
    "select": lambda x: x[1],
    "view": lambda x: x.view(-1),
    "diagonal": lambda x: x.diagonal(),
    "transposed view": lambda x: x[1:].t(),
    "detached": lambda x: x[1:3].detach(),
}
CHANGES = {
    "add_": lambda x: x.add_(10),
    "mul_": lambda x: x.mul_(3),
    "copy_": lambda x: x.copy_(x.detach() * 2),
    "relu_": torch.relu_,
    "an index": lambda x: x.__setitem__((slice(1, 2),), 7.0),
    "through a true view": lambda x: x.t().mul_(2),
}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def values():
    return torch.arange(16, dtype=torch.float64).view(4, 4) - 6


@on_ranks(2)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("place", [S0, S1, R])
def test_a_view_has_the_changes_of_its_base(view, place):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    for name, change in CHANGES.items():
        results = []
        for x in (
            values().requires_grad_(),
            distribute_tensor(values(), mesh, [place]).requires_grad_(),
        ):
            y = x * 1
            taken = VIEWS[view](y)
            before = whole(taken).detach().clone()
            change(y)
            with torch.no_grad():
                whole(
                    taken
                ).sum()  # what is looked at meanwhile does not take its graph away
            loss = (taken * taken).sum()
            assert taken.requires_grad == (view != "detached")
            if view != "detached":
                loss.backward()
            results.append(
                (
                    before,
                    whole(taken).detach(),
                    whole(loss).detach(),
                    None if x.grad is None else whole(x.grad),
                )
            )
        for mine, true in zip(*reversed(results), strict=True):
            if true is not None:
                torch.testing.assert_close(
                    mine, true, msg=lambda m, name=name: f"{name}: {m}"
                )


@on_ranks(2)
def test_one_of_several_views_has_the_changes_of_its_base():
    """With a graph torch itself refuses that."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    for take in (
        lambda x: x.split([1, 3])[1],
        lambda x: x.unbind(0)[2],
        lambda x: x.chunk(3)[1],
    ):
        taken = []
        for base in (values(), distribute_tensor(values(), mesh, [S0])):
            taken.append(take(base))
            base.mul_(2)
        torch.testing.assert_close(taken[1].full_tensor(), taken[0])


@on_ranks(2)
def test_what_makes_the_base_require_a_gradient_makes_the_view():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    base, weight = (
        distribute_tensor(t, mesh, [S0]) for t in (torch.arange(4.0), torch.ones(4))
    )
    weight.requires_grad_()
    taken = base[1:3]
    base.mul_(weight)
    assert taken.requires_grad
    taken.sum().backward()
    assert weight.grad.full_tensor().tolist() == [0, 1, 2, 0]


@on_ranks(2)
def test_what_may_be_a_view_is_refused_after_a_change():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    base = distribute_tensor(values(), mesh, [S1])
    taken, kept = base.reshape(-1), base.reshape(-1).clone()
    base.mul_(2)
    with pytest.raises(
        RuntimeError,
        match="reshape: the tensor that it was taken from has been changed",
    ) as error:
        taken + 1
    assert error.value.args
    torch.testing.assert_close(kept.full_tensor(), values().reshape(-1))


@on_ranks(2)
def test_a_copy_on_one_device_stays_one():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    base = distribute_tensor(torch.arange(4.0), mesh, [S0])
    taken, added = base[[1, 2]], base + 1
    base.add_(10)
    taken.add_(1)  # nothing is lost by that
    assert taken.full_tensor().tolist() == [2, 3]
    assert added.full_tensor().tolist() == [1, 2, 3, 4]


@on_ranks(2)
def test_changing_the_copy_is_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    base = distribute_tensor(torch.arange(4.0), mesh, [S0])
    for taken in (base[1:3], base[1:3][:1], base[1:3].detach()):
        with pytest.raises(OperatorError, match="it is a copy"):
            taken.add_(1)


SHAPED = {
    "reshape": lambda x: x.t().reshape(-1),
    "flatten": lambda x: x.transpose(0, 1).flatten(),
    "ravel": lambda x: x[:, :1].ravel(),
    "contiguous": lambda x: x.t().contiguous(),
    "a contiguous one": lambda x: x.reshape(-1),
}


@on_ranks(2)
@pytest.mark.parametrize("name", SHAPED)
@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (3, 4), (2, 1)])
def test_what_is_a_copy_on_one_device_is_a_copy_of_a_shard(name, shape):
    """A shard of one row can be reshaped without a copy where the whole cannot: its base must not change."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    for place in (S0, S1, R):
        start = torch.arange(shape[0] * shape[1], dtype=torch.float64).view(shape)
        plain, spread = start.clone(), distribute_tensor(start, mesh, [place])
        SHAPED[name](plain).add_(10)
        try:
            SHAPED[name](spread).add_(10)
        except OperatorError:
            torch.testing.assert_close(
                spread.full_tensor(), start
            )  # the copy is of moved data: refused
            continue
        torch.testing.assert_close(spread.full_tensor(), plain)


@on_ranks(2)
def test_what_torch_returns_itself_is_returned_itself():
    """So that a hook on it is a hook on the tensor."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    calls = [
        lambda x: x.flatten(),
        lambda x: x.flatten(0, 0),
        lambda x: x.sum_to_size(x.shape),
        lambda x: torch.broadcast_tensors(x)[0],
        lambda x: x.to_dense(),
        lambda x: x.contiguous(),
    ]
    for place in (S0, R):
        for call in calls:
            plain = torch.ones(3, dtype=torch.float64)
            spread = distribute_tensor(plain, mesh, [place])
            assert call(plain) is plain
            assert call(spread) is spread
            assert call(spread) is spread  # by the short way
        matrix = distribute_tensor(torch.ones(3, 2), mesh, [place])
        assert matrix.flatten() is not matrix
        leaf = spread.detach().clone().requires_grad_()
        seen = []
        leaf.flatten().register_hook(seen.append)
        (leaf * 2 + leaf.flatten()).sum().backward()
        torch.testing.assert_close(
            [g.full_tensor() for g in seen],
            [torch.full((3,), 3.0, dtype=torch.float64)],
        )


@on_ranks(2)
def test_strides_are_those_of_one_device():
    """Also of a shard of one row, which is contiguous in either order."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    plain = torch.arange(8.0).view(2, 4)
    for place in (S0, S1, R):
        spread = distribute_tensor(plain, mesh, [place])
        for change in (
            lambda x: x,
            lambda x: x.t(),
            lambda x: x.t().contiguous(),
            lambda x: x.unsqueeze(1),
        ):
            assert change(spread).stride() == change(plain).stride()
