# SPDX-License-Identifier: Apache-2.0
"""Calls that draw random numbers: which choices their rules have. tests/distributed/test_random.py has the numbers."""

from rules.framework import F, torch
from rules.operators import OpCase

R2 = "...[-2] ...[-1]"


def op(name, call, shapes, shards, carries, **more):
    return OpCase(name, call, shapes, shards, carries, sizes=(), **more)


CASES = [
    op("dropout", F.dropout, "ab", R2, 2),
    op("dropout of torch", lambda x: torch.dropout(x, 0.5, True), "ab", R2, 2),
    op("alpha_dropout", lambda x: F.alpha_dropout(x, training=True), "ab", R2, 0),
    op("dropout1d", F.dropout1d, "abc", "d0 d1", 2),
    op("dropout1d of one", F.dropout1d, "ab", "d0", 2),
    op("dropout2d", F.dropout2d, "abc2", "d0 d1", 2),
    op("dropout3d", F.dropout3d, "abc22", "d0 d1", 2),
    op("dropout3d of one", F.dropout3d, "abc2", "d0", 2),
    op(
        "feature_alpha_dropout",
        lambda x: F.feature_alpha_dropout(x, training=True),
        "abc",
        "d0 d1",
        0,
    ),
    op("rrelu", lambda x: F.rrelu(x, training=True), "ab", R2, 0),
    op("bernoulli", torch.bernoulli, "ab", R2, 0),
    op("poisson", torch.poisson, "ab", R2, 0, positive=(0,)),
]

COMPOSITES = [
    OpCase(
        "dropout that is off",
        lambda x: F.dropout(F.dropout(x, 0.5, training=False), 0.0),
        "ab",
        sizes=("uneven",),
    ),
    OpCase("rrelu that is off", F.rrelu, "ab", sizes=("uneven",)),
]
