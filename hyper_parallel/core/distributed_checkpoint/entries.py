# SPDX-License-Identifier: Apache-2.0
"""The tensors of a state dict as a planner sees them: names, sizes, dtypes, and how each lies on its mesh.

Everything here is a pure function of these values, so that each rank finds the same answer by itself.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hyper_parallel.core.distributed_checkpoint.chunks import ChunkGrid, Cut, chunk_of
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.metadata import (
    ITEM_SIZES,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
    dtype_name,
)
from hyper_parallel.core.distributed_checkpoint.planner import WriteItem, WriteItemType
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

PLAIN = ("plain",)  # the name of the axis over which plain tensors are copied
_SAMPLE = 4096  # bytes of a plain tensor that are compared between ranks, at its beginning, middle and end


@dataclass(frozen=True)
class Entry:
    """A tensor. ``sample`` stands for some of its bytes, where nothing else says that all ranks have the same."""

    name: str
    dtype: str
    size: tuple[int, ...]
    cut: Cut
    requires_grad: bool = False
    sample: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is no distributed tensor, but one that all ranks are taken to have."""
        return self.cut.names == PLAIN

    def grid(self, replica: int = 0) -> ChunkGrid:
        """The chunks of the tensor, written by these of the ranks that have each."""
        return ChunkGrid(self.size, self.cut, replica)

    def properties(self) -> TensorProperties:
        """What it is apart from its size."""
        return TensorProperties(self.dtype, self.requires_grad)

    def stored(self, replica: int) -> TensorStorageMetadata:
        """What the checkpoint then holds."""
        return TensorStorageMetadata(self.properties(), self.size, self.grid(replica))

    def chunk_bytes(self) -> int:
        """The bytes of its first chunk, which is as large as any."""
        first = [self.cut.span(dim, size, 0)[1] for dim, size in enumerate(self.size)]
        return math.prod(first) * ITEM_SIZES[self.dtype]

    def items_at(self, coordinate: Sequence[int]) -> Iterator[WriteItem]:
        """What a place of the mesh has of it."""
        for number, box, _ in self.grid().parts_at(coordinate):
            chunk = chunk_of(box)
            data = {"chunk": chunk, "properties": self.properties(), "size": self.size}
            yield WriteItem(
                MetadataIndex(self.name, chunk.offsets, number),
                WriteItemType.TENSOR,
                data,
            )


def entry_of(name: str, tensor: Any, world_size: int) -> Entry:
    """The entry of a tensor; a plain one is whole on every rank."""
    dtype, size = dtype_name(tensor.dtype), tuple(tensor.shape)
    if dtype not in ITEM_SIZES:
        raise coded(
            CheckpointError,
            "HP510",
            f"tensors of {tensor.dtype} cannot be stored; known are {', '.join(ITEM_SIZES)}",
            field=name,
        )
    local = get_platform().get_param_local_data(tensor)
    if not get_platform().is_dense(local):
        raise coded(
            CheckpointError,
            "HP510",
            "sparse tensors cannot be stored; make it dense",
            field=name,
        )
    if get_platform().is_meta(local):
        raise coded(
            CheckpointError,
            "HP510",
            "the tensor is on the meta device and has no data; initialise it first",
            field=name,
        )
    layout = getattr(tensor, "layout", None)
    grad = get_platform().requires_grad(tensor)
    if isinstance(layout, Layout):
        if layout.is_partial():
            raise coded(
                CheckpointError,
                "HP510",
                f"{layout} has a pending reduction: call reduce_partial() on it first",
                field=name,
            )
        return Entry(name, dtype, size, cut_of(layout.bind(len(size))), grad)
    return Entry(name, dtype, size, whole_on(world_size, len(size)), grad)


@lru_cache(maxsize=1024)
def cut_of(layout: Layout) -> Cut:
    """How a layout cuts its tensors."""
    ranks: Any = layout.rank_list
    span = range(ranks[0], ranks[0] + len(ranks))
    irregular = {p.dim: p for p in layout.irregular.values()}
    return Cut(
        layout.mesh_shape,
        span if ranks == tuple(span) else ranks,
        layout.dim_axes,
        irregular,
        layout.mesh.mesh_dim_names,
    )


@lru_cache(maxsize=1024)
def whole_on(world_size: int, ndim: int) -> Cut:
    """A tensor that all ranks have."""
    return Cut((world_size,), range(world_size), ((),) * ndim, names=PLAIN)


@lru_cache(maxsize=1024)
def row_on_each(world_size: int, ndim: int) -> Cut:
    """A tensor of which each rank has one row."""
    return Cut(
        (world_size,), range(world_size), ((0,), *((),) * (ndim - 1)), names=("rank",)
    )


def sampled(tensor: Any) -> int:
    """What stands for some of the bytes of this rank's shard: all of a small one, three places of a large one."""
    platform = get_platform()
    flat = platform.get_param_local_data(tensor).reshape(-1)
    length = max(1, _SAMPLE // max(1, platform.get_element_size(flat)))
    count, value = flat.shape[0], 0
    starts = [0] if count <= 3 * length else [0, count // 2, count - length]
    for start in starts:
        piece = platform.host_tensor(
            flat[start : start + (length if len(starts) > 1 else count)]
        )
        value = zlib.crc32(platform.tensor_memory(piece).tobytes(), value)
    return value


def writers(entries: Iterable[Entry]) -> dict[str, int]:
    """For each name which of the ranks that have a chunk writes it, so that all write about as many bytes.

    The largest come first, each goes to the one that has least. What lies on other axes is counted for itself.
    """
    families: dict[Any, list[Entry]] = {}
    for entry in entries:
        families.setdefault(
            (entry.cut.mesh_shape, entry.cut.ranks, entry.cut.copying), []
        ).append(entry)
    chosen: dict[str, int] = {}
    for number, (_, family) in enumerate(
        sorted(families.items(), key=lambda item: repr(item[0]))
    ):
        replicas = family[0].cut.replicas
        shift = (
            number * replicas // len(families)
        )  # the largest of every family do not all go to the first rank
        loads = [(0, replica) for replica in range(min(replicas, len(family)))]
        for entry in sorted(
            family, key=lambda entry: (-entry.chunk_bytes(), entry.name)
        ):
            load, replica = loads[0]
            heapq.heapreplace(loads, (load + entry.chunk_bytes(), replica))
            chosen[entry.name] = (replica + shift) % replicas
    return chosen


def digest(*facts: Any) -> bytes:
    """16 bytes that stand for values whose repr says all of them."""
    text = itertools.chain.from_iterable((repr(fact), "\n") for fact in facts)
    return hashlib.blake2b("".join(text).encode(), digest_size=16).digest()
