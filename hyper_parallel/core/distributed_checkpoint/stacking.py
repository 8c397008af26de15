# SPDX-License-Identifier: Apache-2.0
"""Tensors of files that are slices of one tensor of the state dict, such as the experts of a mixture.

experts.3.w2 of the files   ->   SliceOf("experts.down_proj", 3)            chunk (3, 0, 0) of down_proj
experts.3.w3 of the files   ->   SliceOf("experts.gate_up_proj", 3, 1)      after experts.3.w1, which is part 0
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hyper_parallel.core.distributed_checkpoint.chunks import ChunkList, Place
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.header import Entry
from hyper_parallel.core.distributed_checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from hyper_parallel.core.distributed_checkpoint.strict_json import quoted
from hyper_parallel.platform.error_codes import coded


@dataclass(frozen=True)
class SliceOf:
    """What ``rename`` returns for a tensor that is a slice of a larger one: slice ``index`` of ``name`` along dim 0.

    Several tensors may make up one slice: they are its parts 0, 1, ..., concatenated along ``dim`` of the slice.
    """

    name: str
    index: int
    part: int = 0
    dim: int = 0


ReadRename = Callable[[str], str | SliceOf] | Mapping[str, str | SliceOf] | None
Start = tuple[int, ...]  # where a chunk begins in its tensor


@dataclass(frozen=True)
class Found:
    """A tensor of the files, and what it is in the state dict."""

    entry: Entry
    place: Place
    target: str | SliceOf
    path: Path

    def fail(self, told: str) -> NoReturn:
        """Raises about this tensor."""
        raise coded(
            CheckpointError, "HP516", told, file=self.path, field=self.entry.key
        )


@dataclass(frozen=True)
class _Whole:
    """A tensor of the state dict: its size, and the tensors of the files by where they begin in it."""

    size: tuple[int, ...]
    chunks: dict[Start, Found]


def apply_rename(rename: ReadRename, name: str) -> str | SliceOf:
    """What a tensor of the files is in the state dict."""
    if rename is None:
        return name
    target = rename(name) if callable(rename) else rename.get(name, name)
    if isinstance(target, SliceOf):
        if min(target.index, target.part) < 0:
            raise coded(
                ValueError,
                "HP513",
                f"rename: index and part of a SliceOf count from 0, got {target}",
            )
        return target
    if type(target) is not str:
        raise coded(
            ValueError,
            "HP513",
            f"rename: expected a str or a SliceOf for {name!r}, got {target!r}",
        )
    return target


def put_together(
    tensors: Mapping[str, Sequence[Found]],
) -> tuple[dict[str, TensorStorageMetadata], dict[tuple[str, Start], str]]:
    """The tensors of the state dict, and what each of their chunks is called in the files."""
    known: dict[str, TensorStorageMetadata] = {}
    keys: dict[tuple[str, Start], str] = {}
    for name, found in tensors.items():
        is_stack = any(isinstance(one.target, SliceOf) for one in found)
        whole = _stack(name, found) if is_stack else _take_one(name, found)
        outer = (1,) if is_stack else ()
        chunks = [
            ChunkStorageMetadata(start, outer + one.entry.shape)
            for start, one in whole.chunks.items()
        ]
        places = [one.place for one in whole.chunks.values()]
        properties = TensorProperties(found[0].entry.dtype)
        known[name] = TensorStorageMetadata(
            properties, whole.size, ChunkList(tuple(chunks), tuple(places))
        )
        keys.update(
            {(name, start): one.entry.key for start, one in whole.chunks.items()}
        )
    return known, keys


def _take_one(name: str, found: Sequence[Found]) -> _Whole:
    if len(found) > 1:
        first, second = quoted(found[0].entry.key), quoted(found[1].entry.key)
        found[1].fail(f"the names {first} and {second} both become {quoted(name)}")
    shape = found[0].entry.shape
    return _Whole(shape, {(0,) * len(shape): found[0]})


def _stack(name: str, found: Sequence[Found]) -> _Whole:
    slices: dict[tuple[int, int], Found] = {}
    for one in found:
        if not isinstance(one.target, SliceOf):
            one.fail(
                f"it becomes {quoted(name)}, of which other tensors of the files are slices"
            )
        place = (one.target.index, one.target.part)
        if place in slices:
            other = quoted(slices[place].entry.key)
            one.fail(
                f"it and {other} both become slice {place[0]}, part {place[1]} of {quoted(name)}"
            )
        slices[place] = one
    count = 1 + max(index for index, _ in slices)
    parts = 1 + max(part for _, part in slices)
    for index, part in itertools.product(range(count), range(parts)):
        if (index, part) not in slices:
            found[0].fail(
                f"no tensor of the files is slice {index}, part {part} of {quoted(name)}, which has slices up to "
                f"{count - 1} and parts up to {parts - 1}"
            )
    size = _check_sizes(name, slices, parts)
    return _Whole((count, *size), _locate(slices, parts))


def _check_sizes(
    name: str, slices: Mapping[tuple[int, int], Found], parts: int
) -> tuple[int, ...]:
    """The size of a slice; all slices are like the first, and its parts differ along their dim alone."""
    first = slices[0, 0]
    dim = _dim_of(first)
    size = list(first.entry.shape)
    for part in range(1, parts):
        size[dim] += (*slices[0, part].entry.shape, *size)[dim]
    for (index, part), one in slices.items():
        like = slices[0, part].entry.shape
        expected = list(first.entry.shape)
        if parts > 1 and len(like) == len(expected):
            expected[dim] = like[dim]
        is_like = (
            one.entry.shape == like and list(like) == expected and _dim_of(one) == dim
        )
        if not is_like or one.entry.dtype != first.entry.dtype:
            one.fail(
                f"slice {index}, part {part} of {quoted(name)} is {one.entry.dtype} of shape {one.entry.shape} along "
                f"dim {_dim_of(one)}, expected {first.entry.dtype} of shape {tuple(expected)} along dim {dim}"
            )
    return tuple(size)


def _locate(slices: Mapping[tuple[int, int], Found], parts: int) -> dict[Start, Found]:
    dim = _dim_of(slices[0, 0])
    located: dict[Start, Found] = {}
    for (index, part), one in sorted(slices.items()):
        start = [index, *(0 for _ in one.entry.shape)]
        if parts > 1:
            start[1 + dim] = sum(
                slices[0, before].entry.shape[dim] for before in range(part)
            )
        located[tuple(start)] = one
    return located


def _dim_of(one: Found) -> int:
    """The dim of a slice along which its parts are concatenated."""
    assert isinstance(one.target, SliceOf)
    dims, dim = len(one.entry.shape), one.target.dim
    if dim == 0 and dims == 0 and one.target.part == 0:
        return 0
    if not -dims <= dim < dims:
        one.fail(f"SliceOf: dim {dim} is not one of its {dims} dims")
    return dim % dims
