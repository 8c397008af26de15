# SPDX-License-Identifier: Apache-2.0
"""Compares one step of a model on one process with the same step on a mesh, and names where they part."""

from typing import TYPE_CHECKING, Any

from hyper_parallel.verification.report import Difference, Parting, Report

if TYPE_CHECKING:
    from hyper_parallel.verification.api import verify

__all__ = ["Difference", "Parting", "Report", "verify"]


def __getattr__(name: str) -> Any:
    if (
        name == "verify"
    ):  # it knows tensors: asking for it chooses the framework and imports it
        from hyper_parallel.verification.api import verify

        return verify
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
