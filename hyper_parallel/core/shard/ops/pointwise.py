# SPDX-License-Identifier: Apache-2.0
"""Element by element."""

from hyper_parallel.core.shard.ops.operator import operator
from hyper_parallel.core.shard.rule import pointwise

operator("add sub", "input, other, *, alpha=1", pointwise(2, linear=[(0, 1)]))
operator("mul", "input, other", pointwise(2, linear=[0, 1]))
operator("div", "input, other, *, rounding_mode=None", pointwise(2, linear=0))
operator("relu tanh sigmoid exp", "input", pointwise(1))
operator("clone", "input, *, memory_format=None", pointwise(1, linear=0))


def _cast(input, *to, **_):  # type: ignore[no-untyped-def]
    return pointwise(1, linear=0)


operator("to", "input, *to", _cast)
