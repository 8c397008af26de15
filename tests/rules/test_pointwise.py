# SPDX-License-Identifier: Apache-2.0
"""All names of the pointwise table: each is one of the framework's, and gives on shards what it gives on the whole."""

import numpy as np
import pytest
from rules.cases.names import BY_NAME
from rules.framework import IS_TORCH
from rules.outcomes import RULE, drawn_within, known, that_run

from hyper_parallel.testing import check_rule

LEAST = (
    {"one": 75, "two": 45, "linear": 4}
    if IS_TORCH
    else {"one": 50, "two": 25, "linear": 2}
)


@pytest.mark.parametrize("kind", BY_NAME)
def test_every_name_on_shards(kind):
    cases = that_run(BY_NAME[kind], RULE)
    for case in cases:
        operands = drawn_within(case, np.random.default_rng(0))
        how = known(case.name)
        tolerance = None if how.dtype == "float64" else 1e-4
        count = check_rule(
            case.call,
            *operands,
            meshes=[(2,)],
            tolerance=tolerance,
            gradients=how.gradients,
        )
        assert count > 1, case.name
    assert len(cases) > LEAST[kind]
