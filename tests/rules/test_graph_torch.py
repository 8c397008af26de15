# SPDX-License-Identifier: Apache-2.0
"""The last rank's local call keeps the operands in the graph that the first rank keeps, however empty its shard.

A gradient that comes in parts is summed by all ranks: one that had dropped the operand would never come.
"""

import numpy as np
import pytest
import torch
from rules.cases import CASES
from rules.operators import SIZES, draw

from hyper_parallel.core.shard.arguments import flat
from hyper_parallel.core.shard.execution import _tied
from hyper_parallel.testing.rules.call import CaughtCall
from hyper_parallel.testing.rules.check import fits
from hyper_parallel.testing.rules.choice import OneChoice
from hyper_parallel.testing.rules.pieces import Pieces

MESH = (4,)


def kept(caught, choice, rank, shards):
    """Which of the operands have a gradient."""
    leaves = [torch.tensor(shard) for shard in shards]
    leaves = [
        leaf.requires_grad_() if leaf.is_floating_point() else leaf for leaf in leaves
    ]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = caught.evaluate((choice,), (rank,), leaves)
    if caught.op.local is None:  # what an operator of torch drops, dispatch puts back
        found = [_tied(y, leaves) for y in found]
    found = [y for y in found if y.requires_grad]
    results = [
        y.real.sum() + y.imag.sum() if y.is_complex() else y.sum() for y in found
    ]
    if not results or not wanted:
        return [False] * len(wanted)
    return [
        g is not None for g in torch.autograd.grad(results, wanted, allow_unused=True)
    ]


@pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # that an operator is deprecated, or in beta
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if "uneven" in case.sizes],
    ids=lambda case: case.name,
)
def test_every_rank_keeps_the_same_operands(case):
    arrays = draw(case, SIZES["uneven"], np.random.default_rng(0))
    caught = CaughtCall(case.call, arrays, MESH)
    for choice in caught.bound.choices():
        if choice.kind == "shard" and fits(caught.bound, (choice,), MESH):
            pieces = Pieces(MESH, np.random.default_rng(0), 0.0)
            places = OneChoice(caught, (choice,), pieces).of_operands("operands")
            held = [
                pieces.cut(flat(arrays)[i], place)
                for i, place in zip(caught.ours, places, strict=True)
            ]
            first, last = (
                kept(caught, choice, rank, [shards[rank] for shards in held])
                for rank in (0, 3)
            )
            assert first == last, str(choice)
