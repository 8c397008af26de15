# SPDX-License-Identifier: Apache-2.0
"""Rows that ranks fill and read in place: the memory of one collective, in which tensors are packed.

    rows = platform.take_rows(length, dtype, group)
    fill(rows.own)                                    # one row, which all ranks read
    platform.gather_tensors([], [], group, rows=rows).wait()
    first, second = rows.read()                       # the rows of both ranks
    rows.release()                                    # the memory serves the next collective

Rows that are taken with ``is_outgoing`` hold one row for each rank instead, and are summed by
``reduce_scatter_tensors``. The memory is this rank's; where the ranks of a host share memory, it is theirs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any


class Rows(ABC):
    """The memory of one collective; ``own`` is what this rank fills before the collective starts."""

    own: Any
    is_shared = False  # whether it is memory of several ranks

    @abstractmethod
    def read(self) -> list[Any]:
        """The row of each rank, in rank order, once the collective is complete; valid until ``release``."""

    @abstractmethod
    def release(self) -> None:
        """Gives the memory back, also of a collective that was not started or has failed."""


class BufferRows(Rows):
    """Rows in memory of this rank, which the backend's collective fills."""

    def __init__(
        self,
        buffer: Any,
        own: Any,
        give_back: Callable[[BufferRows], None] | None = None,
    ) -> None:
        self.buffer, self.own = buffer, own
        self._rows = [buffer[rank] for rank in range(int(buffer.shape[0]))]
        self._give_back = give_back

    def read(self) -> list[Any]:
        return self._rows

    def release(self) -> None:
        if self._give_back is not None:
            self._give_back(self)


def join_gather(
    rows: Rows | None, outputs: Sequence[Any], sources: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The outputs and sources of a gather, those of rows in a buffer included."""
    if not isinstance(rows, BufferRows):
        return list(outputs), list(sources)
    return [*outputs, rows.buffer.reshape(-1)], [*sources, rows.own.reshape(-1)]


def join_reduction(rows: Rows | None, sources: Sequence[Any]) -> list[Any]:
    """The sources of a reduction, those of rows in a buffer included."""
    if not isinstance(rows, BufferRows):
        return list(sources)
    return [*sources, rows.buffer.reshape(-1)]
