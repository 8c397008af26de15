# SPDX-License-Identifier: Apache-2.0
"""Data parallel with sharded parameters, gradients and optimizer state."""

from hyper_parallel.core.fully_shard.api import (
    FSDPModule,
    HSDPModule,
    UnshardHandle,
    fully_shard,
    get_model_state_dict,
    hsdp_sync_stream,
    register_fsdp_forward_method,
)
from hyper_parallel.core.fully_shard.utils import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "HSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "get_model_state_dict",
    "hsdp_sync_stream",
    "register_fsdp_forward_method",
]
