# SPDX-License-Identifier: Apache-2.0
"""The operators: one table for each family. Importing it fills them."""

from hyper_parallel.core.shard.ops import (
    indexing,
    joins,
    losses,
    lookups,
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
    "indexing",
    "joins",
    "lookups",
    "losses",
    "operator",
    "pointwise",
    "products",
    "reductions",
    "views",
]
