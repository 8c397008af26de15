# SPDX-License-Identifier: Apache-2.0
"""Calls that make tensors like others."""

from rules.framework import torch
from rules.operators import OpCase


def op(name, call, shapes="ab", **more):
    return OpCase(name, call, shapes, sizes=("uneven",), **more)


CASES = []
COMPOSITES = [
    op("zeros_like", torch.zeros_like),
    op("ones_like", lambda x: torch.ones_like(x, dtype=torch.int32)),
    op("full_like", lambda x: torch.full_like(x, 2.5)),
    op(
        "empty_like",
        lambda x: torch.empty_like(x, memory_format=torch.contiguous_format).fill_(3.0),
    ),
    op("new_zeros", lambda x: x.new_zeros(3, 4)),
    op("new_zeros of its size", lambda x: x.new_zeros(x.shape, dtype=torch.int64)),
    op("new_ones", lambda x: x.new_ones((2, 3), device="cpu")),
    op("new_full", lambda x: x.new_full((2, 3), 2.5)),
    op("new_full of its size", lambda x: x.new_full(x.shape, 2, dtype=torch.int64)),
    op("new_empty", lambda x: x.new_empty(x.shape).zero_()),
    op("new_tensor", lambda x: x.new_tensor([[1, 2], [3, 4]])),
]
