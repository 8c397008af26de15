# SPDX-License-Identifier: Apache-2.0
"""What a rank has under way in a step: the micro batches on its stages, and what passes between two stages.

    links = Links(schedule, rank, stages)
    cell = links.cell(1, 3)                micro batch 3 on stage 1
    cell.sources, cell.targets             its links from and to other stages
    links.link(Message(True, 0, 1, 3))     from stage 0 to stage 1: the output, and its gradients on the way back

They are made once and serve every step, so that an action looks up nothing by numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.core.pipeline_parallel.action import Message
from hyper_parallel.core.pipeline_parallel.orders import Schedule
from hyper_parallel.core.pipeline_parallel.stage import PipelineStage
from hyper_parallel.core.pipeline_parallel.wire import Known


class Link:
    """An output that one stage hands to another for a micro batch, and its gradients, which come back."""

    __slots__ = (
        "back", "forward", "gradients", "handed", "is_local", "known", "mesh", "source",
    )  # fmt: skip

    def __init__(self, forward: Message, *, is_local: bool) -> None:
        self.forward = forward
        self.back = Message(False, forward.target, forward.source, forward.micro)
        self.is_local = is_local  # whether both stages are on this rank
        self.source: Cell | None = None  # if that is on this rank
        self.clear()

    def clear(self) -> None:
        """Forgets what is under way."""
        self.known: Known | None = None  # what forward has handed over, until backward
        self.handed: Any = None  # an output that stays on this rank
        self.gradients: list[Any] | None = None  # of the target's inputs, until they go

    @property
    def is_clear(self) -> bool:
        """Whether nothing is under way."""
        return self.known is None and self.handed is None and self.gradients is None


class Cell:
    """A micro batch on a stage of this rank."""

    __slots__ = ("counts", "micro", "number", "output", "sources", "stage", "targets", "unsent")  # fmt: skip

    def __init__(self, stage: PipelineStage, micro: int) -> None:
        self.stage, self.number, self.micro = stage, stage.stage_index, micro
        self.sources: tuple[Link, ...] = ()
        self.targets: tuple[Link, ...] = ()
        self.clear()

    def clear(self) -> None:
        """Forgets what is under way."""
        self.output: Any = None  # until it is sent
        self.unsent = 0  # to how many stages
        self.counts: list[int] = []  # of the inputs, by source

    @property
    def is_clear(self) -> bool:
        """Whether nothing is under way."""
        return self.output is None and not self.unsent


class Links:
    """The cells and links of one rank; ``stages``: those of this rank, by number."""

    def __init__(
        self, schedule: Schedule, rank: int, stages: Mapping[int, PipelineStage]
    ) -> None:
        self._schedule, self._rank, self._stages = schedule, rank, stages
        self._cells: dict[tuple[int, int], Cell] = {}
        self._links: dict[Message, Link] = {}

    def cell(self, number: int, micro: int) -> Cell:
        """A micro batch on a stage."""
        cell = self._cells.get((number, micro))
        if cell is None:
            cell = self._cells[number, micro] = Cell(self._stages[number], micro)
            cell.sources = tuple(
                self.link(Message(True, source, number, micro))
                for source in self._schedule.sources[number]
            )
            cell.targets = tuple(
                self.link(Message(True, number, target, micro))
                for target in self._schedule.targets[number]
            )
            for link in cell.targets:
                link.source = cell
        return cell

    def link(self, message: Message) -> Link:
        """The link of a message in either direction."""
        forward = message
        if not message.is_forward:
            forward = Message(True, message.target, message.source, message.micro)
        link = self._links.get(forward)
        if link is None:
            source, target = self._schedule.ends_of(forward)
            link = self._links[forward] = Link(forward, is_local=source == target)
            if source == self._rank:
                self.cell(forward.source, forward.micro)  # which takes the link
        return link

    def clear(self) -> None:
        """Forgets all that is under way."""
        for cell in self._cells.values():
            cell.clear()
        for link in self._links.values():
            link.clear()

    @property
    def is_clear(self) -> bool:
        """Whether nothing is under way."""
        cells, links = self._cells.values(), self._links.values()
        return all(one.is_clear for one in cells) and all(one.is_clear for one in links)
