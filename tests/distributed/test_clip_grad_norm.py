# SPDX-License-Identifier: Apache-2.0
"""Clipping by the total norm between real ranks: the norm and the gradients of one device, one exchange a group."""

import math

import pytest
import torch
from torch import nn

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
)
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.testing import on_ranks

NORMS = [0.5, 1, 2, 3.0, math.inf]
SHAPES = [
    (7, 5),
    (1, 3),
    (6,),
    (4, 4),
    (),
    (2, 3, 5),
    (0, 2),
    (9,),
]  # uneven, empty on some ranks, empty on all


def gradients(dtype=torch.float64):
    """One a shape, of both signs and different sizes, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(shape, generator=generator, dtype=torch.float64) * (i + 1)).to(
            dtype
        )
        for i, shape in enumerate(SHAPES)
    ]


def distributed(grad, mesh, placements):
    """A parameter with that gradient, cut; plain without placements."""
    if placements is None:
        parameter = nn.Parameter(torch.zeros_like(grad))
        parameter.grad = grad.clone()
        return parameter
    parameter = nn.Parameter(
        distribute_tensor(torch.zeros_like(grad), mesh, placements)
    )
    parameter.grad = distribute_tensor(grad, mesh, placements)
    return parameter


def whole(grad):
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def one_device(grads, max_norm, norm_type):
    """torch's total and clipped gradients, in float64."""
    params = [
        nn.Parameter(torch.zeros_like(grad, dtype=torch.float64))
        for grad in grads
        if grad.numel()
    ]
    for param, grad in zip(
        params, (grad for grad in grads if grad.numel()), strict=True
    ):
        param.grad = grad.double().clone()
    total = nn.utils.clip_grad_norm_(params, max_norm, norm_type)
    return total, [param.grad for param in params]


def check(params, grads, norm_type, *, rtol=1e-12, groups=None, **options):
    """Compares with one device, above and below the norm; ``groups``: how many exchanges that may cost."""
    platform = get_platform()
    truth, _ = one_device(grads, 1.0, norm_type)
    for max_norm in (truth.item() * 2, truth.item() / 3):
        _, clipped = one_device(grads, max_norm, norm_type)
        memory = [
            param.grad.to_local() if isinstance(param, DTensor) else param.grad
            for param in params
        ]
        with CommunicationLedger() as ledger:
            total = platform.clip_grad_norm_(
                iter(params), max_norm, norm_type, **options
            )
        assert type(total) is torch.Tensor
        assert total.shape == ()
        assert total.item() == pytest.approx(truth.item(), rel=rtol)
        assert groups is None or ledger.counts() == (
            {"all_gather_into_tensor": groups} if groups else {}
        )
        after = [
            param.grad.to_local() if isinstance(param, DTensor) else param.grad
            for param in params
        ]
        assert all(
            new is old for new, old in zip(after, memory, strict=True)
        )  # scaled in place
        found = [whole(param.grad).double() for param in params if param.numel()]
        for mine, expected in zip(found, clipped, strict=True):
            torch.testing.assert_close(
                mine, expected, rtol=max(rtol, 2e-6 * (max_norm < truth)), atol=1e-300
            )
    everyone = [None] * platform.get_world_size()
    platform.all_gather_object(everyone, total.item())
    assert len(set(everyone)) == 1  # to the last bit, or replicas would drift apart


PLACED = {
    (2,): [
        [Shard(0)],
        [Shard(0)],
        [Replicate()],
        [Shard(1)],
        [Replicate()],
        [Shard(-1)],
        [Shard(0)],
        None,
    ],
    (4,): [
        [Shard(0)],
        [Shard(0)],
        [Shard(0)],
        [Shard(1)],
        [Replicate()],
        [Shard(2)],
        [Shard(1)],
        None,
    ],
    (2, 2): [
        [Shard(0), Shard(0)],  # nested
        [Shard(0), Replicate()],  # dp
        [Replicate(), Shard(0)],  # tp
        [Shard(1), Shard(0)],  # both
        [Replicate(), Replicate()],
        ("None", ("tp", "dp"), "None"),  # nested the other way
        [Replicate(), Shard(0)],
        None,
    ],
}
NAMES = {1: ("tp",), 2: ("dp", "tp")}
GROUPS = {(2,): 1, (4,): 1, (2, 2): 3}  # all ranks; the mesh, dp and tp


def check_mesh(shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES[len(shape)])
    for norm_type, foreach in [
        *((norm_type, None) for norm_type in NORMS),
        (3.0, True),
        (3.0, False),
        (math.inf, False),
    ]:
        grads = gradients()
        params = [
            distributed(grad, mesh, placed)
            for grad, placed in zip(grads, PLACED[shape], strict=True)
        ]
        check(params, grads, norm_type, groups=GROUPS[shape], foreach=foreach)
    for everywhere in (Replicate(), Shard(0)):
        grads = [grad for grad in gradients() if grad.ndim]
        params = [distributed(grad, mesh, [everywhere] * mesh.ndim) for grad in grads]
        check(params, grads, 2.0, groups=0 if everywhere.is_replicate() else 1)


@on_ranks(2)
def test_on_two_ranks():
    check_mesh((2,))


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@on_ranks(4)
def test_on_four_ranks(shape):
    check_mesh(shape)


@on_ranks(4)
def test_parameters_on_two_meshes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line, column, flat = mesh["tp"], mesh["dp"], init_device_mesh("cpu", (4,))
    wide = init_device_mesh("cpu", (1, 4), mesh_dim_names=("pp", "tp"))
    for norm_type in NORMS:
        grads = gradients()
        params = [
            distributed(grads[0], mesh, [Shard(0), Shard(1)]),
            distributed(grads[1], line, [Shard(1)]),
            distributed(grads[2], column, [Shard(0)]),
            distributed(
                grads[3], mesh, [Replicate(), Shard(0)]
            ),  # the ranks of the line
            distributed(grads[4], line, [Replicate()]),
            distributed(grads[5], flat, [Shard(2)]),  # the ranks of the mesh
            distributed(
                grads[6], wide, [Shard(1), Replicate()]
            ),  # an axis of one rank cuts nothing
            distributed(grads[7], None, None),
        ]
        check(params, grads, norm_type, groups=3)
        # Ranks that meet their groups in another order than the others wait for nobody.
        some = params[:3] if get_platform().get_rank() % 2 else params[2::-1]
        assert get_platform().clip_grad_norm_(some, 1.0, norm_type) > 0


@on_ranks(4)
def test_stages_on_meshes_of_their_own():
    platform = get_platform()
    stage = platform.get_rank() // 2
    mesh = init_device_mesh(
        "cpu", (2,), mesh_dim_names=("tp",)
    )  # ranks 0 and 1, and ranks 2 and 3
    assert mesh.rank_list == (2 * stage, 2 * stage + 1)
    grad = torch.tensor([3.0, 0.0, 4.0]) * (stage + 1)
    parameter = distributed(grad, mesh, [Shard(0)])
    assert platform.clip_grad_norm_(parameter, 1.0).item() == 5.0 * (
        stage + 1
    )  # each its own
    assert whole(parameter.grad).norm().item() == pytest.approx(1.0)


@on_ranks(2)
def test_frozen_parameters_and_missing_gradients():
    platform = get_platform()
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Module()
    grad = torch.tensor([3.0, -4.0, 12.0])
    module.used = distributed(grad, mesh, [Shard(0)])
    module.unused = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    module.frozen = nn.Parameter(
        distribute_tensor(torch.ones(4), mesh, [Shard(0)]), requires_grad=False
    )
    module.plain = nn.Parameter(torch.ones(2), requires_grad=False)
    with CommunicationLedger() as ledger:
        assert platform.clip_grad_norm_(module, 6.5).item() == 13.0
        assert ledger.counts() == {"all_gather_into_tensor": 1}
        assert (
            platform.clip_grad_norm_([module.frozen, module.plain], 1.0).item() == 0.0
        )
        assert ledger.counts() == {"all_gather_into_tensor": 1}
    assert module.unused.grad is None
    assert module.frozen.grad is None
    torch.testing.assert_close(whole(module.used.grad), grad / 2)
    module.frozen.grad = distribute_tensor(
        torch.full((4,), 4.0), mesh, [Shard(0)]
    )  # from before it was frozen
    assert platform.clip_grad_norm_(
        [module.frozen, module.used], 100.0
    ).item() == pytest.approx(math.hypot(8, 6.5))
    # Only one rank has a gradient: the other takes part with nothing, and does not leave it waiting.
    if platform.get_rank() == 1:
        module.frozen.grad = module.used.grad = None
        module.frozen.requires_grad_()
    assert platform.clip_grad_norm_(
        [module.frozen, module.used], 100.0
    ).item() == pytest.approx(math.sqrt(32 + 1.5**2 + 2**2))


@on_ranks(2)
def test_low_precision_is_added_up_in_float32():
    mesh = init_device_mesh("cpu", (2,))
    for dtype, rtol in (
        (torch.bfloat16, 1e-2),
        (torch.float16, 1e-3),
        (torch.float32, 1e-6),
    ):
        grads = gradients(dtype)
        params = [
            distributed(grad, mesh, [Shard(0)] if grad.ndim else None) for grad in grads
        ]
        truth, _ = one_device(grads, 1.0, 2.0)
        total = get_platform().clip_grad_norm_(params, truth.item() / 2)
        assert total.dtype is torch.float32
        assert total.item() == pytest.approx(truth.item(), rel=1e-6)
        assert one_device([whole(p.grad) for p in params], 1.0, 2.0)[
            0
        ].item() == pytest.approx(truth.item() / 2, rel=rtol)
    large = distributed(torch.full((8,), 6e4, dtype=torch.float16), mesh, [Shard(0)])
    assert get_platform().clip_grad_norm_(large, 1.0).item() == pytest.approx(
        6e4 * 8**0.5
    )  # too large for float16
    assert whole(large.grad).double().norm().item() == pytest.approx(1.0, rel=1e-3)
    mixed = [
        distributed(torch.full((4,), 3.0), mesh, [Shard(0)]),
        distributed(torch.full((4,), 4.0).double(), None, None),
    ]
    assert get_platform().clip_grad_norm_(mixed, 1.0).item() == pytest.approx(10.0)


@on_ranks(2)
def test_what_is_not_finite_is_seen_by_every_rank():
    platform = get_platform()
    mesh = init_device_mesh("cpu", (2,))
    for norm_type in NORMS:
        for bad, place in (
            (math.nan, 0),
            (math.nan, 3),
            (math.inf, 0),
            (-math.inf, 3),
        ):  # on either rank
            grad = torch.ones(4)
            grad[place] = bad
            parameter = distributed(grad, mesh, [Shard(0)])
            with pytest.raises(
                RuntimeError,
                match=r"non-finite \((nan|inf)\), so the gradients cannot be clipped",
            ):
                platform.clip_grad_norm_(
                    parameter, 1.0, norm_type, error_if_nonfinite=True
                )
            assert (
                whole(parameter.grad).nan_to_num(7.0, 8.0, 8.0)[place] > 1
            )  # untouched
            total = platform.clip_grad_norm_(parameter, 1.0, norm_type)
            assert math.isnan(total) if math.isnan(bad) else math.isinf(total)


@on_ranks(2)
def test_a_gradient_that_waits_for_a_reduction_is_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

    class Waiting(DTensor):
        """A parameter whose gradient nobody has reduced; ours never is such a one."""

        @property
        def grad(self):
            return DTensor.from_local(torch.ones(3), mesh, [Partial()])

    local = distribute_tensor(torch.ones(3), mesh, [Replicate()])
    waiting = Waiting(local.to_local(), local.layout, (3,))
    with pytest.raises(
        ValueError,
        match=r"shape \(3,\) waits for a reduction, .*dp=2.*call reduce_partial\(\)",
    ):
        get_platform().clip_grad_norm_(waiting, 1.0)
