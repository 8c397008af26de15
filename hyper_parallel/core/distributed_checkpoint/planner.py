# SPDX-License-Identifier: Apache-2.0
"""Which rank writes and reads what: the values of a plan and the protocols of the two planners.

A planner decides, a storage moves bytes. `save` and `load` call, on every rank,

    planner.configure_planner(state_dict)        what there is
    plan = planner.build_local_plan()            what this rank could write, or needs
    plans, metadata = planner.build_global_plan(all_plans)     (a LoadPlanner returns the plans alone)
    plan = planner.finalize_plan(plans[rank])    what this rank does

and pass the plan to the storage, which asks the planner for the data of each item or for the memory to fill.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.distributed_checkpoint.metadata import (
    ITEM_SIZES,
    Metadata,
    MetadataIndex,
    dtype_name,
)


class WriteItemType(enum.Enum):
    """What a storage is asked to keep."""

    TENSOR = enum.auto()
    BYTE_IO = enum.auto()


class LoadItemType(enum.Enum):
    """What a storage is asked for."""

    TENSOR = enum.auto()
    BYTE_IO = enum.auto()


@dataclass(frozen=True)
class WriteItem:
    """A chunk of a tensor, or a plain object, to be written.

    ``tensor_data`` has "chunk", "properties" and "size" (of the whole tensor); ``bytes_io_data`` is the object.
    """

    index: MetadataIndex
    type: WriteItemType
    tensor_data: Mapping[str, Any] | None = None
    bytes_io_data: Any = None

    def tensor_storage_size(self) -> int | None:
        """The bytes of the chunk; None for an object."""
        if self.tensor_data is None:
            return None
        itemsize = ITEM_SIZES[dtype_name(self.tensor_data["properties"].dtype)]
        return int(math.prod(self.tensor_data["chunk"].sizes)) * itemsize


@dataclass(frozen=True)
class ReadItem:
    """A box that a stored chunk and a tensor of this rank have in common, or a plain object.

    ``storage_index`` and ``dest_index`` name the chunk and the box of the tensor, the offsets are within them.
    """

    type: LoadItemType
    dest_index: MetadataIndex
    dest_offsets: tuple[int, ...]
    storage_index: MetadataIndex
    storage_offsets: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class SavePlan:
    """What one rank writes."""

    items: Sequence[WriteItem]
    storage_data: Any = None
    planner_data: Any = None


@dataclass(frozen=True)
class LoadPlan:
    """What one rank reads."""

    items: Sequence[ReadItem]
    storage_data: Any = None
    planner_data: Any = None


class SavePlanner(ABC):
    """Decides what each rank writes, and provides the data."""

    @abstractmethod
    def configure_planner(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Receives the state dict to save; ``kwargs`` has ``rank``, ``world_size`` and ``is_coordinator``."""

    @abstractmethod
    def build_local_plan(self) -> SavePlan:
        """Everything that this rank has."""

    @abstractmethod
    def build_global_plan(
        self, all_plans: Sequence[SavePlan]
    ) -> tuple[list[SavePlan], Metadata]:
        """What each rank writes, so that every chunk is written, and the metadata of the checkpoint."""

    @abstractmethod
    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        """This rank's plan, as the storage gets it."""

    @abstractmethod
    def get_data(self, item: WriteItem) -> Any:
        """The tensor of a chunk, plain and of the chunk's shape, or the object."""


class LoadPlanner(ABC):
    """Decides what each rank reads, and provides the memory to fill."""

    @abstractmethod
    def configure_planner(
        self, state_dict: Mapping[str, Any], metadata: Metadata, **kwargs: Any
    ) -> None:
        """Receives the state dict to fill and the metadata of the checkpoint."""

    @abstractmethod
    def build_local_plan(self) -> LoadPlan:
        """Everything that this rank needs."""

    @abstractmethod
    def build_global_plan(self, all_plans: Sequence[LoadPlan]) -> list[LoadPlan]:
        """What each rank reads."""

    @abstractmethod
    def finalize_plan(self, plan: LoadPlan) -> LoadPlan:
        """This rank's plan, as the storage gets it."""

    @abstractmethod
    def acquire_tensor(self, read_item: ReadItem) -> Any:
        """The plain tensor, of the shape and dtype of what is read, that the storage fills."""

    @abstractmethod
    def apply_tensor(self, read_item: ReadItem, tensor: Any) -> None:
        """Takes a tensor that the storage has filled."""

    @abstractmethod
    def apply_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Takes an object."""
