# SPDX-License-Identifier: Apache-2.0
"""`save`, `load` and `async_save`: called on all ranks, each with its own state dict.

save({"model": model, "step": 100}, checkpoint_id="runs/a/step-100")
report = load({"model": model, "step": 0}, checkpoint_id="runs/a/step-100")
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hyper_parallel.core.distributed_checkpoint.agreement import Ranks
from hyper_parallel.core.distributed_checkpoint.background import (
    QUEUE,
    AsyncSaveResponse,
    Staged,
)
from hyper_parallel.core.distributed_checkpoint.load_planner import StandardLoadPlanner
from hyper_parallel.core.distributed_checkpoint.loading import (
    States,
    agreed,
    planned,
    reader_of,
)
from hyper_parallel.core.distributed_checkpoint.metadata import Metadata
from hyper_parallel.core.distributed_checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlanner,
)
from hyper_parallel.core.distributed_checkpoint.report import LoadReport
from hyper_parallel.core.distributed_checkpoint.saving import CheckpointId, prepare
from hyper_parallel.core.distributed_checkpoint.state_dict import nested
from hyper_parallel.core.distributed_checkpoint.storage import (
    StorageReader,
    StorageWriter,
)
from hyper_parallel.platform.error_codes import coded


def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: CheckpointId = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Writes a checkpoint atomically, and returns its metadata.

    ``no_dist`` saves the state of this process alone. ``use_collectives=False`` does not communicate: each rank writes
    its part into a folder that must be new, and the checkpoint is complete when all have done so.
    """
    ranks = Ranks(alone=no_dist, silent=not use_collectives)
    return prepare(
        state_dict, checkpoint_id, storage_writer, planner, ranks, before=QUEUE.drain
    ).write(ranks)


def async_save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: CheckpointId = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    no_dist: bool = False,
    when_busy: str = "queue",
) -> AsyncSaveResponse:
    """Copies the state to host memory, and writes it in the background.

    Raises the error of an earlier save whose result was not requested. While a save is in progress another one is
    queued, with its own copy, or raises a CheckpointError with ``when_busy="refuse"``.
    """
    if when_busy not in ("queue", "refuse"):
        raise coded(
            ValueError,
            "HP513",
            f"async_save: when_busy must be 'queue' or 'refuse', got {when_busy!r}",
        )
    ranks = Ranks(alone=no_dist)

    def look_back() -> None:
        QUEUE.check(refuses=when_busy == "refuse")
        if storage_writer is not None:
            QUEUE.drain()  # it writes one checkpoint at a time

    prepared = prepare(
        state_dict, checkpoint_id, storage_writer, planner, ranks, before=look_back
    )
    staged = Staged(prepared.plan, prepared.planner)
    return QUEUE.add(replace(prepared, planner=staged), staged, ranks)


def load(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: CheckpointId = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    strict: bool = True,
    dry_run: bool = False,
) -> LoadReport:
    """Fills a state dict in place, tensors in their memory and objects in their containers, and returns a report.

    Missing names raise, and with ``strict`` so do unexpected names, which no rank has; a part of the checkpoint whose
    top-level key is not requested at all is skipped. ``dry_run`` only reports.
    """
    reader = storage_reader if storage_reader is not None else reader_of(checkpoint_id)
    chosen = planner if planner is not None else StandardLoadPlanner()
    ranks = Ranks(alone=no_dist, silent=not use_collectives)
    states = States(fills=not dry_run)

    def look(plan: LoadPlan) -> None:
        if isinstance(chosen, StandardLoadPlanner) and not dry_run:
            chosen.check(strict=strict)
            reader.check_plan(plan)

    try:
        plan = ranks.together(
            lambda: planned(state_dict, checkpoint_id, reader, chosen, ranks, states)
        )
        if isinstance(chosen, StandardLoadPlanner):
            chosen.leave_to_others(ranks)
        ranks.together(lambda: look(plan))
        plan = agreed(plan, reader, chosen, ranks)
        if not dry_run:
            ranks.together(lambda: reader.execute_read(plan, chosen))
    finally:
        reader.close()
    if not dry_run:
        states.give_back()
    report = (
        chosen.report() if isinstance(chosen, StandardLoadPlanner) else LoadReport()
    )
    return replace(report, bytes_read=getattr(reader, "bytes_read", 0))


def read_metadata(checkpoint_id: str | os.PathLike[str]) -> Metadata:
    """The metadata of a checkpoint, without its data."""
    reader = reader_of(checkpoint_id)
    reader.initialize_reader(checkpoint_id)
    return reader.load_metadata()


def read_objects(checkpoint_id: str | os.PathLike[str]) -> dict[str, Any]:
    """The plain objects of a checkpoint, nested as they were saved: the step, the options of a run."""
    metadata = read_metadata(checkpoint_id)
    return nested(metadata.storage_data.objects, metadata.planner_data or {})
