# SPDX-License-Identifier: Apache-2.0
"""Arguments and operators that users of torch.distributed.tensor know, against plain torch."""

import warnings

import pytest
import torch
from torch.distributed import tensor as theirs

import hyper_parallel
from hyper_parallel import DTensor, Partial, Replicate, Shard, distribute_tensor
from hyper_parallel.core.dtensor.interop import mesh_to_native
from hyper_parallel.testing import on_ranks

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def draw(*shape, seed=0):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def mesh_of(*sizes):
    return hyper_parallel.init_device_mesh(
        "cpu", sizes, mesh_dim_names=tuple("xyz"[: len(sizes)])
    )


def close(found, expected, tolerance=1e-12):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# --- redistribution in another dtype


@on_ranks(2)
def test_redistribute_casts_before_it_communicates():
    mesh = mesh_of(2)
    x, w = draw(4, 6), draw(4, 6, seed=1)
    half = torch.bfloat16
    leaf = distribute_tensor(x, mesh, [S0]).requires_grad_()
    pending = leaf.redistribute(mesh, [R], async_op=True, forward_dtype=half)
    made = pending.wait()
    assert made.dtype is half
    close(made.full_tensor(), x.to(half))
    (made * w.to(half).to(torch.float64)[0, 0].item()).sum().backward()
    assert leaf.grad.dtype is torch.float64
    close(leaf.grad.full_tensor(), torch.full_like(x, w.to(half)[0, 0].item()))

    # The gradient is communicated in backward_dtype: it is rounded to it, and summed in it.
    leaf = distribute_tensor(x, mesh, [S0]).requires_grad_()
    coarse = leaf.redistribute(mesh, [R], backward_dtype=half)
    assert coarse.dtype is torch.float64
    local = coarse.to_local(grad_placements=[P])
    (local * w).sum().backward()
    rounded = (w.to(half) + w.to(half)).double()
    close(leaf.grad.full_tensor(), rounded)
    assert not torch.equal(
        rounded, w + w
    )  # the control: it was communicated in bfloat16


@on_ranks(2)
def test_redistribute_in_another_dtype_is_that_of_torch_and_refuses_maxima():
    mesh = mesh_of(2)
    x = draw(4, 6)
    found = distribute_tensor(x, mesh, [S0]).redistribute(
        mesh, [S1], forward_dtype=torch.float32
    )
    native = theirs.distribute_tensor(
        x, mesh_to_native(mesh), [theirs.Shard(0)], src_data_rank=None
    )
    expected = native.redistribute(
        placements=[theirs.Shard(1)], forward_dtype=torch.float32
    )
    close(found.to_local(), expected.to_local())
    with pytest.raises(ValueError, match=r"no sum.*HP224"):
        DTensor.from_local(x, mesh, [Partial("max")]).redistribute(
            mesh, [R], forward_dtype=torch.float32
        )
    product = DTensor.from_local(torch.tensor([2.0]), mesh, [Partial("product")])
    assert product.placements == (Partial("prod"),)
    assert product.full_tensor().item() == 4


# --- operators in place that change the shape


def change(x, name, *args):
    return getattr(x, name)(*args)


CHANGES = [
    ("t_",),
    ("transpose_", 0, 1),
    ("swapaxes_", 0, 1),
    ("swapdims_", -1, 0),
    ("unsqueeze_", 0),
    ("unsqueeze_", -1),
    ("squeeze_",),
    ("squeeze_", 0),
]


@on_ranks(2)
def test_operators_in_place_change_the_shape():
    mesh = mesh_of(2)
    for name, *args in CHANGES:
        for placement in (R, S0, S1, P):
            if placement == P:
                x = DTensor.from_local(draw(4, 6) / 2, mesh, [P])
            else:
                x = distribute_tensor(draw(4, 6), mesh, [placement])
            plain = draw(4, 6)
            leaf, true = x.requires_grad_(), plain.requires_grad_()
            x, plain = leaf * 2, true * 2
            view, plain_view = x[:, :], plain[:, :]
            assert change(x, name, *args) is x
            change(plain, name, *args)
            assert x.shape == plain.shape
            assert x.size() == plain.size()
            assert x.dim() == plain.dim()
            close(x.full_tensor(), plain)
            x.mul_(3)
            plain.mul_(3)
            close(x.full_tensor(), plain)
            close(view.full_tensor(), plain_view)
            (x.sin().sum()).backward()
            plain.sin().sum().backward()
            close(leaf.grad.full_tensor(), true.grad)
    x, plain = distribute_tensor(draw(1, 4, 1), mesh, [S1]), draw(1, 4, 1)
    close(x.squeeze_().full_tensor(), plain.squeeze_())
    x, plain = (
        distribute_tensor(draw(2, 4), mesh, [S0]),
        draw(2, 4),
    )  # a shard of one row keeps that dim
    assert x.squeeze_().shape == plain.squeeze_().shape
    with torch.no_grad():
        parameter = torch.nn.Parameter(distribute_tensor(draw(4, 6), mesh, [S0]))
        parameter.t_()
        close(parameter.full_tensor(), draw(4, 6).t())


@on_ranks(2)
def test_a_change_of_shape_that_would_be_wrong_is_refused():
    mesh = mesh_of(2)
    x = distribute_tensor(draw(4, 4), mesh, [S0])
    copy = x[1:3]
    x.t_()
    with pytest.raises(RuntimeError, match="HP229"):
        copy.full_tensor()
    leaf = distribute_tensor(draw(4, 4), mesh, [S0]).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        leaf.t_()
    assert leaf.placements == (S0,)


# --- a plain tensor of one element is a number


@on_ranks(2)
def test_a_tensor_of_one_element_is_a_number():
    mesh = mesh_of(2)
    x, plain = distribute_tensor(draw(4, 6), mesh, [S0]), draw(4, 6)
    with pytest.warns(UserWarning, match="taken for a number"):
        close((x * torch.tensor([2.0])).full_tensor(), plain * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close((x * torch.tensor(2.0)).full_tensor(), plain * 2)
    with pytest.raises(RuntimeError, match="HP304"):
        x * torch.ones(6)

    weight = torch.nn.Parameter(distribute_tensor(draw(4, 6), mesh, [S0]))
    true = torch.nn.Parameter(draw(4, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for parameter in (weight, true):
            optimizer = torch.optim.Adam(
                [parameter], lr=torch.tensor([0.1]), fused=True
            )
            parameter.square().sum().backward()
            optimizer.step()
    close(weight.full_tensor(), true.detach())
