# SPDX-License-Identifier: Apache-2.0
"""What a storage must offer: two protocols, one to write and one to read. It moves bytes and decides nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.distributed_checkpoint.metadata import Metadata, MetadataIndex
from hyper_parallel.core.distributed_checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
)


@dataclass(frozen=True)
class WriteResult:
    """One item that was written: how many bytes, and what the storage needs to find it again."""

    index: MetadataIndex
    size_in_bytes: int
    storage_data: Any = None


@dataclass(frozen=True)
class SaveRun:
    """What a writer finds in ``plan.storage_data``: 16 hexadecimal digits, new for every save, and who it is."""

    token: str
    rank: int = 0
    ranks: int = 1


class StorageWriter(ABC):
    """Writes checkpoints; each appears when `finalize_checkpoint` returns, and not before."""

    @abstractmethod
    def initialize_writer(self, checkpoint_id: Any) -> None:
        """Says where the next checkpoint goes; None leaves it as it is."""

    @abstractmethod
    def configure_writer(self, is_coordinator: bool) -> None:
        """OpName on every rank before anything is planned; one of them is the coordinator."""

    def optimize_local_plan(self, plan: SavePlan) -> SavePlan:
        """May change what this rank would write."""
        return plan

    def optimize_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """May change what each rank writes."""
        return plans

    @abstractmethod
    def execute_write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Writes this rank's items; what it returns goes to the coordinator."""

    @abstractmethod
    def finalize_checkpoint(
        self, metadata: Metadata, results: list[list[WriteResult]]
    ) -> Metadata:
        """On the coordinator, when all have written: makes the checkpoint whole. ``results`` has a list a rank."""

    def abandon(self) -> None:  # noqa: B027 - a storage need not have anything to remove
        """On every rank, when some rank failed: removes what was written."""


class StorageReader(ABC):
    """Reads one checkpoint after the other."""

    @abstractmethod
    def initialize_reader(self, checkpoint_id: Any) -> None:
        """Says where the next checkpoint is; None leaves it as it is."""

    @abstractmethod
    def load_metadata(self) -> Metadata:
        """All of the checkpoint but its data."""

    def configure_reader(self, metadata: Metadata, is_coordinator: bool) -> None:  # noqa: B027 - nothing to prepare
        """OpName on every rank before anything is planned."""

    def optimize_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """May change what this rank reads."""
        return plan

    def optimize_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """May change what each rank reads."""
        return plans

    def check_plan(self, plan: LoadPlan) -> None:  # noqa: B027 - a storage need not be able to tell
        """Looks at all that this rank would read; what is wrong is found before any rank fills anything."""

    def close(self) -> None:  # noqa: B027 - a storage need not hold anything
        """On every rank, when a load has ended, well or not: lets go of what was opened for it."""

    @abstractmethod
    def execute_read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Reads this rank's items into the memory that the planner has for them."""
