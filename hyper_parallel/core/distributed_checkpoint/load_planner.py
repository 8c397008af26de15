# SPDX-License-Identifier: Apache-2.0
"""Fills a state dict in place from a checkpoint of any layout, and records the outcome for each name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hyper_parallel.core.distributed_checkpoint.agreement import Ranks
from hyper_parallel.core.distributed_checkpoint.chunks import ChunkGrid, Part
from hyper_parallel.core.distributed_checkpoint.entries import Entry, entry_of
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.metadata import (
    ITEM_SIZES,
    Metadata,
    MetadataIndex,
    Path,
    TensorStorageMetadata,
    dtype_name,
)
from hyper_parallel.core.distributed_checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from hyper_parallel.core.distributed_checkpoint.report import LoadReport, some
from hyper_parallel.core.distributed_checkpoint.resharding import Filling, filling
from hyper_parallel.core.distributed_checkpoint.state_dict import (
    Leaf,
    PerRank,
    flattened,
    place,
    state_of,
    unwrapped,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded


class StandardLoadPlanner(LoadPlanner):
    """Reads what overlaps this rank's shards. ``allow_partial_load=True`` skips missing names."""

    def __init__(self, allow_partial_load: bool = False) -> None:
        self.allow_partial_load = allow_partial_load

    def configure_planner(
        self, state_dict: Mapping[str, Any], metadata: Metadata, **kwargs: Any
    ) -> None:
        self._rank: int = kwargs.get("rank", 0)
        self._world: int = kwargs.get("world_size", 1)
        state: Callable[[Path, Any], Any] = kwargs.get("state", state_of)
        self._metadata = metadata
        self._saved = metadata.state_dict_metadata
        self._asked = set(state_dict)
        self._of_others: set[str] = set()
        self._leaves = flattened(state_dict, state)
        self._fillings: dict[Any, tuple[Filling, Any]] = {}
        self._parts: dict[str, dict[tuple[int, ...], Part]] = {}
        self._locals: dict[str, Any] = {}
        self._direct: Any = None  # what was handed out last to be filled where it is
        self._found: dict[str, list[str]] = {
            kind: [] for kind in ("loaded", "missing", "resharded", "cast", "kept")
        }
        self._bytes = 0

    def build_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, leaf in self._leaves.items():
            if name in self._saved:
                items.extend(self._items(name, leaf))
            else:
                self._found["missing"].append(name)
        self._take_tied()
        return LoadPlan(items)

    def build_global_plan(self, all_plans: Sequence[LoadPlan]) -> list[LoadPlan]:
        return list(all_plans)

    def finalize_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def leave_to_others(self, ranks: Ranks) -> None:
        """Skips names that other ranks ask for, such as those of other stages; all ranks call this."""
        unexpected = set(self.report().unexpected)
        if ranks.all_reduce_max([len(unexpected)]) != [0]:
            of_nobody = set.intersection(*ranks.gather(unexpected))
            self._of_others = unexpected - of_nobody

    def report(self) -> LoadReport:
        """What is, or would be, loaded."""
        unknown = [name for name in self._saved if name not in self._leaves]
        skipped = {name for name in unknown if self._is_elsewhere(name)}
        skipped |= self._of_others
        found: dict[str, Any] = {
            kind: tuple(names) for kind, names in self._found.items()
        }
        unexpected = tuple(name for name in unknown if name not in skipped)
        return LoadReport(
            **found,
            skipped=tuple(sorted(skipped)),
            unexpected=unexpected,
            bytes=self._bytes,
        )

    def check(self, *, strict: bool) -> None:
        """Raises a CheckpointError for missing names and, if strict, for unexpected names."""
        report = self.report()
        if report.missing and not self.allow_partial_load:
            near = difflib.get_close_matches(report.missing[0], report.unexpected, 3)
            hint = f"; near names in it are {', '.join(near)}" if near else ""
            raise coded(
                CheckpointError,
                "HP507",
                f"{len(report.missing)} names are not in the checkpoint: {some(report.missing)}{hint}; "
                "StandardLoadPlanner(allow_partial_load=True) leaves such as they are",
            )
        if report.unexpected and strict:
            raise coded(
                CheckpointError,
                "HP507",
                f"{len(report.unexpected)} names of the checkpoint were not asked for: {some(report.unexpected)}; "
                "strict=False loads without them",
            )

    # --- one name

    def _items(self, name: str, leaf: Leaf) -> list[ReadItem]:
        saved = self._saved[name]
        value, _ = unwrapped(leaf.value)
        if get_platform().is_tensor(value) != isinstance(saved, TensorStorageMetadata):
            have, want = (
                ("a tensor", "an object")
                if isinstance(saved, TensorStorageMetadata)
                else ("an object", "a tensor")
            )
            raise coded(
                CheckpointError,
                "HP508",
                f"the checkpoint has {have}, the state dict {want}",
                field=name,
            )
        if not isinstance(saved, TensorStorageMetadata):
            self._found["loaded"].append(name)
            index = MetadataIndex(name)
            return [ReadItem(LoadItemType.BYTE_IO, index, (), index, (), ())]
        return self._tensor_items(name, leaf.value, value, saved)

    def _tensor_items(
        self, name: str, wanted: Any, tensor: Any, saved: TensorStorageMetadata
    ) -> list[ReadItem]:
        entry = entry_of(name, tensor, self._world)
        local = get_platform().get_param_local_data(tensor)
        if isinstance(wanted, PerRank):
            return self._row_items(name, entry, local, saved)
        self._check(name, entry, entry.size, saved)
        return self._filled(name, local, self._filling(entry, saved), saved)

    def _row_items(
        self, name: str, entry: Entry, local: Any, saved: TensorStorageMetadata
    ) -> list[ReadItem]:
        """What fills the row that is this rank's own."""
        rows = saved.size[0] if saved.size else 0
        self._check(name, entry, (rows, *entry.size), saved)
        if self._rank >= rows:
            self._found["kept"].append(name)
            return []
        parts = [
            Part(p.number, ((self._rank, 1), *p.box), (0, *p.start))
            for p in self._parts_of(entry)
        ]
        return self._filled(
            name, local.reshape(1, *local.shape), filling(parts, saved.chunks), saved
        )

    def _filling(self, entry: Entry, saved: TensorStorageMetadata) -> Filling:
        """Found once for all tensors that are alike: most of a model's are."""
        if not isinstance(saved.chunks, ChunkGrid):
            return filling(self._parts_of(entry), saved.chunks)
        cuts = (entry.cut, saved.chunks.cut)
        key = (entry.size, *map(id, cuts))
        if key not in self._fillings:  # with the cuts, so that no others get their ids
            self._fillings[key] = (filling(self._parts_of(entry), saved.chunks), cuts)
        return self._fillings[key][0]

    def _parts_of(self, entry: Entry) -> Iterable[Part]:
        coordinate = entry.cut.coordinate(self._rank)
        return () if coordinate is None else entry.grid().parts_at(coordinate)

    def _filled(
        self, name: str, local: Any, found: Filling, saved: TensorStorageMetadata
    ) -> list[ReadItem]:
        if not found.is_whole:
            raise coded(
                CheckpointError,
                "HP508",
                "the checkpoint does not have all elements of this tensor",
                field=name,
            )
        self._locals[name], self._parts[name] = local, found.parts
        self._found["loaded"].append(name)
        if not found.is_as_stored:
            self._found["resharded"].append(name)
        self._bytes += found.volume * ITEM_SIZES[dtype_name(saved.properties.dtype)]
        return [source.item(name, saved.stored_as) for source in found.sources]

    def _check(
        self,
        name: str,
        entry: Entry,
        size: tuple[int, ...],
        saved: TensorStorageMetadata,
    ) -> None:
        if tuple(saved.size) != size:
            raise coded(
                CheckpointError,
                "HP508",
                f"the checkpoint has shape {tuple(saved.size)}, the state dict {size}",
                field=name,
            )
        self._check_dtype(name, entry.dtype, saved)

    def _check_dtype(self, name: str, dtype: str, saved: TensorStorageMetadata) -> None:
        stored = dtype_name(saved.properties.dtype)
        if stored == dtype:
            return
        if "float" not in stored or "float" not in dtype:
            raise coded(
                CheckpointError,
                "HP508",
                f"the checkpoint has {stored}, the state dict {dtype}; only floating-point numbers are cast",
                field=name,
            )
        self._found["cast"].append(name)

    def _take_tied(self) -> None:
        """A name that is not there, but is the same memory as one that is, is filled with it."""
        platform, found = get_platform(), set()
        for name in self._locals:
            found.add(platform.memory_key(self._locals[name]))
        for name in list(self._found["missing"]):
            value = self._leaves[name].value
            if (
                platform.is_tensor(value)
                and platform.memory_key(platform.get_param_local_data(value)) in found
            ):
                self._found["missing"].remove(name)
                self._found["loaded"].append(name)

    def _is_elsewhere(self, name: str) -> bool:
        """Whether a name lies under a key at the top of the saved state dict that nobody asked for."""
        path = (self._metadata.planner_data or {}).get(name, (name,))
        return len(path) > 1 and path[0] not in self._asked

    # --- memory

    def acquire_tensor(self, read_item: ReadItem) -> Any:
        view, saved = self._view(read_item), self._saved[read_item.dest_index.fqn]
        assert isinstance(saved, TensorStorageMetadata)
        platform, dtype = get_platform(), dtype_name(saved.properties.dtype)
        if dtype_name(view.dtype) == dtype and platform.tensor_memory(view) is not None:
            self._direct = view
            return view
        return platform.empty(
            read_item.lengths, dtype=platform.str_to_dtype(dtype), device="cpu"
        )

    def apply_tensor(self, read_item: ReadItem, tensor: Any) -> None:
        if tensor is self._direct:
            get_platform().note_change(
                tensor
            )  # which was filled behind the framework's back
        else:
            get_platform().load_into_param(self._view(read_item), tensor)

    def apply_bytes(self, read_item: ReadItem, value: Any) -> None:
        leaf = self._leaves[read_item.dest_index.fqn]
        if not isinstance(leaf.value, PerRank):
            place(leaf, value)
        elif isinstance(value, dict) and self._rank in value:
            place(leaf, PerRank(value[self._rank]))
        else:
            self._found["loaded"].remove(read_item.dest_index.fqn)
            self._found["kept"].append(read_item.dest_index.fqn)

    def _view(self, item: ReadItem) -> Any:
        """The elements of this rank's shard that an item fills."""
        part = self._parts[item.dest_index.fqn][item.dest_index.offset]
        starts = [
            start + offset
            for start, offset in zip(part.start, item.dest_offsets, strict=True)
        ]
        inside = tuple(
            slice(start, start + size)
            for start, size in zip(starts, item.lengths, strict=True)
        )
        return self._locals[item.dest_index.fqn][inside]
