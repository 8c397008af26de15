# SPDX-License-Identifier: Apache-2.0
"""local_map and register_sharding, against plain torch and against torch's own."""

import pytest
import torch
from torch.distributed import tensor as theirs
from torch.distributed.tensor import experimental

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.dtensor.interop import mesh_to_native
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.shard import OperatorError, local_map, register_sharding
from hyper_parallel.core.shard.ops.operator import OPERATORS
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


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def native(placements):
    return None if placements is None else [_NATIVE[p] for p in placements]


@on_ranks(2)
def test_local_map_runs_on_shards():
    mesh = init_device_mesh("cpu", (2,))
    x, w, weight = draw(4, 6), draw(6, 3, seed=1), draw(4, 3, seed=2)
    plain = [t.clone().requires_grad_() for t in (x, w)]
    expected = torch.mm(*plain)
    (expected * weight).sum().backward()
    # Rows of x: the gradient of w, of which each rank has a copy, comes in parts. A cut contraction: the result does.
    for out, ins, grads in (
        ([S0], ([S0], [R]), ([S0], [P])),
        ([P], ([S1], [S0]), None),
        ([P], ([S1], [S0]), ([S1], [S0])),
    ):
        mapped = local_map(torch.mm, out, ins, grads, redistribute_inputs=True)
        leaves = [distribute_tensor(t, mesh, [S0]).requires_grad_() for t in (x, w)]
        found = mapped(*leaves)
        assert found.placements == tuple(out)
        close(found.full_tensor(), expected.detach())
        (found.full_tensor() * weight).sum().backward()
        for leaf, true in zip(leaves, plain, strict=True):
            close(leaf.grad.full_tensor(), true.grad)
    close(mapped(x, w), x @ w)  # plain tensors alone: the function itself


@on_ranks(2)
def test_local_map_is_that_of_torch():
    mesh = init_device_mesh("cpu", (2,))

    def both(pair, scale, plain):
        return {
            "sum": pair[0] * scale + plain,
            "number": 3,
            "second": pair[1].sum(0, keepdim=True),
        }

    x, y = draw(4, 6), draw(4, 6, seed=1)
    plain = draw(4, 3, seed=2)
    outs, ins = ([S1], None, [P]), ([S1], [S0], None, [S1])
    mine = [distribute_tensor(x, mesh, [S1]), distribute_tensor(y, mesh, [S0])]
    found = local_map(both, outs, ins)(mine, 2.0, plain)
    put = [
        theirs.DTensor.from_local(t.to_local(), mesh_to_native(mesh), native(p))
        for t, p in zip(mine, ([S1], [S0]), strict=True)
    ]
    expected = experimental.local_map(
        both, tuple(map(native, outs)), tuple(map(native, ins))
    )(put, 2.0, plain)
    assert found["number"] == expected["number"] == 3
    for name in ("sum", "second"):
        assert found[name].shape == expected[name].shape
        close(found[name].to_local(), expected[name].to_local())


@on_ranks(4)
def test_local_map_on_two_meshes_and_uneven_shards():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    x, y = draw(3, 4), draw(4, 5, seed=1)
    mapped = local_map(torch.mm, [S0], ([S0], [R]), device_mesh=mesh["y"])
    found = mapped(
        distribute_tensor(x, mesh["y"], [S0]), distribute_tensor(y, mesh["x"], [R])
    )
    assert found.device_mesh == mesh["y"]
    assert found.shape == (3, 5)
    close(found.full_tensor(), x @ y)


@on_ranks(2)
def test_local_map_refuses_what_does_not_fit():
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(draw(4, 6), mesh, [S0])

    @local_map(out_placements=[S1], in_placements=([S1],))
    def twice(tensor):
        return tensor * 2

    for call, error in (
        (lambda: twice(x), "redistribute_inputs=True.*HP317"),
        (lambda: twice(x, x), "for 2 arguments.*HP317"),
        (lambda: local_map(torch.neg, [S0], (None,))(x), "None for it.*HP317"),
        (
            lambda: local_map(torch.neg, [S0], ([S0],), (None,))(x),
            "in_grad_placements must say.*HP317",
        ),
        (
            lambda: local_map(torch.neg, ([S0], [S0]), ([S0],))(x),
            "1 results, got 2.*HP308",
        ),
    ):
        with pytest.raises(ValueError, match=error):
            call()
    with pytest.raises(TypeError, match="HP317"):
        local_map(torch.mul, [S0], ([S0], [R]))(x, 2)
    with pytest.raises(TypeError, match="HP308"):
        local_map(lambda _: 3, [S0], ([S0],))(x)


@on_ranks(4)
def test_registered_shardings_are_chosen_by_their_cost():
    library = torch.library.Library("hyper_parallel_tests", "FRAGMENT")
    library.define("row_scale(Tensor x, Tensor w, int dim) -> (Tensor, Tensor)")
    library.impl(
        "row_scale", lambda x, w, dim: (x * w, x.sum(dim)), "CompositeImplicitAutograd"
    )
    row_scale = torch.ops.hyper_parallel_tests.row_scale

    @register_sharding(row_scale.default)
    def shardings(x, w, dim):
        assert (x.ndim, w.ndim) == (2, 1)
        return [
            ([S0, S0 if dim == 1 else P], [S0, R, None]),
            ([S1, P if dim == 1 else S0], [S1, S0, None]),
        ]

    try:
        mesh = init_device_mesh("cpu", (2, 2))
        for dim in (0, 1):
            for xs, ws in (
                ([S0, S0], [R, R]),
                ([S1, S0], [S0, R]),
                ([R, S1], [R, R]),
                ([R, R], [S0, S0]),
            ):
                plain = [draw(4, 8).requires_grad_(), draw(8, seed=1).requires_grad_()]
                mine = [
                    distribute_tensor(t.detach(), mesh, p)
                    for t, p in zip(plain, (xs, ws), strict=True)
                ]
                mine = [t.requires_grad_() for t in mine]
                with CommunicationLedger(mesh) as ledger:
                    found = row_scale(*mine, dim)
                assert ledger.counts() == {} or ws == [S0, S0]
                expected = row_scale(*plain, dim)
                for one, true in zip(found, expected, strict=True):
                    close(one.full_tensor(), true)
                sum((one.full_tensor() ** 2).sum() for one in found).backward()
                sum((one**2).sum() for one in expected).backward()
                for one, true in zip(mine, plain, strict=True):
                    close(one.grad.full_tensor(), true.grad)
        with pytest.raises(ValueError, match="HP321"):
            register_sharding(row_scale.default)(lambda *_: [([S0, S0], [S0])])
            row_scale(*mine, 0)
        with pytest.raises(OperatorError, match="HP304"):
            row_scale(mine[0], draw(8), 0)
    finally:
        OPERATORS.pop("hyper_parallel_tests::row_scale", None)
    with pytest.raises(ValueError, match="HP321"):
        register_sharding(torch.Tensor.add_)(shardings)
    assert isinstance(mine[0], DTensor)
