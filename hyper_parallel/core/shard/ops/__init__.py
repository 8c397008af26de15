# SPDX-License-Identifier: Apache-2.0
"""The operators: one table for each family. Importing it fills them."""

from hyper_parallel.core.shard.ops import (
    attention,
    creation,
    foreach,
    indexing,
    joins,
    lookups,
    losses,
    norms,
    pointwise,
    products,
    random,
    reductions,
    views,
)
from hyper_parallel.core.shard.ops.operator import OPERATORS, Operator, Ruled, Unruled, operator

__all__ = [
    "OPERATORS",
    "Operator",
    "Ruled",
    "Unruled",
    "attention",
    "creation",
    "foreach",
    "indexing",
    "joins",
    "lookups",
    "losses",
    "norms",
    "operator",
    "pointwise",
    "products",
    "random",
    "reductions",
    "views",
]
