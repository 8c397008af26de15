# SPDX-License-Identifier: Apache-2.0
"""The planners that `save` and `load` use: any layout to any layout, planned locally if the layouts suffice.

planner = StandardSavePlanner()
planner.configure_planner(state_dict, rank=3, world_size=8)
plan, metadata = planner.plan_alone()       if planner.fingerprint() is the same on all ranks; otherwise
plans, metadata = planner.build_global_plan(all_plans)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hyper_parallel.core.distributed_checkpoint.entries import Entry, writers
from hyper_parallel.core.distributed_checkpoint.global_plan import (
    WriteAssignment,
    divided,
    take_merged,
)
from hyper_parallel.core.distributed_checkpoint.holdings import LocalState, holdings_of
from hyper_parallel.core.distributed_checkpoint.load_planner import StandardLoadPlanner
from hyper_parallel.core.distributed_checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from hyper_parallel.core.distributed_checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)

__all__ = ["StandardLoadPlanner", "StandardSavePlanner"]

_Planned = tuple[list[WriteItem], dict[str, TensorStorageMetadata]]
_PLANS: OrderedDict[Any, _Planned] = OrderedDict()
_MOST_PLANS = 16


class StandardSavePlanner(SavePlanner):
    """Writes every chunk once, spread by bytes over the ranks that have it.

    With ``remove_redundancy=False`` every rank writes all of its chunks; with ``save_to_minimum_rank=True`` the lowest
    rank that has a chunk writes it. ``allow_pickle=True`` pickles objects that JSON cannot represent.
    """

    def __init__(
        self,
        enable_plan_caching: bool = True,
        remove_redundancy: bool = True,
        save_to_minimum_rank: bool = False,
        *,
        allow_pickle: bool = False,
    ) -> None:
        self.enable_plan_caching = enable_plan_caching
        self.remove_redundancy = remove_redundancy
        self.save_to_minimum_rank = save_to_minimum_rank
        self.allow_pickle = allow_pickle

    def configure_planner(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        self._rank: int = kwargs.get("rank", 0)
        self._world: int = kwargs.get("world_size", 1)
        self._gather: Callable[[Any], list[Any]] = kwargs.get(
            "gather", lambda value: [value]
        )
        self._state_dict = state_dict
        self._held = self._look(find_ties=True)

    def _look(self, *, find_ties: bool) -> LocalState:
        return holdings_of(
            self._state_dict,
            self._rank,
            self._world,
            allow_pickle=self.allow_pickle,
            find_ties=find_ties,
        )

    # --- alone

    def fingerprint(self) -> bytes:
        """What is the same on all ranks if each of them can plan by itself."""
        return self._held.fingerprint(
            self._world, self.remove_redundancy, self.save_to_minimum_rank
        )

    def plan_alone(self) -> tuple[SavePlan, Metadata]:
        """This rank's plan, and what the checkpoint holds, if all ranks have the same names in the same layouts."""
        items, tensors = self._planned()
        objects = self._held.objects | self._of_all_ranks()
        if self._rank == 0:
            items = [*items, *_object_items(objects)]
        tied = {
            name: replace(tensors[other], stored_as=other)
            for name, other in self._held.same_as.items()
        }
        return SavePlan(items), _metadata(tensors | tied, objects, self._held.paths)

    def _planned(self) -> _Planned:
        """The part that depends on names and layouts alone, which is remembered."""
        key = (
            self._held.structure,
            self._rank,
            self._world,
            self.remove_redundancy,
            self.save_to_minimum_rank,
        )
        found = _PLANS.get(key) if self.enable_plan_caching else None
        if found is None:
            found = plan_for(
                self._held.entries.values(),
                self._rank,
                self._writers,
                once=self.remove_redundancy,
            )
        if self.enable_plan_caching:
            _PLANS[key] = found
            _PLANS.move_to_end(key)
            while len(_PLANS) > _MOST_PLANS:
                _PLANS.popitem(last=False)
        return found

    def _writers(self, entries: Iterable[Entry]) -> dict[str, int]:
        return (
            {entry.name: 0 for entry in entries}
            if self.save_to_minimum_rank
            else writers(entries)
        )

    def _of_all_ranks(self) -> dict[str, dict[int, Any]]:
        """What each rank has its own of, by rank."""
        if not self._held.own_objects:
            return {}
        everyone = self._gather((self._rank, self._held.own_objects))
        return {
            name: {rank: own[name] for rank, own in everyone}
            for name in self._held.own_objects
        }

    # --- together

    def build_local_plan(self) -> SavePlan:
        self._held = self._look(find_ties=False)
        items = [
            item
            for entry in self._held.entries.values()
            for item in _items(entry, self._rank, None)
        ]
        return SavePlan(
            [*items, *_object_items(self._held.objects)],
            planner_data=self._held.facts(),
        )

    def build_global_plan(
        self, all_plans: Sequence[SavePlan]
    ) -> tuple[list[SavePlan], Metadata]:
        everyone: list[LocalState] = [plan.planner_data for plan in all_plans]
        merged = take_merged(everyone, self._held.merges)
        division = divided(
            everyone, self._writers, to_minimum_rank=self.save_to_minimum_rank
        )
        paths = {name: path for held in everyone for name, path in held.paths.items()}
        owned = {**_by_name(everyone), **merged}
        plans = [
            SavePlan(
                [
                    item
                    for item in plan.items
                    if self._is_kept(item, held.rank, division)
                ]
            )
            for held, plan in zip(everyone, all_plans, strict=True)
        ]
        plans[0] = SavePlan([*plans[0].items, *_object_items(owned)])
        names = {name: None for held in everyone for name in (*held.objects, *owned)}
        return plans, _metadata(division.tensors, names, paths)

    def _is_kept(self, item: WriteItem, rank: int, division: WriteAssignment) -> bool:
        if item.type is WriteItemType.BYTE_IO:
            return item.index.fqn in division.objects[rank]
        return (
            not self.remove_redundancy
            or (item.index.fqn, item.index.offset) in division.chunks[rank]
        )

    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def get_data(self, item: WriteItem) -> Any:
        if item.type is WriteItemType.BYTE_IO:
            return item.bytes_io_data
        return self._held.data(item.index.fqn, item.index.offset)


def plan_for(
    entries: Iterable[Entry],
    rank: int,
    writers: Callable[[Iterable[Entry]], dict[str, int]],
    *,
    once: bool = True,
) -> _Planned:
    """What a rank writes of these tensors, and what the checkpoint then holds; it takes no longer on more ranks."""
    known = list(entries)
    chosen = writers(known)
    items = [
        item
        for entry in known
        for item in _items(entry, rank, chosen[entry.name] if once else None)
    ]
    return items, {entry.name: entry.stored(chosen[entry.name]) for entry in known}


def _items(entry: Entry, rank: int, replica: int | None) -> list[WriteItem]:
    """What a rank has of a tensor, if it is the one of several that have it, or whichever that is."""
    coordinate = entry.cut.coordinate(rank)
    if coordinate is None or (
        replica is not None and entry.cut.replica_of(coordinate) != replica
    ):
        return []
    return list(entry.items_at(coordinate))


def _object_items(objects: Mapping[str, Any]) -> list[WriteItem]:
    return [
        WriteItem(MetadataIndex(n), WriteItemType.BYTE_IO, bytes_io_data=value)
        for n, value in objects.items()
    ]


def _by_name(everyone: Sequence[LocalState]) -> dict[str, dict[int, Any]]:
    found: dict[str, dict[int, Any]] = {}
    for held in everyone:
        for name, value in held.own_objects.items():
            found.setdefault(name, {})[held.rank] = value
    return found


def _metadata(
    tensors: Mapping[str, TensorStorageMetadata],
    objects: Iterable[str],
    paths: Mapping[str, Any],
) -> Metadata:
    entries: dict[str, Any] = {
        **tensors,
        **{name: BytesStorageMetadata() for name in objects},
    }
    return Metadata(
        dict(sorted(entries.items())), planner_data=dict(sorted(paths.items()))
    )
