# SPDX-License-Identifier: Apache-2.0
"""What a storage must provide: a protocol to write and one to read. It moves bytes and decides nothing."""

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
    """One written item: its size in bytes, and what the storage needs to find it."""

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
        """Sets the location of the next checkpoint; None keeps the current one."""

    @abstractmethod
    def configure_writer(self, is_coordinator: bool) -> None:
        """Called on every rank before planning; one of them is the coordinator."""

    def optimize_local_plan(self, plan: SavePlan) -> SavePlan:
        """May change what this rank would write."""
        return plan

    def optimize_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """May change what each rank writes."""
        return plans

    @abstractmethod
    def execute_write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Writes this rank's items; the coordinator receives the results."""

    @abstractmethod
    def finalize_checkpoint(
        self, metadata: Metadata, results: list[list[WriteResult]]
    ) -> Metadata:
        """Completes the checkpoint, on the coordinator when all have written. ``results`` has one list per rank."""

    def abandon(self) -> None:  # noqa: B027 - a storage need not have anything to remove
        """Removes what was written, on every rank when some rank failed."""


class StorageReader(ABC):
    """Reads checkpoints, one at a time."""

    @abstractmethod
    def initialize_reader(self, checkpoint_id: Any) -> None:
        """Sets the location of the next checkpoint; None keeps the current one."""

    @abstractmethod
    def load_metadata(self) -> Metadata:
        """The metadata of the checkpoint."""

    def configure_reader(self, metadata: Metadata, is_coordinator: bool) -> None:  # noqa: B027 - nothing to prepare
        """Called on every rank before planning."""

    def optimize_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """May change what this rank reads."""
        return plan

    def optimize_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """May change what each rank reads."""
        return plans

    def check_plan(self, plan: LoadPlan) -> None:  # noqa: B027 - a storage need not be able to tell
        """Checks everything that this rank would read, before any rank fills anything."""

    def close(self) -> None:  # noqa: B027 - a storage need not hold anything
        """Releases what a load has opened, on every rank when it has succeeded or failed."""

    @abstractmethod
    def execute_read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Reads this rank's items into the memory that the planner provides."""
