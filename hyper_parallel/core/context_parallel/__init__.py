# SPDX-License-Identifier: Apache-2.0
"""Context parallel: the sequence is sharded, and attention on it is computed by several ranks together."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.core.context_parallel.attention import attention_method
    from hyper_parallel.core.context_parallel.blocks import (
        Visibility,
        imbalance,
        work_of_ranks,
    )
    from hyper_parallel.core.context_parallel.buffers import (
        document_ids_of,
        local_positions,
        shard_buffers,
        shift_labels,
        unshard_buffers,
    )
    from hyper_parallel.core.context_parallel.context import (
        context_parallel,
        context_parallel_unshard,
    )
    from hyper_parallel.core.context_parallel.model import shard_sequence
    from hyper_parallel.core.context_parallel.rotate import set_rotate_method
    from hyper_parallel.core.context_parallel.style import (
        AsyncContextParallel,
        ContextParallel,
    )

__all__ = [
    "AsyncContextParallel",
    "ContextParallel",
    "Visibility",
    "attention_method",
    "context_parallel",
    "context_parallel_unshard",
    "document_ids_of",
    "imbalance",
    "local_positions",
    "set_rotate_method",
    "shard_buffers",
    "shard_sequence",
    "shift_labels",
    "unshard_buffers",
    "work_of_ranks",
]

_HOMES = {
    "AsyncContextParallel": "style",
    "ContextParallel": "style",
    "Visibility": "blocks",
    "attention_method": "attention",
    "context_parallel": "context",
    "context_parallel_unshard": "context",
    "imbalance": "blocks",
    "set_rotate_method": "rotate",
    "shard_sequence": "model",
    "work_of_ranks": "blocks",
}


# All of it needs tensors: asking for a name chooses the framework and imports it.
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "buffers")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
