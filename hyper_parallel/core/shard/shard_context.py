# SPDX-License-Identifier: Apache-2.0
"""What a local call may ask about its rank: where its shard begins in the factors of the call.

def mean(here, input, dim, keepdim):          the local mean, weighted by its share of the elements
    return input.mean(dim, keepdim) * here.share
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from hyper_parallel.core.dtensor.geometry import Spans, nested_span
from hyper_parallel.core.shard.binding import BoundTensor
from hyper_parallel.core.shard.propagate import OpPlan
from hyper_parallel.core.shard.rule import BoundRule


class ShardContext:
    """One call on one rank.

    ``function`` is the operator, ``place`` the rank's coordinate, and ``share`` the part
    of the elements that vanish in a reduction which this rank holds.
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
        self._mesh_shape = tuple(mesh_shape)
        self._sizes = {factor.name: factor.size for factor in bound.factors}
        self._spans = {name: self._find_spans(name) for name in plan.orders}
        self._operands = bound.operands
        self._shapes: dict[int, tuple[int, ...]] = {}
        self.share = 1.0
        for factor in bound.factors:
            if factor.name in self._spans and not factor.kept and factor.size:
                self.share *= self.size(factor.name) / factor.size

    def _find_spans(self, name: str) -> Spans:
        """What this rank holds of a sharded factor."""
        size, axes = self._sizes[name], self.plan.orders[name]
        placement = self.plan.irregular.get(name)
        if placement is not None:
            [axis] = axes
            return placement.spans(size, self._mesh_shape[axis], self.place[axis])
        chunks = [(self._mesh_shape[axis], self.place[axis]) for axis in axes]
        return (nested_span(size, chunks),)

    def whole(self, name: str) -> int:
        """The size of a factor."""
        return self._sizes[name]

    def offset(self, name: str) -> int:
        """Where this rank's chunk of a factor begins."""
        if name not in self._spans:
            return 0
        [(offset, _)] = self._spans[name]  # not for operators that are order-free
        return offset

    def size(self, name: str) -> int:
        """How many elements of a factor this rank holds."""
        if name not in self._spans:
            return self._sizes[name]
        return sum(size for _, size in self._spans[name])

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
