# SPDX-License-Identifier: Apache-2.0
"""Distributed checkpoints: saved on one mesh, loaded on any other; atomic; nothing is unpickled."""

from hyper_parallel.core.distributed_checkpoint.api import (
    async_save,
    load,
    read_metadata,
    read_objects,
    save,
)
from hyper_parallel.core.distributed_checkpoint.background import AsyncSaveResponse
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
)
from hyper_parallel.core.distributed_checkpoint.manager import CheckpointManager
from hyper_parallel.core.distributed_checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from hyper_parallel.core.distributed_checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from hyper_parallel.core.distributed_checkpoint.report import LoadReport
from hyper_parallel.core.distributed_checkpoint.standard_planner import (
    StandardLoadPlanner,
    StandardSavePlanner,
)
from hyper_parallel.core.distributed_checkpoint.state_dict import PerRank
from hyper_parallel.core.distributed_checkpoint.state_dict_api import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from hyper_parallel.core.distributed_checkpoint.storage import (
    StorageReader,
    StorageWriter,
    WriteResult,
)
from hyper_parallel.core.distributed_checkpoint.training_state import (
    ModelState,
    OptimizerState,
    RandomState,
)

__all__ = [
    "AsyncSaveResponse",
    "BytesStorageMetadata",
    "CheckpointError",
    "CheckpointManager",
    "ChunkStorageMetadata",
    "FileSystemReader",
    "FileSystemWriter",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "LoadReport",
    "Metadata",
    "MetadataIndex",
    "ModelState",
    "OptimizerState",
    "PerRank",
    "RandomState",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "StandardLoadPlanner",
    "StandardSavePlanner",
    "StateDictOptions",
    "StorageReader",
    "StorageWriter",
    "TensorProperties",
    "TensorStorageMetadata",
    "WriteItem",
    "WriteItemType",
    "WriteResult",
    "async_save",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "load",
    "read_metadata",
    "read_objects",
    "save",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
