# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A006 - operands have the names that torch gives them
"""Controls: what is broken on purpose in a rule or a local call of convolutions, windows and signals is found."""

import pytest
from rules.cases import convolution, native_norms, signals, windows
from rules.faults import is_found, itself, linear, local, rewritten, unmarked
from rules.framework import F, torch
from rules.outcomes import found_here

from hyper_parallel import DTensor, Shard
from hyper_parallel.core.dtensor.device_mesh import init_device_mesh
from hyper_parallel.testing import run_ranks

CASES = {
    case.name: case
    for family in (convolution, native_norms, signals, windows)
    for case in family.CASES
}


BROKEN = [  # the case, the operator, what is broken in it, why that is wrong
    ("conv2d", "conv2d", unmarked("conv2d", "+(g o)"), "the plus is lost"),
    ("conv2d", "conv2d", linear("conv2d", (0, 1)), "linear in both together"),
    ("conv2d grouped", "conv2d", local(itself), "as many groups in fewer channels"),
    (
        "conv2d of three groups",
        "conv2d",
        rewritten("conv2d", "(g i)", "(i g)"),
        "channels of all groups",
    ),
    (
        "conv_transpose2d grouped",
        "conv_transpose2d",
        local(itself),
        "as many groups in fewer channels",
    ),
    (
        "avg_pool1d",
        "avg_pool1d",
        unmarked("avg_pool1d"),
        "windows that reach into the next piece",
    ),
    ("max_pool2d", "max_pool2d", linear("max_pool2d", (0,)), "not linear"),
    ("lp_pool2d", "lp_pool2d", linear("lp_pool2d", (0,)), "not linear"),
    (
        "interpolate bicubic",
        "interpolate",
        unmarked("interpolate"),
        "the whole mark is lost",
    ),
    ("im2col", "im2col", rewritten("im2col", "(c k!)", "(k c)"), "channels inside"),
    (
        "pixel_shuffle",
        "pixel_shuffle",
        local(lambda here, input, **_: input.reshape(here.shape())),
        "in another order",
    ),
    (
        "grid_sample",
        "grid_sample",
        linear("grid_sample", (1,)),
        "not linear in the grid",
    ),
    (
        "grid_sample",
        "grid_sample",
        unmarked("grid_sample", "s0!"),
        "the whole mark is lost",
    ),
    ("rfft", "fft_rfft", unmarked("fft_rfft"), "the whole mark is lost"),
    ("fftshift", "fft_fftshift", unmarked("fft_fftshift"), "the whole mark is lost"),
    ("stft", "stft", linear("stft", (0, 1)), "linear in both together"),
    ("istft", "istft", linear("istft", (1,)), "not linear in the window"),
    (
        "native_group_norm",
        "native_group_norm",
        local(itself),
        "as many groups in fewer channels",
    ),
]
HERE = found_here(BROKEN)


@pytest.mark.parametrize(
    ("case", "name", "fault", "why"), HERE, ids=[f"{c}: {w}" for c, _, _, w in HERE]
)
def test_control_what_is_broken_is_found(case, name, fault, why):
    is_found(CASES[case], name, fault, RuntimeError, ValueError)


def resized_on_rank():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    part = torch.ones((1, 2, 4, 4))
    images = DTensor.from_local(part, mesh, [Shard(0)])
    return [
        tuple(F.interpolate(images, scale_factor=factor).shape)
        for factor in (2.0, 0.5, 1.5, 2.0)
    ]


def test_a_plan_for_one_scale_is_not_taken_for_another():
    sizes = [(2, 2, n, n) for n in (8, 2, 6, 8)]
    assert run_ranks(resized_on_rank, 2) == [sizes] * 2
