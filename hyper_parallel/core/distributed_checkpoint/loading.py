# SPDX-License-Identifier: Apache-2.0
"""The steps of a load: read the metadata, plan, check, fill, give back. What fails on one rank fails on all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hyper_parallel.core.distributed_checkpoint.agreement import Ranks
from hyper_parallel.core.distributed_checkpoint.hugging_face import reader_for
from hyper_parallel.core.distributed_checkpoint.load_planner import StandardLoadPlanner
from hyper_parallel.core.distributed_checkpoint.metadata import Metadata, Path
from hyper_parallel.core.distributed_checkpoint.planner import LoadPlan, LoadPlanner
from hyper_parallel.core.distributed_checkpoint.state_dict import dotted
from hyper_parallel.core.distributed_checkpoint.storage import StorageReader
from hyper_parallel.platform.error_codes import coded


class States:
    """The states of stateful values while they are being filled."""

    def __init__(self, *, fills: bool) -> None:
        self._fills = fills
        self._taken: list[tuple[Any, Any]] = []
        self.metadata: Metadata | None = None

    def __call__(self, path: Path, value: Any) -> Any:
        """The state to be filled; the value may first make room for what was saved."""
        if (
            self._fills
            and self.metadata is not None
            and callable(getattr(value, "expect", None))
        ):
            prefix = dotted(path) + "."
            saved = self.metadata.state_dict_metadata.items()
            value.expect(
                {
                    name.removeprefix(prefix): entry
                    for name, entry in saved
                    if name.startswith(prefix)
                }
            )
        self._taken.append((value, value.state_dict()))
        return self._taken[-1][1]

    def give_back(self) -> None:
        for value, state in self._taken:
            value.load_state_dict(state)


def reader_of(checkpoint_id: str | os.PathLike[str] | None) -> StorageReader:
    if checkpoint_id is None:
        raise coded(
            ValueError,
            "HP513",
            "load: expected checkpoint_id (a folder) or storage_reader, got neither",
        )
    return reader_for(checkpoint_id)


def planned(
    state_dict: Mapping[str, Any],
    checkpoint_id: str | os.PathLike[str] | None,
    reader: StorageReader,
    planner: LoadPlanner,
    ranks: Ranks,
    states: States,
) -> LoadPlan:
    reader.initialize_reader(checkpoint_id)
    metadata = reader.load_metadata()
    reader.configure_reader(metadata, ranks.is_coordinator)
    states.metadata = metadata
    planner.configure_planner(
        state_dict, metadata, rank=ranks.rank, world_size=ranks.world_size, state=states
    )
    return reader.optimize_local_plan(planner.build_local_plan())


def agreed(
    plan: LoadPlan, reader: StorageReader, planner: LoadPlanner, ranks: Ranks
) -> LoadPlan:
    """What this rank reads; only a planner of the user's own may want to know what the others read."""
    if isinstance(planner, StandardLoadPlanner):
        return planner.finalize_plan(plan)
    plans = planner.build_global_plan(ranks.gather(plan))
    return planner.finalize_plan(reader.optimize_global_plan(plans)[ranks.rank])
