# SPDX-License-Identifier: Apache-2.0
"""Modules on a mesh: their boundaries, the axes they are placed along, and lifting a model onto a larger mesh."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.core.modules.boundary import (
        Attachment,
        AttachmentHandle,
        attach,
        attachments,
    )

__all__ = [
    "Attachment",
    "AttachmentHandle",
    "attach",
    "attachments",
]


# Boundaries need modules: asking for a name chooses the framework and imports it.
def __getattr__(name: str) -> Any:
    if name in __all__:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.boundary"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
