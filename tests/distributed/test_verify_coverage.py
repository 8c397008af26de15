# SPDX-License-Identifier: Apache-2.0
"""``verify`` never vouches for what it did not see: nan, plans that do nothing, gradients that nobody has."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - everyone's name for it

from hyper_parallel import (
    ColwiseParallel,
    Partial,
    RowwiseParallel,
    init_device_mesh,
    verify,
)
from hyper_parallel.testing import RankError, on_ranks

RIGHT = {"up": ColwiseParallel(), "down": RowwiseParallel()}
WRONG = {
    "up": ColwiseParallel(),
    "down": RowwiseParallel(output_layouts=Partial()),
}  # nobody adds the parts up


class Mlp(nn.Module):
    """Its output times a factor."""

    factor = 1.0

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) * self.factor


class Nan(Mlp):
    factor = math.nan


class Infinite(Mlp):
    factor = math.inf


class NanInside(Mlp):
    def __init__(self):
        super().__init__()
        self.down.bias.data.fill_(math.nan)


class NanGradient(Mlp):
    """Its output is finite; the gradient of a root at zero is not."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return super().forward(x) + self.scale.sqrt()


class Frozen(Mlp):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


class InFloat32(Mlp):
    """As many models of transformers do it with norms and losses."""

    def __init__(self):
        super().__init__()
        self.double()

    def forward(self, x):
        hidden = torch.relu(self.up(x.double()))
        return (
            F.linear(
                hidden.float(), self.down.weight.float(), self.down.bias.float()
            ).double()
            * self.factor
        )


class Raising(Mlp):
    def forward(self, x):
        x = self.up(x)
        return x.view(3, 5)  # the line that is to blame


def batch():
    return (torch.randn(4, 8, generator=torch.Generator().manual_seed(1)),)


def squares(model, x):
    return model(x).square().mean()


def report_of(make_model, plan, loss=squares, **options):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return verify(make_model, plan, mesh, batch, loss=loss, **options)


@on_ranks(2)
def test_numbers_that_are_not_finite_are_never_ok():
    assert report_of(Mlp, RIGHT).check().ok
    for model, named in (
        (Nan, "the loss"),
        (Infinite, "the loss"),
        (NanInside, "the loss"),
        (NanGradient, "the gradients of scale"),
    ):
        report = report_of(model, RIGHT)
        assert not report.ok, model
        assert not report.differs, report
        with pytest.raises(AssertionError, match="the plan was not tested"):
            report.check()
        text = str(report)
        assert text.startswith(
            "one step on mesh tp=2 was NOT SHOWN to be that of one process"
        ), text
        assert "nan or infinite on one process" in text
        assert "nan or infinite on the mesh" in text
        assert named in text, text
        assert "loss        " in text, text
    assert "first in module 'down'" in str(report_of(NanInside, RIGHT))
    assert "first in the model's own code" in str(report_of(Nan, RIGHT))


@on_ranks(2)
def test_a_wrong_plan_beside_nan_is_wrong():
    report = report_of(Nan, WRONG)
    assert report.first_module == "down"
    assert str(report).startswith("one step on mesh tp=2 is NOT that of one process")
    with pytest.raises(AssertionError, match="the steps part"):
        report.check()


@on_ranks(2)
def test_a_nan_of_one_run_alone_is_a_difference():
    class OnMesh(nn.Module):
        def forward(self, x):
            return x * math.nan

    def put(model, mesh):
        model.add_module("after", OnMesh())
        model.register_forward_hook(lambda module, args, output: module.after(output))

    report = report_of(Mlp, put)
    assert report.differs
    assert "nan or infinite on the mesh" in str(report)
    assert "nan or infinite on one process" not in str(report)


@on_ranks(2)
def test_a_plan_that_does_nothing_is_not_ok():
    with pytest.warns(UserWarning, match="nothing was done"):
        report = report_of(Mlp, {"layers.*.up": ColwiseParallel()})
    assert not report.ok
    assert "no module of the model has a name that 'layers.*.up' matches" in str(report)
    report = report_of(Mlp, lambda model, mesh: model)
    assert not report.ok
    assert "nothing was distributed" in str(report)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    with pytest.warns(UserWarning, match="nothing was done"):
        report = verify(Mlp, {"nobody": ColwiseParallel()}, mesh, batch, loss=squares)
    assert "no module of the model has a name" in str(report)
    assert verify(
        Mlp, None, mesh, batch, loss=squares
    ).ok  # data parallel alone is a plan


def untrained(model, x):
    return model(x).square().mean() + torch.ones(1, requires_grad=True).sum()


@on_ranks(2)
def test_gradients_that_nobody_has_are_not_compared():
    report = report_of(Frozen, RIGHT, untrained)
    assert not report.ok
    assert "no gradient was compared" in str(report)


@on_ranks(2)
def test_float32_inside_of_float64_is_hinted_at():
    def put(model, mesh):
        model.factor = 1.0 + 1e-7  # what another order of sums does to a float32

    hint = "if the model computes in float32 inside, give tolerance=1e-06"
    report = report_of(InFloat32, put)
    assert report.differs
    assert hint in str(report)
    report = report_of(InFloat32, put, tolerance=1e-6)
    assert not report.differs

    def put_wrong(model, mesh):
        model.factor = 1.01

    assert "tolerance=" not in str(report_of(InFloat32, put_wrong))


@on_ranks(2)
def test_the_line_of_a_model_that_raises_is_told():
    with pytest.raises(
        RuntimeError, match=r"test_verify_coverage\.py:\d+ `return x\.view\(3, 5\)"
    ) as raised:
        report_of(Raising, RIGHT)
    assert "raised RuntimeError in its own code" in str(raised.value)

    def put(model, mesh):
        model.up.register_forward_hook(lambda module, args, output: output.view(3, 5))

    assert "raised at test_verify_coverage.py:" in str(report_of(Mlp, put))


def test_the_line_of_a_model_that_raises_is_told_from_a_script():
    with pytest.raises(
        RankError, match=r"at test_verify_coverage\.py:\d+ `return x\.view\(3, 5\)"
    ):
        verify(Raising, RIGHT, "tp=2", batch, loss=squares)
