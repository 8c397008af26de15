# SPDX-License-Identifier: Apache-2.0
"""What authors of operators need: a check of a rule in one process, and real ranks.

def square_of_rank(power):
    return get_platform().get_rank() ** power

assert run_ranks(square_of_rank, 4, 2) == [0, 1, 4, 9]
"""

from typing import TYPE_CHECKING, Any

from hyper_parallel.ranks import RankError, close_ranks, preload, run_ranks
from hyper_parallel.testing.decorator import on_ranks

if TYPE_CHECKING:
    from hyper_parallel.testing.rules.check import check_rule, choices_of

__all__ = [
    "RankError",
    "check_rule",
    "choices_of",
    "close_ranks",
    "on_ranks",
    "preload",
    "run_ranks",
]


def __getattr__(name: str) -> Any:
    if name in ("check_rule", "choices_of"):  # they need a framework, the ranks do not
        from hyper_parallel.testing.rules import check

        return getattr(check, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
