# SPDX-License-Identifier: Apache-2.0
"""All names of the pointwise table: each is one of torch's, and gives on shards what it gives on the whole."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it

from hyper_parallel.core.shard.ops import pointwise
from hyper_parallel.core.shard.ops.operator import OPERATORS
from hyper_parallel.platform import get_platform
from hyper_parallel.testing import check_rule

RULES = {"one": (pointwise.ONE, 1, 75), "two": (pointwise.TWO, 2, 45), "linear": (pointwise.SCALED, 1, 4)}
ELSEWHERE = {"imag", "polar", "igamma", "igammac", "gammainc", "gammaincc"}  # for complex numbers; without a gradient
ARGUMENTS = {"mvlgamma": (2,), "multigammaln": (2,), "threshold": (0.5, 2.0)}
SPELLED = {
    "_threshold": lambda x: F.threshold(x, 0.5, 2.0),
    "log_sigmoid": F.logsigmoid,
    "rpow": torch.Tensor.__rpow__,
    "rfloordiv": torch.Tensor.__rfloordiv__,
    "rremainder": torch.Tensor.__rmod__,
}


def function(name):
    """The function of torch that arrives under that name."""
    if name in SPELLED:
        return SPELLED[name]
    found = [getattr(room, name, None) for room in (F, torch, torch.special, torch.Tensor)]
    return next(one for one in found if callable(one) and get_platform().called(one).name == name)


@pytest.mark.parametrize("kind", RULES)
def test_every_name_on_shards(kind):
    rule, count, least = RULES[kind]
    names = [name for name, op in OPERATORS.items() if op.rule is rule and name not in ELSEWHERE]
    rng = np.random.default_rng(0)
    floats = [rng.uniform(0.1, 0.9, (3, 5)) for _ in range(count)]
    integers = [rng.integers(1, 5, (3, 5)) for _ in range(count)]
    for name in names:
        call, more = function(name), ARGUMENTS.get(name, ())

        def run(*x, call=call, more=more):
            return call(*x, *more)

        for way, operands in ((run, floats), (run, integers)):
            try:
                assert check_rule(way, *operands, meshes=[(2,)]) > 1
                break
            except (RuntimeError, NotImplementedError) as error:  # without a gradient, or only for integers
                last = error
        else:
            raise AssertionError(name) from last
    assert len(names) > least
