# SPDX-License-Identifier: Apache-2.0
"""Plans for models that come without one: from the plan that a model carries, or derived from what it computes."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.planning.auto import auto_plan
    from hyper_parallel.planning.plan import ParallelPlan

__all__ = ["ParallelPlan", "auto_plan"]

_HOMES = {"ParallelPlan": f"{__name__}.plan", "auto_plan": f"{__name__}.auto"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
