# SPDX-License-Identifier: Apache-2.0
"""The operators: one table for each family. Importing it fills them."""

from hyper_parallel.core.shard.ops import (
    joins,
    pointwise,
    products,
    reductions,
    views,
)
from hyper_parallel.core.shard.ops.operator import OPERATORS, Operator, Ruled, Unruled, operator

__all__ = [
    "OPERATORS",
    "Operator",
    "Ruled",
    "Unruled",
    "joins",
    "operator",
    "pointwise",
    "products",
    "reductions",
    "views",
]
