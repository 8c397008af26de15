# SPDX-License-Identifier: Apache-2.0
"""Who writes what, where the ranks have different things: pipeline stages, meshes of some ranks, names of one rank.

Made from what all ranks have told, by the same pure code on each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.distributed_checkpoint.chunks import ChunkList, chunk_of
from hyper_parallel.core.distributed_checkpoint.entries import Entry
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.format import fill
from hyper_parallel.core.distributed_checkpoint.holdings import LocalState, Merge
from hyper_parallel.core.distributed_checkpoint.metadata import (
    ITEM_SIZES,
    TensorStorageMetadata,
)
from hyper_parallel.core.dtensor.geometry import Box, volume
from hyper_parallel.platform.error_codes import coded

Chunk = tuple[
    str, tuple[int, ...]
]  # the name of a tensor and the offsets of one of its chunks


@dataclass
class WriteAssignment:
    """For each rank the chunks and the objects that it writes, and what the checkpoint then holds."""

    chunks: dict[int, set[Chunk]]
    objects: dict[int, set[str]]
    tensors: dict[str, TensorStorageMetadata] = field(default_factory=dict)


def take_merged(
    everyone: Sequence[LocalState], merges: Mapping[str, Merge]
) -> dict[str, Any]:
    """Takes the objects of which ranks may have different parts away from all of them; returns them made one."""
    made = {}
    for name, merge in merges.items():
        values = [held.objects.pop(name) for held in everyone if name in held.objects]
        made[name] = merge(values)
        for held in everyone:
            held.texts.pop(name, None)
    return made


def divided(
    everyone: Sequence[LocalState],
    writers: Callable[[Iterable[Entry]], dict[str, int]],
    *,
    to_minimum_rank: bool = False,
) -> WriteAssignment:
    """Every chunk and every object once; a CheckpointError where ranks disagree about what has a name."""
    made = WriteAssignment(
        {held.rank: set() for held in everyone}, {held.rank: set() for held in everyone}
    )
    holders = _holders(everyone)
    regular = {
        name: entry
        for name, entry in _first_entries(holders)
        if _fills_its_mesh(entry, holders[name])
    }
    chosen = writers(regular.values())
    for name, entry in regular.items():
        grid = entry.grid(chosen[name])
        made.tensors[name] = entry.stored(chosen[name])
        for held in holders[name]:
            mine = (
                part
                for part in held.parts(name)
                if grid.place(part.number) == held.rank
            )
            made.chunks[held.rank].update(
                (name, tuple(offset for offset, _ in part.box)) for part in mine
            )
    _divide_the_rest(
        {n: h for n, h in holders.items() if n not in regular},
        made,
        to_minimum_rank=to_minimum_rank,
    )
    _divide_objects(everyone, made)
    return made


def _holders(everyone: Sequence[LocalState]) -> dict[str, list[LocalState]]:
    found: dict[str, list[LocalState]] = {}
    for held in everyone:
        for name in held.entries:
            found.setdefault(name, []).append(held)
    for name, holders in found.items():
        _check_alike(name, holders)
    return found


def _first_entries(holders: dict[str, list[LocalState]]) -> Iterable[tuple[str, Entry]]:
    return ((name, held[0].entries[name]) for name, held in holders.items())


def _check_alike(name: str, holders: list[LocalState]) -> None:
    kinds: dict[tuple[Any, ...], int] = {}
    for held in holders:
        entry = held.entries[name]
        kinds.setdefault((entry.dtype, entry.size), held.rank)
    if len(kinds) > 1:
        told = "; ".join(
            f"rank {rank} has {dtype} of shape {size}"
            for (dtype, size), rank in kinds.items()
        )
        raise coded(
            CheckpointError,
            "HP509",
            f"the ranks have different tensors of this name: {told}",
            field=name,
        )


def _fills_its_mesh(entry: Entry, holders: list[LocalState]) -> bool:
    """Whether the layout alone says which ranks have which chunk, and it is so."""
    return (
        all(held.entries[entry.name].cut == entry.cut for held in holders)
        and len(holders) == len(entry.cut.ranks)
        and not (
            entry.is_plain
            and len({held.entries[entry.name].sample for held in holders}) > 1
        )
    )


def _divide_the_rest(
    holders: dict[str, list[LocalState]],
    made: WriteAssignment,
    *,
    to_minimum_rank: bool,
) -> None:
    """Tensors that some ranks have and others not, or on several meshes: chunk by chunk to the one with least."""
    loads = dict.fromkeys(made.chunks, 0)
    for name, held in sorted(holders.items()):
        entry = held[0].entries[name]
        boxes: dict[Box, list[LocalState]] = {}
        for one in held:
            for part in one.parts(name):
                boxes.setdefault(part.box, []).append(one)
        _check_samples(name, boxes)
        places = []
        for box, candidates in sorted(boxes.items()):
            ranks = sorted(one.rank for one in candidates)
            rank = (
                ranks[0] if to_minimum_rank else min(ranks, key=lambda r: (loads[r], r))
            )
            loads[rank] += volume(box) * ITEM_SIZES[entry.dtype]
            places.append(rank)
            made.chunks[rank].add((name, tuple(offset for offset, _ in box)))
        chunks = ChunkList(tuple(chunk_of(box) for box in sorted(boxes)), tuple(places))
        made.tensors[name] = TensorStorageMetadata(
            entry.properties(), entry.size, chunks
        )
        _check_whole(name, entry, sorted(boxes))


def _check_samples(name: str, boxes: dict[Box, list[LocalState]]) -> None:
    """Ranks of which no layout says that they have the same must have the same."""
    for candidates in boxes.values():
        samples: dict[int | None, int] = {}
        for one in candidates:
            samples.setdefault(one.entries[name].sample, one.rank)
        if len(samples) > 1:
            ranks = sorted(samples.values())[:2]
            raise coded(
                CheckpointError,
                "HP509",
                f"ranks {ranks[0]} and {ranks[1]} have different values, and no layout says that they are parts of "
                "one tensor: give them names of their own, wrap them in PerRank, or make them a DTensor",
                field=name,
            )


def _check_whole(name: str, entry: Entry, boxes: Sequence[Box]) -> None:
    if not fill([chunk_of(box) for box in boxes], entry.size):
        have, need = (
            sum(map(volume, boxes)),
            math.prod(entry.size),
        )
        raise coded(
            CheckpointError,
            "HP509",
            f"the ranks that save have {have} of the {need} elements of this tensor, in {len(boxes)} chunks; every "
            "rank of its mesh must take part, and all must cut it alike",
            field=name,
        )


def _divide_objects(everyone: Sequence[LocalState], made: WriteAssignment) -> None:
    first: dict[str, LocalState] = {}
    for held in everyone:
        for name, text in held.texts.items():
            before = first.setdefault(name, held)
            if before.texts[name] != text:
                raise coded(
                    CheckpointError,
                    "HP509",
                    f"rank {before.rank} has {before.texts[name]:.60}, rank {held.rank} has {text:.60}: objects "
                    "must be the same on all ranks; wrap what each rank has its own of in PerRank",
                    field=name,
                )
    for name, held in first.items():
        made.objects[held.rank].add(name)
    clash = sorted(set(first) & set(made.tensors))
    if clash:
        raise coded(
            CheckpointError,
            "HP509",
            "is a tensor on some ranks and an object on others",
            field=clash[0],
        )
