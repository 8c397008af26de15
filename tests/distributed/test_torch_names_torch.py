# SPDX-License-Identifier: Apache-2.0
"""Names and arguments that users of torch.distributed.tensor know: the same programs, there and here, and plain."""

import pytest
import torch
from torch.distributed import tensor as theirs

import hyper_parallel
from hyper_parallel import DTensor, Partial, Replicate, Shard, distribute_tensor
from hyper_parallel.core.dtensor import dtensor as ours
from hyper_parallel.core.dtensor.interop import mesh_to_native
from hyper_parallel.testing import on_ranks

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
_NATIVE = {
    R: theirs.Replicate(),
    S0: theirs.Shard(0),
    S1: theirs.Shard(1),
    P: theirs.Partial(),
}


def draw(*shape, seed=0):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def mesh_of(*sizes):
    return hyper_parallel.init_device_mesh(
        "cpu", sizes, mesh_dim_names=tuple("xyz"[: len(sizes)])
    )


def both(mesh):
    """(module with the names, mesh, placements by ours) of this library and of torch."""
    yield DTensor, mesh, lambda placements: placements
    yield (
        theirs.DTensor,
        mesh_to_native(mesh),
        lambda placements: [_NATIVE[p] for p in placements],
    )


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# --- gradients at the boundary to plain tensors


@on_ranks(2)
def test_to_local_takes_gradients_in_parts():
    mesh = mesh_of(2)
    x, w = draw(4, 3), draw(4, 3, seed=1)
    for cls, native_mesh, named in both(mesh):
        # Each rank uses its rows of the copy, so that its gradient is a part of the whole one.
        leaf = x.clone().requires_grad_()
        copy = cls.from_local(leaf, native_mesh, named([R])) * 1
        local = copy.to_local(grad_placements=named([P]))
        rows = slice(2 * mesh.rank, 2 * mesh.rank + 2)
        (local[rows] * w[rows]).sum().backward()
        close(leaf.grad, w)
        # The default takes every rank's gradient for the whole one: the control.
        leaf = x.clone().requires_grad_()
        (cls.from_local(leaf, native_mesh, named([R])) * 1).to_local()[
            rows
        ].sum().backward()
        assert leaf.grad[rows].eq(1).all()
        assert leaf.grad.sum() == 6
        # A shard has the gradient of a shard, and a part of a sum the whole one.
        for placement, size in ((S0, 2), (S1, 3)):
            leaf = x[:size].clone().requires_grad_()
            local = (
                cls.from_local(leaf, native_mesh, named([placement])) * 2
            ).to_local(grad_placements=named([placement]))
            local.sum().backward()
            close(leaf.grad, torch.full_like(leaf, 2))
        for given, expected in ((None, 1), ([R], 1), ([P], 2)):
            leaf = x.clone().requires_grad_()
            part = cls.from_local(leaf, native_mesh, named([P]))
            part.to_local(
                grad_placements=None if given is None else named(given)
            ).sum().backward()
            close(leaf.grad, torch.full_like(leaf, expected))


@on_ranks(4)
def test_full_tensor_takes_gradients_in_parts_on_some_axes():
    mesh = mesh_of(2, 2)
    x, w = draw(4, 6), draw(4, 6, seed=1)
    rows = slice(2 * mesh.get_local_rank("y"), 2 * mesh.get_local_rank("y") + 2)
    for placements in ([S0, S1], [R, S0], [S1, R], [R, R]):
        leaf = distribute_tensor(x, mesh, placements).requires_grad_()
        full = (leaf * 1).full_tensor(grad_placements=[R, P])
        close(full, x)
        (full[rows] * w[rows]).sum().backward()
        close(whole(leaf.grad), w)


@on_ranks(2)
def test_full_tensor_takes_gradients_in_parts_as_torch_does():
    mesh = mesh_of(2)
    x, w = draw(4, 6), draw(4, 6, seed=1)
    rows = slice(2 * mesh.rank, 2 * mesh.rank + 2)
    for cls, native_mesh, named in both(mesh):
        leaf = x[rows].clone().requires_grad_()
        full = cls.from_local(leaf, native_mesh, named([S0])).full_tensor(
            grad_placements=named([P])
        )
        (full[rows] * w[rows]).sum().backward()
        close(leaf.grad, w[rows])


@on_ranks(2)
def test_from_local_gives_its_gradient_in_the_placements_asked_for():
    mesh = mesh_of(2)
    x, w = draw(4, 3), draw(4, 3, seed=1)
    for cls, native_mesh, named in both(mesh):
        for placement, given, is_part in (
            (R, R, False),
            (R, P, True),
            (P, R, False),
            (P, P, True),
            (S0, S0, False),
        ):
            leaf = x.clone().requires_grad_()
            made = cls.from_local(
                leaf, native_mesh, named([placement]), grad_placements=named([given])
            )
            weight = w if placement != S0 else torch.cat([w, w])
            weight = cls.from_local(weight, native_mesh, named([R]))
            loss = (made * weight).sum()
            whole(loss).backward()
            grad = leaf.grad.clone()
            if is_part:  # which parts the ranks have is nobody's business, but their sum is the gradient
                torch.distributed.all_reduce(grad)
            close(grad, w)


@on_ranks(2)
def test_a_gradient_in_parts_is_exact_in_the_second_order():
    mesh = mesh_of(2)
    x = draw(4, 3)

    def second(tensor, local_of):
        [grad] = torch.autograd.grad(
            local_of(tensor * tensor), tensor, create_graph=True
        )
        return grad

    plain = x.clone().requires_grad_()
    expected = second(plain, lambda y: y.pow(2).sum())
    expected.pow(2).sum().backward()
    leaf = distribute_tensor(x, mesh).requires_grad_()
    rows = slice(2 * mesh.rank, 2 * mesh.rank + 2)
    found = second(leaf, lambda y: y.to_local(grad_placements=[P])[rows].pow(2).sum())
    close(found.full_tensor(), expected.detach())
    found.pow(2).sum().backward()
    close(leaf.grad.full_tensor(), plain.grad)


@on_ranks(2)
def test_gradients_that_have_no_meaning_are_refused():
    mesh = mesh_of(2)
    x = distribute_tensor(draw(4, 3), mesh, [S0])
    for call in (
        lambda: x.to_local(grad_placements=[R]),
        lambda: x.to_local(grad_placements=[S1]),
        lambda: x.full_tensor(grad_placements=[S0]),
        lambda: x.redistribute(mesh, [R]).to_local(grad_placements=[Partial("max")]),
        lambda: DTensor.from_local(
            draw(4), mesh, [Partial("max")], grad_placements=[R]
        ),
        lambda: DTensor.from_local(draw(4), mesh, [S0], grad_placements=[P]),
    ):
        with pytest.raises(ValueError, match="HP232"):
            call()


@on_ranks(2)
def test_from_local_takes_the_stride_of_the_whole():
    mesh = mesh_of(2)
    shard = draw(2, 3)
    assert DTensor.from_local(shard, mesh, [S0], shape=(4, 3), stride=(3, 1)).shape == (
        4,
        3,
    )
    assert DTensor.from_local(
        shard.t(), mesh, [S1], shape=(3, 4), stride=(1, 3)
    ).stride() == (1, 3)
    with pytest.raises(ValueError, match="HP233"):
        DTensor.from_local(shard, mesh, [S0], shape=(4, 3), stride=(1, 4))


# --- what may be left out


@on_ranks(2)
def test_without_placements_every_rank_has_all():
    mesh = mesh_of(2)
    x = draw(4, 3)
    with mesh:
        made = [distribute_tensor(x), DTensor.from_local(x)]
    made += [
        distribute_tensor(x, mesh),
        DTensor.from_local(x, mesh),
        distribute_tensor(x, device_mesh=mesh),
    ]
    for tensor in made:
        assert tensor.placements == (R,)
        close(tensor.to_local(), x)


@on_ranks(2)
def test_factories_take_sizes_one_by_one():
    mesh = mesh_of(2)
    native = mesh_to_native(mesh)
    for name in ("zeros", "ones", "empty", "rand", "randn"):
        make, native_make = getattr(ours, name), getattr(theirs, name)
        for sizes, shape in (
            ((4, 3), (4, 3)),
            (((4, 3),), (4, 3)),
            (([4, 3],), (4, 3)),
            ((4,), (4,)),
            ((), ()),
        ):
            torch.manual_seed(3)
            options = {
                "dtype": torch.float64,
                "requires_grad": True,
                "layout": torch.strided,
            }
            found = make(*sizes, device_mesh=mesh, placements=[R], **options)
            assert found.requires_grad
            assert found.is_leaf
            assert found.dtype is torch.float64
            assert found.shape == shape
            if name in ("zeros", "ones"):
                expected = native_make(
                    *sizes,
                    device_mesh=native,
                    placements=[theirs.Replicate()],
                    **options,
                )
                close(found.full_tensor(), expected.full_tensor())
        assert make(4, 3, device_mesh=mesh).placements == (R,)
        assert make(4, 3, device_mesh=mesh, placements=[S0]).to_local().shape == (2, 3)
        assert make((4, 3), mesh, [S0]).to_local().shape == (2, 3)
        assert make(size=4, device_mesh=mesh).shape == (4,)
        with pytest.raises(ValueError, match=r"layout must be torch\.strided.*HP222"):
            make(4, device_mesh=mesh, layout=torch.sparse_coo)
    assert ours.full((4, 3), 7.0, device_mesh=mesh, requires_grad=True).requires_grad
    with mesh:
        assert ours.zeros(4, 3).shape == (4, 3)


# --- strides


@on_ranks(2)
def test_channels_last_stays_channels_last():
    mesh = mesh_of(2)
    image = draw(4, 6, 5, 5).to(memory_format=torch.channels_last)
    weight = draw(8, 6, 3, 3, seed=1).to(memory_format=torch.channels_last)
    expected = torch.nn.functional.conv2d(image, weight)
    for placement in (R, S0, S1, Shard(2)):
        x = distribute_tensor(image, mesh, [placement])
        assert x.stride() == image.stride()
        assert x.stride(1) == 1
        assert x.dim_order() == image.dim_order()
        assert x.to_local().is_contiguous(memory_format=torch.channels_last)
        close(x.full_tensor(), image)
        made = torch.nn.functional.conv2d(x, distribute_tensor(weight, mesh))
        close(made.full_tensor(), expected)
        if placement in (R, S0):
            assert made.stride() == expected.stride()
    transposed = distribute_tensor(draw(4, 6).t(), mesh, [S0])
    assert transposed.stride() == (4, 1)  # only formats that have a name are kept
    assert distribute_tensor(draw(4, 6), mesh, [S0]).t().stride() == (1, 6)
    assert distribute_tensor(draw(4, 6), mesh, [S1]).stride() == (6, 1)  # the control
