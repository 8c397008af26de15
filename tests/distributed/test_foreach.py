# SPDX-License-Identifier: Apache-2.0
"""Lists of tensors and optimizers: the numbers of one process, in one call on the shards where that can be."""

from unittest import mock

import pytest
import torch
from torch import nn

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.shard.arguments import OperatorError
from hyper_parallel.core.shard.ops import foreach
from hyper_parallel.testing import on_ranks

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
SHAPES = [(5, 6), (7,), (4, 3)]


def draw(*shape, seed=0):
    return (
        torch.rand(
            *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        + 0.5
    )


def mesh_of(count):
    return init_device_mesh("cpu", (count,), mesh_dim_names=("x",))


def lists(count, mesh, layouts):
    """Plain lists, and the same distributed; a pending sum has all of it on the first rank."""
    plain = [
        [draw(*shape, seed=7 * k + i) for i, shape in enumerate(SHAPES)]
        for k in range(count)
    ]
    ours = [
        [
            one(tensor, mesh, layouts[k % len(layouts)][i])
            for i, tensor in enumerate(column)
        ]
        for k, column in enumerate(plain)
    ]
    return plain, ours


def one(tensor, mesh, placement):
    if placement is not P:
        return distribute_tensor(tensor, mesh, [placement])
    first = mesh.get_coordinate()[0] == 0
    return DTensor.from_local(
        tensor.clone() if first else torch.zeros_like(tensor), mesh, [P]
    )


def same(mine, true, told):
    """Without communication where that can be."""
    slices = mine.layout.local_slices(true.shape)
    pair = (
        (mine.full_tensor(), true)
        if mine.layout.is_partial()
        else (mine.to_local(), true[slices])
    )
    torch.testing.assert_close(*pair, msg=lambda m: f"{told}: {m}")


def calls():
    yield "_foreach_add", lambda f, x, y, z: f(x, y, alpha=2)
    yield "_foreach_add", lambda f, x, y, z: f(x, 1.5)
    yield (
        "_foreach_add",
        lambda f, x, y, z: f(x, torch.tensor(2.0, dtype=torch.float64), alpha=3.0),
    )
    yield "_foreach_sub", lambda f, x, y, z: f(x, [1.0, 2.0, 3.0])
    yield "_foreach_mul", lambda f, x, y, z: f(x, y)
    yield "_foreach_div", lambda f, x, y, z: f(x, [1.0, 2.0, 3.0])
    yield "_foreach_pow", lambda f, x, y, z: f(x, 2)
    yield "_foreach_maximum", lambda f, x, y, z: f(x, y)
    yield "_foreach_clamp_min", lambda f, x, y, z: f(x, 0.9)
    yield "_foreach_lerp", lambda f, x, y, z: f(x, y, 0.3)
    yield "_foreach_lerp", lambda f, x, y, z: f(x, y, z)
    yield "_foreach_addcmul", lambda f, x, y, z: f(x, y, z, value=0.5)
    yield "_foreach_addcmul", lambda f, x, y, z: f(x, y, z, [1.0, 2.0, 3.0])
    yield "_foreach_addcdiv", lambda f, x, y, z: f(x, y, z, 0.5)
    for name in [
        name for name in foreach.UNARY.split() if name not in ("acos", "asin")
    ]:
        yield f"_foreach_{name}", lambda f, x, y, z: f(x)


LAYOUTS = {
    "alike": [[S0, R, S1]],
    "different": [[S0, R, S1], [S1, R, S0], [S0, S0, R]],
    "sums": [[P, S0, R], [P, P, R], [R, S0, S1]],
}


@on_ranks(4)
def test_every_name_out_of_place_and_in_place():
    mesh = mesh_of(4)
    for kind, layouts in LAYOUTS.items():
        for number, (name, call) in enumerate(calls()):
            if number > 16 and kind != "alike":
                break
            plain, ours = lists(3, mesh, layouts)
            true, mine = (
                call(getattr(torch, name), *plain),
                call(getattr(torch, name), *ours),
            )
            for found, right in zip(mine, true, strict=True):
                same(found, right, f"{name} {kind}")
            before = [tensor.placements for tensor in ours[0]]
            pointers = [tensor.to_local().data_ptr() for tensor in ours[0]]
            call(getattr(torch, name + "_"), *plain)
            call(getattr(torch, name + "_"), *ours)
            for found, right in zip(ours[0], plain[0], strict=True):
                same(found, right, f"{name}_ {kind}")
            assert [tensor.placements for tensor in ours[0]] == before, name
            assert [tensor.to_local().data_ptr() for tensor in ours[0]] == pointers, (
                name
            )


@on_ranks(4)
def test_norms_and_copies():
    mesh = mesh_of(4)
    for layouts in LAYOUTS.values():
        plain, ours = lists(2, mesh, layouts)
        for order in (1, 2, float("inf")):
            for found, right in zip(
                torch._foreach_norm(ours[0], order),
                torch._foreach_norm(plain[0], order),
                strict=True,
            ):
                torch.testing.assert_close(found.full_tensor(), right)
        for found, right in zip(torch._foreach_max(ours[0]), plain[0], strict=True):
            torch.testing.assert_close(found.full_tensor(), right.max())
        copies = torch._foreach_clone(ours[0])
        torch._foreach_copy_(ours[0], ours[1])
        for target, source, copy, old in zip(*ours, copies, plain[0], strict=True):
            torch.testing.assert_close(target.full_tensor(), source.full_tensor())
            torch.testing.assert_close(copy.full_tensor(), old)
        torch._foreach_zero_(ours[0])
        assert not any(tensor.full_tensor().any() for tensor in ours[0])


@on_ranks(4)
def test_what_lies_alike_is_one_call_without_communication():
    mesh = mesh_of(4)
    _, (x, y, z) = lists(3, mesh, LAYOUTS["alike"])
    with (
        CommunicationLedger(mesh) as ledger,
        mock.patch.object(foreach, "_one", side_effect=AssertionError),
    ):
        torch._foreach_addcdiv_(x, y, z, value=0.1)
        torch._foreach_mul_(x, torch._foreach_sqrt(y))
        torch._foreach_pow(2.0, x)
    assert ledger.counts() == {}
    base = distribute_tensor(draw(8, 3), mesh, [S0])
    with pytest.raises(OperatorError, match="copy"):
        torch._foreach_add_([base[1:3], base], 1.0)


@on_ranks(4)
def test_gradients_of_lists():
    mesh = mesh_of(4)
    plain = [draw(*shape).requires_grad_() for shape in SHAPES]
    ours = [
        distribute_tensor(t, mesh, [p])
        for t, p in zip(plain, LAYOUTS["alike"][0], strict=True)
    ]
    for tensors in (plain, ours):
        sum(
            t.sum() for t in torch._foreach_mul(torch._foreach_exp(tensors), tensors)
        ).backward()
    for mine, true in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), true.grad)


# --- optimizers

SGD = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, SGD, "fused"),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}, "fused"),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}, "fused"),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}, "fused"),
    "RMSprop": (
        torch.optim.RMSprop,
        {"lr": 0.01, "momentum": 0.5, "centered": True},
        "",
    ),
    "Adadelta": (torch.optim.Adadelta, {}, ""),
    "Adamax": (torch.optim.Adamax, {"weight_decay": 0.1}, ""),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}, ""),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}, ""),
    "ASGD": (torch.optim.ASGD, {}, ""),
    "Rprop": (torch.optim.Rprop, {}, ""),
}


class Lion(torch.optim.Optimizer):
    """By single operators in place, as people write their own."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.99), foreach=None):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                one, two = group["betas"]
                p.mul_(1 - group["lr"] * 0.1)
                p.add_(
                    (state["m"] * one + p.grad * (1 - one)).sign_(), alpha=-group["lr"]
                )
                state["m"].lerp_(p.grad, 1 - two)


def losses(params):
    return sum((p.pow(2) * 0.3 + p.sin()).sum() for p in params)


def trained(params, kind, options, steps=3):
    optimizer = kind(params, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        losses(params).backward()
        optimizer.step()
    return optimizer


@on_ranks(4)
def test_optimizers_give_what_one_process_gives():
    mesh = mesh_of(4)
    cases = [
        (kind, {**options, "foreach": way})
        for kind, options, _ in OPTIMIZERS.values()
        for way in (True, False)
    ]
    cases += [
        (kind, {**options, "fused": True})
        for kind, options, fused in OPTIMIZERS.values()
        if fused
    ]
    cases += [
        (Lion, {}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.1), "foreach": False}),
    ]
    cases += [(torch.optim.Adam, {"lr": torch.tensor(0.1), "fused": True})]
    for kind, options in cases:
        plain = [nn.Parameter(draw(*shape, seed=i)) for i, shape in enumerate(SHAPES)]
        ours = [
            nn.Parameter(distribute_tensor(t, mesh, [p]))
            for t, p in zip(plain, LAYOUTS["alike"][0], strict=True)
        ]
        expected, found = trained(plain, kind, options), trained(ours, kind, options)
        for mine, true in zip(ours, plain, strict=True):
            told = f"{kind.__name__} {options}"
            torch.testing.assert_close(
                mine.full_tensor(), true, msg=lambda m, told=told: f"{told}: {m}"
            )
            for name, value in expected.state[true].items():
                state = found.state[mine][name]
                assert isinstance(state, DTensor) == (
                    torch.is_tensor(value) and value.ndim > 0
                ), (told, name)
                state = state.full_tensor() if isinstance(state, DTensor) else state
                if torch.is_tensor(value):
                    torch.testing.assert_close(
                        state,
                        value,
                        msg=lambda m, told=told, name=name: f"{told} {name}: {m}",
                    )
                else:
                    assert state == value, (told, name)


@on_ranks(4)
def test_steps_are_counted_in_the_tensors_of_the_optimizer():
    mesh = mesh_of(4)
    params = [nn.Parameter(distribute_tensor(draw(5, 6), mesh, [S0]))]
    optimizer = trained(params, torch.optim.AdamW, {"fused": True}, steps=1)
    step = optimizer.state[params[0]]["step"]
    losses(params).backward()
    optimizer.step()
    assert optimizer.state[params[0]]["step"] is step
    assert step.item() == 2


@on_ranks(4)
def test_what_was_gathered_before_a_fused_step_is_gathered_again():
    params = [nn.Parameter(distribute_tensor(draw(5, 6), mesh_of(4), [S0]))]
    optimizer = trained(params, torch.optim.AdamW, {"fused": True}, steps=1)
    moment, values = optimizer.state[params[0]]["exp_avg"], params[0].detach()
    before = moment.full_tensor().clone(), values.full_tensor().clone()
    losses(params).backward()
    optimizer.step()
    for tensor, old in zip((moment, values), before, strict=True):
        assert torch.equal(
            tensor.layout.part_of(tensor.full_tensor()), tensor.to_local()
        )
        assert not torch.equal(tensor.full_tensor(), old)


@on_ranks(4)
def test_a_fused_step_of_what_lies_differently_is_told():
    mesh = mesh_of(4)
    _, ours = lists(4, mesh, LAYOUTS["different"])
    steps = [torch.tensor(1.0) for _ in SHAPES]
    options = {
        "amsgrad": False,
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.0,
        "eps": 1e-8,
    }
    with pytest.raises(
        OperatorError, match=r"_fused_adamw_: tensor 0 .* must lie alike.*fused=False"
    ):
        torch._fused_adamw_(*ours, [], steps, **options, maximize=False)


@on_ranks(4)
def test_scaled_gradients_that_are_not_finite_on_one_rank_skip_the_step_on_all():
    mesh = mesh_of(4)
    data, w, b = draw(8, 6), draw(5, 6, seed=1), draw(5, seed=2)
    for broken in (False, True):
        true = [nn.Parameter(t.clone()) for t in (w, b)]
        mine = [
            nn.Parameter(distribute_tensor(t, mesh, [p]))
            for t, p in ((w, Shard(0)), (b, Replicate()))
        ]
        x = data.clone()
        if broken:
            x[0, 0] = float("inf")
        for (weight, bias), rows in (
            (true, x),
            (mine, distribute_tensor(x, mesh, [Replicate()])),
        ):
            optimizer, scaler = (
                torch.optim.SGD([weight, bias], lr=0.1),
                torch.amp.GradScaler("cpu", init_scale=8.0),
            )
            loss = (
                (rows @ weight.T + bias)[:, :1].pow(2).sum()
            )  # only the first rank's rows of the weight are used
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (4.0 if broken else 8.0)
        for one_, many in zip(true, mine, strict=True):
            torch.testing.assert_close(
                many.full_tensor().detach(), one_.detach(), rtol=1e-9, atol=1e-9
            )
            assert torch.isfinite(many.full_tensor()).all()
        assert torch.equal(true[0], w) == broken
    pending = DTensor.from_local(torch.ones(2, dtype=torch.float64), mesh, [Partial()])
    with pytest.raises(OperatorError, match="a reduction is pending"):
        torch._amp_foreach_non_finite_check_and_unscale_(
            [pending], torch.zeros(()), torch.ones(())
        )
