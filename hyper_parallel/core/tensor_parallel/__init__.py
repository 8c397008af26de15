# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel: styles that put modules on an axis of devices, the plan that applies them, and losses to match."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.core.data_parallel import (
        local_batch,
        replicate,
        same_everywhere,
    )
    from hyper_parallel.core.tensor_parallel.api import (
        parallel_table,
        parallelize_module,
    )
    from hyper_parallel.core.tensor_parallel.loss import loss_parallel
    from hyper_parallel.core.tensor_parallel.style import (
        ColwiseParallel,
        FusedColwiseParallel,
        ParallelStyle,
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        Replicated,
        RowwiseParallel,
        SequenceParallel,
    )

__all__ = [
    "ColwiseParallel",
    "FusedColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Replicated",
    "RowwiseParallel",
    "SequenceParallel",
    "local_batch",
    "loss_parallel",
    "parallel_table",
    "parallelize_module",
    "replicate",
    "same_everywhere",
]

# All of it needs tensors: asking for a name chooses the framework and imports it.
_HOMES = {
    **dict.fromkeys(
        ("local_batch", "replicate", "same_everywhere"),
        "hyper_parallel.core.data_parallel",  # where they were until 0.1; the names stay valid here
    ),
    "loss_parallel": f"{__name__}.loss",
    "parallel_table": f"{__name__}.api",
    "parallelize_module": f"{__name__}.api",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        import importlib

        home = _HOMES.get(name, f"{__name__}.style")
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
