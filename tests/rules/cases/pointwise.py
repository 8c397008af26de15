# SPDX-License-Identifier: Apache-2.0
"""Calls of pointwise operators."""

import torch
from rules.operators import OpCase

CASES = [
    OpCase("add", torch.add, "ab ab"),
    OpCase("add a number", lambda x: x + 1, "ab", carries=0),
    OpCase("scale", lambda x: 2.5 * x, "ab", carries=2),
    OpCase("relu", torch.relu, "abc"),
]
