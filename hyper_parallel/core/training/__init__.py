# SPDX-License-Identifier: Apache-2.0
"""Training: one step of a model on any mesh, and one of a pipeline."""

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.training.step import training_step

if TYPE_CHECKING:
    from hyper_parallel.core.training.pipeline import (
        PipelineStep,
        pipeline_loss,
        pipeline_step,
        run_micro_batches,
    )

__all__ = [
    "PipelineStep",
    "pipeline_loss",
    "pipeline_step",
    "run_micro_batches",
    "training_step",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hyper_parallel.core.training import pipeline

    return getattr(pipeline, name)
