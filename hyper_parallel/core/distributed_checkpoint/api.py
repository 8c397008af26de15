# SPDX-License-Identifier: Apache-2.0
"""`save`, `load` and `async_save`: called on all ranks, with the state dict that each of them has.

save({"model": model, "step": 100}, checkpoint_id="runs/a/step-100")
report = load({"model": model, "step": 0}, checkpoint_id="runs/a/step-100")
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hyper_parallel.core.distributed_checkpoint.agreement import Ranks
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.filesystem import FileSystemReader, FileSystemWriter, new_tag
from hyper_parallel.core.distributed_checkpoint.load_planner import StandardLoadPlanner
from hyper_parallel.core.distributed_checkpoint.metadata import Metadata, Path
from hyper_parallel.core.distributed_checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from hyper_parallel.core.distributed_checkpoint.report import LoadReport
from hyper_parallel.core.distributed_checkpoint.standard_planner import StandardSavePlanner
from hyper_parallel.core.distributed_checkpoint.state_dict import dotted
from hyper_parallel.core.distributed_checkpoint.storage import SaveRun, StorageReader, StorageWriter, WriteResult

CheckpointId = str | os.PathLike[str] | None


def save(
    state_dict: Mapping[str, Any],
    *,
    checkpoint_id: CheckpointId = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Writes a checkpoint, which appears whole or not at all, and returns what it holds.

    ``no_dist`` saves what this process has, without the others. ``use_collectives=False`` does not talk to the others:
    each writes its part, into a folder that must be new, and the checkpoint is whole when all have.
    """
    ranks = Ranks(alone=no_dist, silent=not use_collectives)
    prepared = prepare(state_dict, checkpoint_id, storage_writer, planner, ranks)
    return prepared.write(ranks)


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
    """Fills a state dict in place: tensors in their memory, objects in their containers, and returns what it did.

    Names that are missing are an error, and, if ``strict``, names beside those asked for; a part of the checkpoint whose
    key at the top is not asked for at all is left alone. ``dry_run`` reads the metadata only, and changes nothing.
    """
    reader = storage_reader if storage_reader is not None else _reader(checkpoint_id)
    chosen = planner if planner is not None else StandardLoadPlanner()
    ranks = Ranks(alone=no_dist, silent=not use_collectives)
    states = _States(fills=not dry_run)
    plan = ranks.together(lambda: _plan_load(state_dict, checkpoint_id, reader, chosen, ranks, states))
    plan = _agreed_load(plan, reader, chosen, ranks)
    if isinstance(chosen, StandardLoadPlanner) and not dry_run:
        ranks.together(lambda: chosen.check(strict=strict))
    if not dry_run:
        ranks.together(lambda: reader.execute_read(plan, chosen))
        states.give_back()
    report = chosen.report() if isinstance(chosen, StandardLoadPlanner) else LoadReport()
    return replace(report, bytes_read=getattr(reader, "bytes_read", 0))


def read_metadata(checkpoint_id: str | os.PathLike[str]) -> Metadata:
    """What a checkpoint holds, without its data."""
    reader = _reader(checkpoint_id)
    reader.initialize_reader(checkpoint_id)
    return reader.load_metadata()


# --- saving


@dataclass(frozen=True)
class Prepared:
    """A save of which all is known and nothing written."""

    plan: SavePlan
    planner: SavePlanner
    writer: StorageWriter
    metadata: Metadata
    is_alike: bool  # all ranks have the same names in the same layouts, so the coordinator knows all objects

    def write(self, ranks: Ranks) -> Metadata:
        """Writes it, on all ranks; when this returns the checkpoint is whole."""
        results = ranks.together(lambda: self.writer.execute_write(self.plan, self.planner), self.writer.abandon)
        everyone = [results] if self.is_alike else ranks.gather(results)
        return ranks.together(lambda: self._finalized(everyone, ranks))

    def _finalized(self, results: list[list[WriteResult]], ranks: Ranks) -> Metadata:
        return self.writer.finalize_checkpoint(self.metadata, results) if ranks.is_coordinator else self.metadata


def prepare(
    state_dict: Mapping[str, Any],
    checkpoint_id: CheckpointId,
    storage_writer: StorageWriter | None,
    planner: SavePlanner | None,
    ranks: Ranks,
) -> Prepared:
    """Plans a save: each rank by itself if they all have the same, else from what they tell each other."""
    if storage_writer is None and checkpoint_id is None:
        raise ValueError("save: expected checkpoint_id (a folder) or storage_writer, got neither")
    writer = storage_writer if storage_writer is not None else FileSystemWriter()
    chosen = planner if planner is not None else StandardSavePlanner()

    def look() -> bytes | None:
        writer.initialize_writer(checkpoint_id)
        writer.configure_writer(ranks.is_coordinator)
        options = {"rank": ranks.rank, "world_size": ranks.world_size, "is_coordinator": ranks.is_coordinator}
        chosen.configure_planner(state_dict, gather=ranks.gather, **options)
        return chosen.fingerprint() if isinstance(chosen, StandardSavePlanner) else None

    fingerprint = ranks.together(look)
    is_alike, token = ranks.agree(fingerprint or bytes(16), new_tag())
    if isinstance(chosen, StandardSavePlanner) and is_alike:
        plan, metadata = chosen.plan_alone()
    else:
        plan, metadata = _plan_together(writer, chosen, ranks)
        is_alike = False
    return Prepared(replace(plan, storage_data=SaveRun(token, ranks.rank, ranks.world_size)), chosen, writer, metadata, is_alike)


def _plan_together(writer: StorageWriter, planner: SavePlanner, ranks: Ranks) -> tuple[SavePlan, Metadata]:
    if ranks.is_silent and ranks.world_size > 1:
        raise CheckpointError("use_collectives=False needs a planner that plans alone, and the same names on all ranks")
    local = ranks.together(lambda: writer.optimize_local_plan(planner.build_local_plan()))
    everyone = ranks.gather(local)
    plans, metadata = ranks.together(lambda: planner.build_global_plan(everyone))
    return planner.finalize_plan(writer.optimize_global_plan(plans)[ranks.rank]), metadata


# --- loading


class _States:
    """The states of stateful values while they are being filled."""

    def __init__(self, *, fills: bool) -> None:
        self._fills = fills
        self._taken: list[tuple[Any, Any]] = []
        self.metadata: Metadata | None = None

    def __call__(self, path: Path, value: Any) -> Any:
        """The state to be filled; the value may first make room for what was saved."""
        if self._fills and self.metadata is not None and callable(getattr(value, "expect", None)):
            prefix = dotted(path) + "."
            saved = self.metadata.state_dict_metadata.items()
            value.expect({name.removeprefix(prefix): entry for name, entry in saved if name.startswith(prefix)})
        self._taken.append((value, value.state_dict()))
        return self._taken[-1][1]

    def give_back(self) -> None:
        for value, state in self._taken:
            value.load_state_dict(state)


def _reader(checkpoint_id: CheckpointId) -> StorageReader:
    if checkpoint_id is None:
        raise ValueError("load: expected checkpoint_id (a folder) or storage_reader, got neither")
    return FileSystemReader(checkpoint_id)


def _plan_load(
    state_dict: Mapping[str, Any],
    checkpoint_id: CheckpointId,
    reader: StorageReader,
    planner: LoadPlanner,
    ranks: Ranks,
    states: Callable[[Path, Any], Any],
) -> LoadPlan:
    reader.initialize_reader(checkpoint_id)
    metadata = reader.load_metadata()
    reader.configure_reader(metadata, ranks.is_coordinator)
    if isinstance(states, _States):
        states.metadata = metadata
    planner.configure_planner(state_dict, metadata, rank=ranks.rank, world_size=ranks.world_size, state=states)
    return reader.optimize_local_plan(planner.build_local_plan())


def _agreed_load(plan: LoadPlan, reader: StorageReader, planner: LoadPlanner, ranks: Ranks) -> LoadPlan:
    """What this rank reads; only a planner of the user's own may want to know what the others read."""
    if isinstance(planner, StandardLoadPlanner):
        return planner.finalize_plan(plan)
    plans = planner.build_global_plan(ranks.gather(plan))
    return planner.finalize_plan(reader.optimize_global_plan(plans)[ranks.rank])
