# SPDX-License-Identifier: Apache-2.0
"""Products: sums over contracted dims, linear in every factor of the product."""

from hyper_parallel.core.shard.ops.operator import operator
from hyper_parallel.core.shard.rule import einsum

operator("linear", "input, weight, bias=None", einsum("... k, n k, +n -> ... n"))
operator("mm", "input, mat2", einsum("m k, k n -> m n"))
operator("bmm", "input, mat2", einsum("b m k, b k n -> b m n"))
