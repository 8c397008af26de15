# SPDX-License-Identifier: Apache-2.0
"""What operators do to distributed tensors: the notation of rules, and what one mesh axis may do under a rule."""

from hyper_parallel.core.shard.binding import BoundFactor, BoundTensor
from hyper_parallel.core.shard.notation import Notation, NotationError, from_equation, parse
from hyper_parallel.core.shard.rule import (
    BoundRule,
    Choice,
    Place,
    Rule,
    einsum,
    lookup,
    move,
    pointwise,
    reduction,
)

__all__ = [
    "BoundFactor",
    "BoundRule",
    "BoundTensor",
    "Choice",
    "Notation",
    "NotationError",
    "Place",
    "Rule",
    "einsum",
    "from_equation",
    "lookup",
    "move",
    "parse",
    "pointwise",
    "reduction",
]
