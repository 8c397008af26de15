# SPDX-License-Identifier: Apache-2.0
"""Calls of products."""

import torch
import torch.nn.functional as F  # noqa: N812 - everyone's name for it
from rules.operators import OpCase

CASES = [
    OpCase("linear", F.linear, "abc bc b"),
    OpCase("linear without bias", F.linear, "ab cb"),
    OpCase("mm", torch.mm, "ab bc", "m k n", 4),
]
