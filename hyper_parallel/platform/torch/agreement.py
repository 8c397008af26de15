# SPDX-License-Identifier: Apache-2.0
"""Compares what the ranks are about to do, before a collective with data that does not fit together ends a process.

    ValueError: all_reduce: the ranks do not agree: rank 0 calls all_reduce(sum, float32, (4,)); rank 1 calls ...

One more exchange of small objects for every collective, so it is off unless asked for (``checked_collectives``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Call:
    """What one rank is about to do. Splits are compared crosswise, everything else must be equal."""

    name: str
    facts: tuple[Any, ...] = ()
    sends: tuple[int, ...] | None = None
    receives: tuple[int, ...] | None = None

    @classmethod
    def on(cls, name: str, data: torch.Tensor, *facts: Any) -> Call:
        """A call on a tensor, whose dtype and shape count."""
        return cls(name, (*facts, str(data.dtype).removeprefix("torch."), tuple(data.shape)))

    def __str__(self) -> str:
        splits = f", sends {list(self.sends)}, receives {list(self.receives or ())}" if self.sends is not None else ""
        return f"{self.name}({', '.join(map(str, self.facts))}{splits})"


def require_agreement(call: Call, group: dist.ProcessGroup) -> None:
    """A ValueError on every rank of the group if their calls do not fit together."""
    ranks = dist.get_process_group_ranks(group)
    calls: list[Any] = [None] * len(ranks)
    dist.all_gather_object(calls, call, group)
    if len({(c.name, c.facts, c.sends is None) for c in calls}) > 1 or not _splits_fit(calls):
        told = "; ".join(f"rank {rank} calls {other}" for rank, other in zip(ranks, calls, strict=True))
        raise ValueError(f"{call.name}: the ranks do not agree: {told}")


def _splits_fit(calls: list[Call]) -> bool:
    """Whether what rank i sends to rank j is what j expects from i."""
    return all(
        sender.sends is None or sender.sends[j] == (receiver.receives or ())[i]
        for i, sender in enumerate(calls)
        for j, receiver in enumerate(calls)
    )
