# SPDX-License-Identifier: Apache-2.0
"""The contents of a checkpoint, without its data: for each name a tensor in chunks, or a plain object.

metadata.state_dict_metadata["model.w"].chunks[3].offsets      where the fourth chunk of w begins
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

VERSION = 1  # of the format that this library writes

# Bytes of an element. The names are the frameworks' own, without prefix and in lower case.
ITEM_SIZES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
    "uint32": 4, "int32": 4, "float32": 4,
    "uint64": 8, "int64": 8, "float64": 8, "complex64": 8,
    "complex128": 16,
}  # fmt: skip


def dtype_name(dtype: Any) -> str:
    """The neutral name of a framework's dtype: "bfloat16" for torch.bfloat16 and for mindspore's BFloat16."""
    return str(dtype).rpartition(".")[2].lower()


@dataclass(frozen=True)
class ChunkStorageMetadata:
    """A box of a tensor: where it begins and how large it is along each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", tuple(self.offsets))
        object.__setattr__(self, "sizes", tuple(self.sizes))


@dataclass(frozen=True)
class TensorProperties:
    """The properties of a tensor other than its size."""

    dtype: Any
    requires_grad: bool = False
    memory_format: Any = None


@dataclass(frozen=True)
class TensorStorageMetadata:
    """A tensor: its properties, its global size, and the chunks that it is stored in."""

    properties: TensorProperties
    size: tuple[int, ...]
    chunks: Sequence[ChunkStorageMetadata]
    stored_as: str | None = (
        None  # the name that its chunks are stored under, where it is tied to another tensor
    )

    def nbytes(self) -> int:
        """The size of the full tensor in bytes."""
        return math.prod(self.size) * ITEM_SIZES[dtype_name(self.properties.dtype)]


@dataclass(frozen=True)
class BytesStorageMetadata:
    """A plain object, which is stored as a whole."""


@dataclass(frozen=True)
class MetadataIndex:
    """The key of a chunk or an object; ``index`` is only a hint for the lookup."""

    fqn: str
    offset: tuple[int, ...] = ()
    index: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "offset", tuple(self.offset))


Path = tuple[
    Any, ...
]  # the steps to a value in a nested state dict: a key, a position in a list, or (5,) for the key 5


@dataclass(frozen=True)
class Metadata:
    """All of a checkpoint except its data.

    ``planner_data`` maps a name to its path in the nested state dict, where that is not the name alone;
    ``storage_data`` is the storage's own.
    """

    state_dict_metadata: Mapping[str, TensorStorageMetadata | BytesStorageMetadata]
    planner_data: Any = None
    storage_data: Any = None
    version: int = VERSION
