# SPDX-License-Identifier: Apache-2.0
"""``verify`` on MindSpore: a plan that is right, and one in which a sum is left out."""

import numpy as np
import pytest
from mindspore import nn

from hyper_parallel import (
    ColwiseParallel,
    Partial,
    RowwiseParallel,
    init_device_mesh,
    verify,
)
from hyper_parallel.testing import on_ranks


def make():
    return nn.SequentialCell(
        nn.Dense(8, 12), nn.Tanh(), nn.Dense(12, 6), nn.Dense(6, 3)
    )


def squares(model, x):
    y = model(x)
    return (y * y).mean()


@on_ranks(2)
def test_a_step_agrees_and_a_sum_that_is_left_out_is_named():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    batch = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    report = verify(
        make,
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
        mesh,
        batch,
        loss=squares,
    ).check()
    assert len([one for one in report.differences if one.kind == "gradient"]) == 6
    assert report.ledger.counts(backward=False) == {"all_reduce": 1}
    wrong = RowwiseParallel(output_layouts=Partial())
    report = verify(
        make, {"0": ColwiseParallel(), "2": wrong}, mesh, batch, loss=squares
    )
    assert (report.first_module, report.first.place) == ("2", "output")


def nan_squares(model, x):
    return squares(model, x) * float("nan")


@on_ranks(2)
def test_nan_and_a_plan_that_matches_nothing_are_never_ok():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    batch = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    report = verify(
        make,
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
        mesh,
        batch,
        loss=nan_squares,
    )
    assert not report.ok
    assert "nan or infinite on the mesh: the loss" in str(report)
    wrong = RowwiseParallel(output_layouts=Partial())
    report = verify(
        make, {"0": ColwiseParallel(), "2": wrong}, mesh, batch, loss=nan_squares
    )
    assert (report.first_module, report.differs) == ("2", True)
    with pytest.warns(UserWarning, match="nothing was done"):
        report = verify(
            make, {"layers.*": ColwiseParallel()}, mesh, batch, loss=squares
        )
    assert not report.ok
    assert "no module of the model has a name that 'layers.*' matches" in str(report)
