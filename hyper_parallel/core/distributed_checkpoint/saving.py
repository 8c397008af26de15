# SPDX-License-Identifier: Apache-2.0
"""The steps of a save: inspect, agree, plan, write, complete. Every step succeeds on all ranks or fails on all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hyper_parallel.core.distributed_checkpoint.agreement import Ranks
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.filesystem import (
    FileSystemWriter,
    new_tag,
)
from hyper_parallel.core.distributed_checkpoint.format import METADATA_FILE
from hyper_parallel.core.distributed_checkpoint.metadata import Metadata
from hyper_parallel.core.distributed_checkpoint.planner import SavePlan, SavePlanner
from hyper_parallel.core.distributed_checkpoint.standard_planner import (
    StandardSavePlanner,
)
from hyper_parallel.core.distributed_checkpoint.storage import (
    SaveRun,
    StorageWriter,
    WriteResult,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

CheckpointId = str | os.PathLike[str] | None


@dataclass(frozen=True)
class Prepared:
    """A planned save, of which nothing is written yet."""

    plan: SavePlan
    planner: SavePlanner
    writer: StorageWriter
    metadata: Metadata
    is_alike: bool  # all ranks have the same names in the same layouts, so the coordinator knows all objects

    def write(self, ranks: Ranks) -> Metadata:
        """Writes the checkpoint on all ranks; it is complete when this returns."""
        results = ranks.together(
            lambda: self.writer.execute_write(self.plan, self.planner),
            self.writer.abandon,
        )
        everyone = [results] if self.is_alike else ranks.gather(results)
        return ranks.together(lambda: self._finalized(everyone, ranks))

    def _finalized(self, results: list[list[WriteResult]], ranks: Ranks) -> Metadata:
        return (
            self.writer.finalize_checkpoint(self.metadata, results)
            if ranks.is_coordinator
            else self.metadata
        )


def prepare(
    state_dict: Mapping[str, Any],
    checkpoint_id: CheckpointId,
    storage_writer: StorageWriter | None,
    planner: SavePlanner | None,
    ranks: Ranks,
    before: Callable[[], None] = lambda: None,
) -> Prepared:
    """Plans a save: each rank by itself if they all have the same, else from what they tell each other.

    What must be done ``before`` may fail on one rank, as everything here.
    """
    if storage_writer is None and checkpoint_id is None:
        raise coded(
            ValueError,
            "HP513",
            "save: expected checkpoint_id (a folder) or storage_writer, got neither",
        )
    writer = storage_writer if storage_writer is not None else FileSystemWriter()
    chosen = planner if planner is not None else StandardSavePlanner()

    def look() -> bytes:
        before()
        writer.initialize_writer(checkpoint_id)
        writer.configure_writer(ranks.is_coordinator)
        options = {
            "rank": ranks.rank,
            "world_size": ranks.world_size,
            "is_coordinator": ranks.is_coordinator,
        }
        chosen.configure_planner(state_dict, gather=ranks.gather, **options)
        if ranks.is_silent and ranks.world_size > 1:
            # Nothing tells a file of this save from one that an earlier save of the same state left.
            _require_new_folder(writer, ranks.is_coordinator)
        return (
            chosen.fingerprint()
            if isinstance(chosen, StandardSavePlanner)
            else bytes(16)
        )

    is_alike, token = ranks.agree(look, new_tag())
    if isinstance(chosen, StandardSavePlanner) and is_alike:
        plan, metadata = chosen.plan_alone()
    else:
        plan, metadata = _plan_together(writer, chosen, ranks)
        is_alike = False
    return Prepared(
        replace(plan, storage_data=SaveRun(token, ranks.rank, ranks.world_size)),
        chosen,
        writer,
        metadata,
        is_alike,
    )


def _require_new_folder(writer: StorageWriter, is_coordinator: bool) -> None:
    """Each looks for what it writes itself: others may have written theirs for this save already."""
    folder = writer.folder if isinstance(writer, FileSystemWriter) else None
    if (
        folder is None
        or (is_coordinator and (folder / METADATA_FILE).exists())
        or any(folder.glob(f"data-*-{get_platform().get_rank():05d}.*"))
    ):
        raise coded(
            CheckpointError,
            "HP515",
            "use_collectives=False needs a new folder for every save",
            file=folder,
        )


def _plan_together(
    writer: StorageWriter, planner: SavePlanner, ranks: Ranks
) -> tuple[SavePlan, Metadata]:
    if ranks.is_silent and ranks.world_size > 1:
        raise coded(
            CheckpointError,
            "HP515",
            "use_collectives=False needs a planner that plans alone, and the same names on all ranks",
        )
    local = ranks.together(
        lambda: writer.optimize_local_plan(planner.build_local_plan())
    )
    everyone = ranks.gather(local)
    plans, metadata = ranks.together(lambda: planner.build_global_plan(everyone))
    return planner.finalize_plan(
        writer.optimize_global_plan(plans)[ranks.rank]
    ), metadata
