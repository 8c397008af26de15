# SPDX-License-Identifier: Apache-2.0
"""What a local call may ask about its rank: where its pieces lie in the factors of the call.

def mean(here, input, dim, keepdim):          the local mean for its share of the global count
    return input.mean(dim, keepdim) * here.share
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

from hyper_parallel.core.dtensor.layout import cut
from hyper_parallel.core.shard.binding import BoundTensor
from hyper_parallel.core.shard.propagate import OpPlan
from hyper_parallel.core.shard.rule import BoundRule


class Here:
    """One call on one rank.

    ``function`` is the operator itself, ``place`` the rank's place in the mesh, ``share`` how much this rank has of
    what vanishes: its part of a mean.
    """

    def __init__(
        self,
        bound: BoundRule,
        plan: OpPlan,
        mesh_shape: Sequence[int],
        place: Sequence[int],
        function: Callable[..., Any],
    ) -> None:
        self.function = function
        self.place = tuple(place)
        self.plan = plan
        self._sizes = {factor.name: factor.size for factor in bound.factors}
        self._spans = {
            name: cut(
                self._sizes[name], [(mesh_shape[axis], place[axis]) for axis in axes]
            )
            for name, axes in plan.orders.items()
        }
        self._mesh_shape = tuple(mesh_shape)
        self._operands = bound.operands
        self._shapes: dict[int, tuple[int, ...]] = {}
        gone = [
            factor.name
            for factor in bound.factors
            if factor.name in self._spans and not factor.kept
        ]
        self.share = math.prod(
            self.size(name) / self.whole(name) if self.whole(name) else 1.0
            for name in gone
        )

    def whole(self, name: str) -> int:
        """The size of a factor."""
        return self._sizes[name]

    def offset(self, name: str) -> int:
        """Where this rank's piece of a factor begins."""
        return self._spans.get(name, (0, 0))[0]

    def size(self, name: str) -> int:
        """The size of this rank's piece of a factor."""
        return self._spans[name][1] if name in self._spans else self._sizes[name]

    def is_cut(self, name: str) -> bool:
        """Whether a factor is cut at all."""
        return name in self._spans

    def shape(self, result: int = 0) -> tuple[int, ...]:
        """The shape of this rank's piece of a result."""
        if result not in self._shapes:  # views ask at every call
            self._shapes[result] = self.plan.results[result].local_shape(
                self.plan.shapes[result], self.place
            )
        return self._shapes[result]

    def operand_shape(self, operand: int) -> tuple[int, ...]:
        """The global shape of an operand."""
        return tuple(cast(BoundTensor, self._operands[operand]).shape)

    @property
    def piece(self) -> int:
        """The number of this rank's piece of the first result; ranks with copies of one piece have one number."""
        number = 0
        for axes in self.plan.results[0].dim_axes:
            for axis in axes:
                number = number * self._mesh_shape[axis] + self.place[axis]
        return number
