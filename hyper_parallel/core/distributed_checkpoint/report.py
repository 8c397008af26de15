# SPDX-License-Identifier: Apache-2.0
"""What a load did, or would do: print it, or look at its fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LoadReport:
    """Names by their outcome on this rank, and bytes."""

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()  # asked for, not in the checkpoint
    unexpected: tuple[str, ...] = ()  # in the checkpoint, beside what was asked for
    # Asked for by other ranks alone, or in parts of the checkpoint that nobody asked for.
    skipped: tuple[str, ...] = ()
    resharded: tuple[str, ...] = ()  # stored in other chunks than this rank needs
    cast: tuple[str, ...] = ()  # stored in another dtype
    kept: tuple[
        str, ...
    ] = ()  # each rank has its own, and the checkpoint has none for this one
    bytes: int = 0  # that this rank needs
    bytes_read: int = 0  # from storage: whole blocks, where checksums are compared

    @property
    def read_ratio(self) -> float:
        """The number of bytes read per byte needed."""
        return self.bytes_read / self.bytes if self.bytes else 1.0

    def __str__(self) -> str:
        lines = [f"loaded {len(self.loaded)} names, {_size(self.bytes)} on this rank"]
        if self.bytes_read:
            lines[0] += (
                f", {_size(self.bytes_read)} read ({self.read_ratio:.2f} for each byte needed)"
            )
        for what in ("missing", "unexpected", "skipped", "resharded", "cast", "kept"):
            names = getattr(self, what)
            if names:
                lines.append(f"{what} {len(names)}: {some(names)}")
        return "\n".join(lines)


def some(names: Sequence[str], most: int = 8) -> str:
    """The first names, and how many more there are."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
