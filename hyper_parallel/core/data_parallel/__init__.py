# SPDX-License-Identifier: Apache-2.0
"""Data parallel: models replicated along a data axis, and what plain tensors are to them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.core.data_parallel.api import replicate
    from hyper_parallel.core.data_parallel.batches import local_batch, same_everywhere

__all__ = ["local_batch", "replicate", "same_everywhere"]


# All of it needs tensors: asking for a name chooses the framework and imports it.
def __getattr__(name: str) -> Any:
    if name in __all__:
        import importlib

        home = "api" if name == "replicate" else "batches"
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
