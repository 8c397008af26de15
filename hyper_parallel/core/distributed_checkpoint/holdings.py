# SPDX-License-Identifier: Apache-2.0
"""What a rank has of a state dict, sorted into tensors, objects, and what each rank has its own of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from hyper_parallel.core.distributed_checkpoint import codec
from hyper_parallel.core.distributed_checkpoint.chunks import Part
from hyper_parallel.core.distributed_checkpoint.entries import (
    Entry,
    digest,
    entry_of,
    row_on_each,
    sampled,
)
from hyper_parallel.core.distributed_checkpoint.metadata import Path
from hyper_parallel.core.distributed_checkpoint.state_dict import flattened, unwrapped
from hyper_parallel.platform import get_platform

Merge = Callable[[Sequence[Any]], Any]


@dataclass
class LocalState:
    """One rank's part of a state dict. Without ``tensors`` it is facts that can be sent to others."""

    rank: int
    entries: dict[str, Entry] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    own_objects: dict[str, Any] = field(default_factory=dict)  # each rank has another
    same_as: dict[str, str] = field(
        default_factory=dict
    )  # tied to the tensor of another name
    paths: dict[str, Path] = field(
        default_factory=dict
    )  # where that is not the name alone
    texts: dict[str, str] = field(
        default_factory=dict
    )  # the objects as they are stored
    tensors: dict[str, Any] = field(
        default_factory=dict
    )  # the plain tensor on this rank
    merges: dict[str, Merge] = field(
        default_factory=dict
    )  # makes one object of those that the ranks have

    def facts(self) -> LocalState:
        """The same without data, with samples of the tensors' bytes to compare."""
        entries = {
            name: replace(entry, sample=sampled(self.tensors[name]))
            for name, entry in self.entries.items()
        }
        return replace(self, entries=entries, tensors={}, merges={})

    def fingerprint(self, *more: Any) -> bytes:
        """What is equal on all ranks if each can tell by itself what the others have."""
        # Nothing but their names says that plain tensors are the same everywhere.
        plain = [
            name
            for name, entry in self.entries.items()
            if entry.is_plain and name in self.tensors
        ]
        samples = {name: sampled(self.tensors[name]) for name in plain}
        own = sorted(self.own_objects)
        return digest(
            self.structure, samples, self.texts, own, self.same_as, self.paths, more
        )

    @cached_property
    def structure(self) -> bytes:
        """What stands for the names, sizes, dtypes and layouts of the tensors."""
        return digest(list(self.entries.values()))

    def parts(self, name: str) -> list[Part]:
        """The chunks of a tensor that are on this rank."""
        entry = self.entries[name]
        coordinate = entry.cut.coordinate(self.rank)
        return [] if coordinate is None else list(entry.grid().parts_at(coordinate))

    def data(self, name: str, offsets: tuple[int, ...]) -> Any:
        """The plain tensor of one of these chunks."""
        local = self.tensors[name]
        if not self.entries[name].cut.irregular:
            return local
        part = next(
            p
            for p in self.parts(name)
            if tuple(offset for offset, _ in p.box) == offsets
        )
        return local[
            tuple(
                slice(start, start + size)
                for start, (_, size) in zip(part.start, part.box, strict=True)
            )
        ]


def holdings_of(
    state_dict: Mapping[str, Any],
    rank: int,
    world_size: int,
    *,
    allow_pickle: bool = False,
    find_ties: bool = True,
) -> LocalState:
    """What this rank has; objects that cannot be stored are refused here, before anything is written."""
    platform, made = get_platform(), LocalState(rank)
    known: dict[Any, str] = {}
    for name, leaf in sorted(flattened(state_dict).items()):
        if leaf.path != (name,):
            made.paths[name] = leaf.path
        value, is_own = unwrapped(leaf.value)
        if hasattr(value, "merge_ranks"):
            made.merges[name] = value.merge_ranks
            value = tuple(value)
        if not platform.is_tensor(value):
            encoded = codec.encode(value, name, allow_pickle=allow_pickle)
            (made.own_objects if is_own else made.objects)[name] = value
            if not is_own:
                made.texts[name] = json.dumps(encoded)
            continue
        entry = entry_of(name, value, world_size)
        key = (
            (platform.memory_key(value), getattr(value, "layout", None))
            if find_ties and not is_own
            else name
        )
        if key in known:
            made.same_as[name] = known[key]
            continue
        known[key] = name
        made.tensors[name] = platform.get_param_local_data(value)
        made.entries[name] = _row(entry, world_size) if is_own else entry
        if is_own:
            made.tensors[name] = made.tensors[name].reshape(1, *entry.size)
    return made


def _row(entry: Entry, world_size: int) -> Entry:
    """The entry of what each rank has its own of: rows of one tensor."""
    size = (world_size, *entry.size)
    return replace(entry, size=size, cut=row_on_each(world_size, len(size)))
