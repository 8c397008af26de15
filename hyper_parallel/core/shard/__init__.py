# SPDX-License-Identifier: Apache-2.0
"""What operators do to distributed tensors: the notation of rules, the tables, and operators that users add."""

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.shard.binding import BoundFactor, BoundTensor
from hyper_parallel.core.shard.notation import (
    Notation,
    NotationError,
    from_equation,
    parse,
)
from hyper_parallel.core.shard.rule import (
    AxisUse,
    BoundRule,
    Choice,
    Rule,
    einsum,
    lookup,
    move,
    pointwise,
    reduction,
)

if TYPE_CHECKING:
    from hyper_parallel.core.shard.arguments import OperatorError
    from hyper_parallel.core.shard.dfunction import DFunction
    from hyper_parallel.core.shard.mapping import local_map
    from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
    from hyper_parallel.core.shard.ops.parallel_ops import DistributedOp
    from hyper_parallel.core.shard.registration import register_sharding
    from hyper_parallel.core.shard.sharding_plan import ShardingPlan, shard_module

__all__ = [
    "AxisUse",
    "BoundFactor",
    "BoundRule",
    "BoundTensor",
    "Choice",
    "DFunction",
    "DistributedOp",
    "Notation",
    "NotationError",
    "OperatorError",
    "Rule",
    "RuleForCall",
    "ShardingPlan",
    "einsum",
    "from_equation",
    "local_map",
    "lookup",
    "move",
    "operator",
    "parse",
    "pointwise",
    "reduction",
    "register_sharding",
    "shard_module",
]

# What knows tensors: asking for it chooses the framework and imports it.
_OF_THE_FRAMEWORK = {
    "DFunction": "dfunction",
    "DistributedOp": "ops.parallel_ops",
    "OperatorError": "arguments",
    "RuleForCall": "ops.operator",
    "ShardingPlan": "sharding_plan",
    "local_map": "mapping",
    "operator": "ops.operator",
    "register_sharding": "registration",
    "shard_module": "sharding_plan",
}


def __getattr__(name: str) -> Any:
    if name in _OF_THE_FRAMEWORK:
        import importlib

        return getattr(
            importlib.import_module(f"{__name__}.{_OF_THE_FRAMEWORK[name]}"), name
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
