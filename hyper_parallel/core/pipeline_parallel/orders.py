# SPDX-License-Identifier: Apache-2.0
"""A whole schedule as a value: the actions of every rank, in order.

    schedule = build_schedule("1F1B", ranks=2, micro_batches=2)
    print(schedule)          r0: 0F0 0F1 0B0 0B1
                             r1: 1F0 1B0 1F1 1B1
    schedule.orders[1][0]    1F0, what rank 1 does first

What is printed is what runs: there is no second form of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hyper_parallel.core.pipeline_parallel.action import (
    COMPUTE,
    MESSAGES,
    Message,
    MetaStep,
    MetaStepType,
    computations,
    flatten,
)
from hyper_parallel.core.pipeline_parallel.mapping import StageMapping
from hyper_parallel.platform.error_codes import coded

Order = tuple[MetaStep, ...]


class Product(NamedTuple):
    """What a computation makes: the output (F), the gradients of inputs (B) or of parameters (W)."""

    kind: str
    stage: int
    micro: int


_PRODUCTS = {
    MetaStepType.FWD: "F",
    MetaStepType.BWD: "B",
    MetaStepType.BWD_INPUT: "B",
    MetaStepType.BWD_WEIGHT: "W",
}


@dataclass(frozen=True)
class Schedule:
    """The actions of all ranks.

    ``style`` says which rank runs which stage, as in ``StageMapping``; ``skips`` are pairs of
    stages, the first of which hands a tensor directly to the second; without ``has_backward`` the
    schedule only runs forwards.
    """

    name: str
    ranks: int
    micro_batches: int
    stages: int
    orders: tuple[Order, ...]
    style: str = "loop"
    skips: tuple[tuple[int, int], ...] = ()
    has_backward: bool = True

    def __post_init__(self) -> None:
        assert self.mapping  # refuses an unknown style
        for source, target in self.skips:
            if not 0 <= source < target - 1 < self.stages - 1:
                raise coded(
                    ValueError,
                    "HP469",
                    f"the skip connection from stage {source} to stage {target} must lead to a later stage "
                    f"of the {self.stages} that is not the next one",
                )

    def __str__(self) -> str:
        return "\n".join(
            f"r{rank}: {' '.join(map(str, order))}"
            for rank, order in enumerate(self.orders)
        )

    @cached_property
    def mapping(self) -> StageMapping:
        """Which rank runs which stage."""
        return StageMapping(self.style, self.ranks, self.stages, self.micro_batches)

    @property
    def chunks(self) -> int:
        """How many parts a rank's share of the layers has."""
        return self.mapping.chunks

    @cached_property
    def has_messages(self) -> bool:
        """Whether the orders contain sends and receives."""
        return any(step.type in MESSAGES for order in self.orders for step in order)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some backward is split into its parts for inputs and for parameters."""
        steps = (step for order in self.orders for step in flatten(order))
        return any(step.type is MetaStepType.BWD_INPUT for step in steps)

    @cached_property
    def sources(self) -> dict[int, tuple[int, ...]]:
        """Stage -> the stages whose outputs its forward takes."""
        return {stage: self._neighbors(stage, 1, 0) for stage in range(self.stages)}

    @cached_property
    def targets(self) -> dict[int, tuple[int, ...]]:
        """Stage -> the stages that take its output, and send back its gradients."""
        return {stage: self._neighbors(stage, 0, 1) for stage in range(self.stages)}

    def _neighbors(self, stage: int, own: int, other: int) -> tuple[int, ...]:
        skips = [skip[other] for skip in self.skips if skip[own] == stage]
        neighbor = stage + other - own
        chain = [neighbor] if 0 <= neighbor < self.stages else []
        return (*chain, *sorted(skips))

    def needs(self, step: MetaStep) -> tuple[Product, ...]:
        """What must exist before a computation can start."""
        stage, micro = step.stage_index, step.micro_index
        assert stage is not None
        assert micro is not None
        if step.type is MetaStepType.FWD:
            return tuple(Product("F", source, micro) for source in self.sources[stage])
        if step.type is MetaStepType.BWD_WEIGHT:
            return (Product("B", stage, micro),)
        gradients = (Product("B", target, micro) for target in self.targets[stage])
        return (Product("F", stage, micro), *gradients)

    def hand_overs(self, step: MetaStep) -> Iterator[Message]:
        """What a computation hands to computations of other stages, on this rank or another."""
        stage, micro = step.stage_index, step.micro_index
        assert stage is not None
        assert micro is not None
        if step.type is MetaStepType.FWD:
            for target in self.targets[stage]:
                yield Message(True, stage, target, micro)
        elif step.type is not MetaStepType.BWD_WEIGHT:
            for source in self.sources[stage]:
                yield Message(False, stage, source, micro)

    def messages_after(self, step: MetaStep) -> Iterator[Message]:
        """What a computation hands to stages on other ranks."""
        for message in self.hand_overs(step):
            source, target = self.ends_of(message)
            if source != target:
                yield message

    def ends_of(self, message: Message) -> tuple[int, int]:
        """The ranks that send and receive a message."""
        rank_of = self.mapping.rank_of
        source = rank_of(message.source, message.micro)
        return source, rank_of(message.target, message.micro)

    def with_orders(self, orders: tuple[Order, ...]) -> Schedule:
        """This schedule with other orders."""
        return dataclasses.replace(self, orders=orders)

    def unpaired(self) -> Schedule:
        """The schedule with two actions in place of each pair, which then send on their own."""
        return self.with_orders(tuple(tuple(flatten(order)) for order in self.orders))

    def forward_only(self) -> Schedule:
        """The forwards of this schedule, for evaluation; sends and receives are left out."""
        orders = tuple(
            tuple(step for step in flatten(order) if step.type is MetaStepType.FWD)
            for order in self.orders
        )
        return dataclasses.replace(self, orders=orders, has_backward=False)


def product_of(step: MetaStep) -> Product:
    """What a computation makes."""
    assert isinstance(step.type, MetaStepType)
    assert step.stage_index is not None
    assert step.micro_index is not None
    return Product(_PRODUCTS[step.type], step.stage_index, step.micro_index)


def message_to(step: MetaStep, need: Product) -> Message:
    """The message that brings a computation what it needs from another rank."""
    assert step.stage_index is not None
    return Message(need.kind == "F", need.stage, step.stage_index, need.micro)


def index_products(order: Order) -> dict[Product, tuple[int, MetaStep]]:
    """What the computations of an order make -> the index and the computation."""
    made = {}
    for index, step in enumerate(order):
        for part in computations(step):
            made[product_of(part)] = (index, part)
    return made


def count_messages(schedule: Schedule) -> int:
    """How many messages ranks exchange in one step."""
    count = 0
    for order in schedule.orders:
        for step in flatten(order):
            if step.type in COMPUTE:
                count += len(list(schedule.messages_after(step)))
    return count


def count_live(order: Order) -> int:
    """The most micro batches, counted once per chunk, whose activations a rank holds at once.

    Activations live from the forward to the end of the backward, or of its part for parameters.
    The two halves of a pair run together, so what its backward frees is live until the pair ends.
    """
    live = peak = 0
    freeing = (MetaStepType.BWD, MetaStepType.BWD_WEIGHT)
    for step in order:
        parts = computations(step)
        live += sum(part.type is MetaStepType.FWD for part in parts)
        peak = max(peak, live)
        live -= sum(part.type in freeing for part in parts)
    return peak
