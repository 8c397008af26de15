# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: recompute activations in backward, or keep them in host memory until then."""

from typing import TYPE_CHECKING, Any

from hyper_parallel.platform import CheckpointPolicy

if TYPE_CHECKING:
    from hyper_parallel.core.activation_checkpoint.apply import (
        apply_activation_checkpointing,
    )
    from hyper_parallel.core.activation_checkpoint.groups import SwapManager
    from hyper_parallel.core.activation_checkpoint.offload import swap, swap_wrapper
    from hyper_parallel.core.activation_checkpoint.recompute import (
        checkpoint,
        checkpoint_sequential,
        checkpoint_wrapper,
        create_selective_checkpoint_contexts,
        is_recomputing,
    )

__all__ = [
    "CheckpointPolicy",
    "SwapManager",
    "apply_activation_checkpointing",
    "checkpoint",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "create_selective_checkpoint_contexts",
    "is_recomputing",
    "swap",
    "swap_wrapper",
]

_HOMES = {
    "SwapManager": "groups",
    "apply_activation_checkpointing": "apply",
    "checkpoint": "recompute",
    "checkpoint_sequential": "recompute",
    "checkpoint_wrapper": "recompute",
    "create_selective_checkpoint_contexts": "recompute",
    "is_recomputing": "recompute",
    "swap": "offload",
    "swap_wrapper": "offload",
}


# All of it needs tensors: asking for a name chooses the framework and imports it.
def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        home = importlib.import_module(f"{__name__}.{_HOMES[name]}")
        return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
