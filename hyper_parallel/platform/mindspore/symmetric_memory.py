# SPDX-License-Identifier: Apache-2.0
"""Buffers that every rank reads and writes directly: MindSpore has none, and who asks is told so."""

from __future__ import annotations

from typing import Any


class SymmetricMemoryHandler:
    """Stands where the other platform has shared memory, and says that there is none."""

    def __init__(self, platform: Any) -> None:
        raise NotImplementedError(
            f"{type(platform).__name__} has no symmetric memory: MindSpore offers none on an accelerator; exchange "
            "tensors with isend and irecv, or all_gather_into_tensor"
        )
