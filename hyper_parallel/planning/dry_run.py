# SPDX-License-Identifier: Apache-2.0
"""What a block communicates under a plan: its forward and backward on distributed tensors without data.

cost = dry_run(block, (args, kwargs), styles, mesh["tp"])
cost.forward                                  {"all_reduce": 2}

The rules decide as they do in training, so the counts are those of a real step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.core.modules.style import ParallelStyle
from hyper_parallel.core.shard.arguments import tensors_in
from hyper_parallel.core.tensor_parallel.api import parallelize_module
from hyper_parallel.core.tensor_parallel.style import Replicated
from hyper_parallel.platform import get_platform

platform = get_platform()
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Cost:
    """The collectives of one forward and backward, and their bytes for this rank."""

    forward: Mapping[str, int] = field(default_factory=dict)
    backward: Mapping[str, int] = field(default_factory=dict)
    nbytes: int = 0
    unasked: int = (
        0  # those of forward that an operator needed, where no style asked for them
    )

    @property
    def count(self) -> int:
        """How many collectives there are."""
        return sum(self.forward.values()) + sum(self.backward.values())

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            Counter(self.forward) + Counter(other.forward),
            Counter(self.backward) + Counter(other.backward),
            self.nbytes + other.nbytes,
            self.unasked + other.unasked,
        )


def dry_run(
    block: Any, call: Call, styles: Mapping[str, ParallelStyle], mesh: DeviceMesh
) -> Cost:
    """The cost of a block that is called so; ``mesh`` has one axis. Call it within ``platform.simulate_ranks()``."""
    copied = platform.copy_without_data(block)
    parallelize_module(copied, mesh, {**styles, "": Replicated()})
    args, kwargs = platform.apply_to_tensors(_as_leaf, list(call))
    with CommunicationLedger(mesh) as ledger:
        total = _sum_of(copied(*args, **kwargs))
        if total is not None:
            total.backward()
    return Cost(
        ledger.counts(backward=False),
        ledger.counts(backward=True),
        ledger.nbytes(),
        sum(ledger.counts(backward=False, implicit=True).values()),
    )


def _as_leaf(tensor: Any) -> Any:
    """The same tensor without its graph; it gets a gradient if it had one in the model."""
    leaf = platform.detach(tensor)
    if platform.requires_grad(tensor) or platform.is_recorded(tensor):
        leaf.requires_grad_()
    return leaf


def _sum_of(output: Any) -> Any:
    sums = [
        one.sum()
        for one in tensors_in(output)
        if platform.is_floating_point(one) and one.requires_grad
    ]
    return sum(sums[1:], sums[0]) if sums else None
