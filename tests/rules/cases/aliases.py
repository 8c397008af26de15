# SPDX-License-Identifier: Apache-2.0
"""Calls by names that neither torch's database nor the other families use."""

from rules.framework import detached, its, torch
from rules.operators import OpCase


def op(name, call, shapes, sizes=("uneven",), **more):
    return OpCase(name, call, shapes, sizes=sizes, **more)


def drawn(name, call, shapes="ab"):
    """What is random: its plan is made, its values are compared in test_random.py."""
    return op(name, call, shapes, sizes=())


CASES = []
COMPOSITES = [
    op("arccos", lambda x: torch.arccos(x / 3), "ab"),
    op("arcsin", lambda x: torch.arcsin(x / 3), "ab"),
    op("arctan", torch.arctan, "ab"),
    op("arctanh", lambda x: torch.arctanh(x / 3), "ab"),
    op("arcsinh", torch.arcsinh, "ab"),
    op("arccosh", lambda x: torch.arccosh(x + 1), "ab", positive=(0,)),
    op("arctan2", torch.arctan2, "ab ab"),
    op("expit", torch.special.expit, "ab"),
    op("gammaln", torch.special.gammaln, "ab", positive=(0,)),
    op("psi", torch.special.psi, "ab", positive=(0,)),
    op(
        "gammainc",
        lambda x, y: torch.special.gammainc(detached(x), y),
        "ab ab",
        positive=(0, 1),
    ),
    op(
        "gammaincc",
        lambda x, y: torch.special.gammaincc(detached(x), y),
        "ab ab",
        positive=(0, 1),
    ),
    op(
        "multigammaln",
        lambda x: torch.special.multigammaln(x + 2, 2),
        "ab",
        positive=(0,),
    ),
    op("fix", torch.fix, "ab"),
    op("threshold", lambda x: torch.threshold(x, 0.1, 2.0), "ab"),
    op("a number over it, rounded", lambda x: 5.0 // detached(x), "ab"),
    op("a number shifted by it", lambda x: 64 >> x, "ab", ints={0: 5}),
    op("ger", torch.ger, "a b"),
    op("row_stack", lambda x, y: torch.row_stack([x, y]), "ab cb"),
    op(
        "unsafe_split_with_sizes",
        lambda x: torch.unsafe_split_with_sizes(x, [2, 3], 0),
        "ab",
    ),
    op(
        "grid_sampler",
        lambda x, at: torch.grid_sampler(x, at, 0, 0, False),
        "ab33 ac22",
    ),
    op(
        "native_channel_shuffle",
        lambda x: torch.native_channel_shuffle(detached(x), 2),
        "ab33",
    ),
    op(
        "affine_grid_generator",
        lambda x: torch.affine_grid_generator(x, [5, 2, 3, 4], False),
        "a23",
    ),
    op(
        "bicubic, smoothed",
        lambda x: torch.ops.aten._upsample_bicubic2d_aa(x, [4, 4], False, None, None),
        "ab33",
    ),
    op(
        "_convolution",
        lambda x, w: torch._convolution(
            x, w, None, [1], [0], [1], False, [0], 1, False, False, False, False
        ),
        "abc 4b3",
    ),
    op(
        "_log_softmax_backward_data",
        lambda g, x: torch._log_softmax_backward_data(
            detached(g), detached(x), 1, torch.float64
        ),
        "ab ab",
    ),
    op("float of torch", torch.Tensor.float, "ab"),
    drawn("rand_like", torch.rand_like),
    drawn("bernoulli in place", lambda x: its(detached(x)).clone().bernoulli_()),
    drawn("random in place", lambda x: its(detached(x)).clone().random_(5)),
    drawn("feature_dropout", lambda x: torch.feature_dropout(x, 0.5, True)),
]
