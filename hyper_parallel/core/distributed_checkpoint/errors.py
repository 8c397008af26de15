# SPDX-License-Identifier: Apache-2.0
"""The error of a checkpoint that cannot be written, found, verified or parsed: the file, the field, and the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class CheckpointError(RuntimeError):
    """Names the file and the field where there is one; ``file`` and ``field`` say so in data."""

    def __init__(
        self, message: str, *, file: str | Path | None = None, field: str | None = None
    ) -> None:
        place = f"{file}: " if file is not None else ""
        super().__init__(f"{place}{field}: {message}" if field else f"{place}{message}")
        self.message = message
        self.file = None if file is None else str(file)
        self.field = field

    def __reduce__(self) -> tuple[object, ...]:
        # The text already has file and field; a rank's error travels to the others and to the parent.
        return (_restore, (type(self), str(self), vars(self)))


def _restore(
    kind: type[CheckpointError], text: str, state: dict[str, Any]
) -> CheckpointError:
    error = kind(text)
    vars(error).update(state)
    return error
