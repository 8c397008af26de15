# SPDX-License-Identifier: Apache-2.0
"""What the ranks are about to do, and whether it fits together.

ValueError: all_reduce: the ranks do not agree: rank 0 calls all_reduce(sum, float32, (4,)); rank 1 calls ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.platform.error_codes import coded


@dataclass(frozen=True, eq=False, repr=False)
class Call:
    """What one rank is about to do. Splits are compared crosswise, the line not at all, the rest must be equal."""

    name: str
    facts: tuple[Any, ...] = ()
    sends: tuple[int, ...] | None = None
    receives: tuple[int, ...] | None = None
    line: str = ""  # of the user's code, where that is asked for

    @classmethod
    def on(cls, name: str, data: Any, *facts: Any) -> Call:
        """A call on a tensor, whose dtype and shape count."""
        return cls(name, (*facts, dtype_name(data), tuple(data.shape)))

    def __str__(self) -> str:
        splits = (
            f", sends {list(self.sends)}, receives {list(self.receives or ())}"
            if self.sends is not None
            else ""
        )
        return f"{self.name}({', '.join(map(str, self.facts))}{splits})"


def dtype_name(data: Any) -> str:
    """The name of a tensor's dtype, the same in every framework."""
    return str(data.dtype).rpartition(".")[2].lower()


def check_agreement(calls: Sequence[Call], ranks: Sequence[int], name: str) -> None:
    """A ValueError if the calls of these ranks, one of which is called ``name``, do not fit together."""
    if not agree(calls):
        told = "; ".join(
            f"rank {rank} calls {call}" for rank, call in zip(ranks, calls, strict=True)
        )
        raise coded(ValueError, "HP117", f"{name}: the ranks do not agree: {told}")


def agree(calls: Sequence[Call]) -> bool:
    """Whether the calls of the ranks of a group fit together."""
    return len(
        {(c.name, c.facts, c.sends is None) for c in calls}
    ) == 1 and _splits_fit(calls)


def _splits_fit(calls: Sequence[Call]) -> bool:
    """Whether what rank i sends to rank j is what j expects from i."""
    return all(
        sender.sends is None or sender.sends[j] == (receiver.receives or ())[i]
        for i, sender in enumerate(calls)
        for j, receiver in enumerate(calls)
    )
