# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel: styles that put modules on an axis of devices, the plan that applies them, and losses to match."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.core.tensor_parallel.api import (
        parallel_table,
        parallelize_module,
    )
    from hyper_parallel.core.tensor_parallel.batches import local_batch, same_everywhere
    from hyper_parallel.core.tensor_parallel.data_parallel import replicate
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

# All of it knows tensors: asking for it chooses the framework and imports it.
_HOMES = {
    "local_batch": "batches",
    "same_everywhere": "batches",
    "loss_parallel": "loss",
    "parallel_table": "api",
    "parallelize_module": "api",
    "replicate": "data_parallel",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        import importlib

        return getattr(
            importlib.import_module(f"{__name__}.{_HOMES.get(name, 'style')}"), name
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
