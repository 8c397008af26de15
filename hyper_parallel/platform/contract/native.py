# SPDX-License-Identifier: Apache-2.0
"""The framework's own distributed tensors and meshes, as plain values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple


class NativeMesh(NamedTuple):
    """A mesh in plain values: nested lists of global ranks, and a group per axis if this rank is a member."""

    device_type: str
    ranks: list[Any]
    names: tuple[str, ...] | None
    groups: tuple[Any, ...]


class NativeTensor(NamedTuple):
    """A distributed tensor of the framework in plain values.

    ``placements``, one per axis: ("shard", dim, split factor), ("replicate",) or ("partial", op).
    """

    local: Any
    mesh: Any
    placements: tuple[tuple[Any, ...], ...]
    shape: tuple[int, ...]
    is_parameter: bool


class Native(ABC):
    """Conversions from and to the framework's own distributed tensors."""

    @abstractmethod
    def from_native_mesh(self, mesh: Any) -> NativeMesh:
        """Converts the framework's own mesh to plain values."""

    @abstractmethod
    def to_native_mesh(self, parts: NativeMesh) -> Any:
        """Creates the framework's own mesh from plain values; creates no groups."""

    @abstractmethod
    def from_native_dtensor(self, tensor: Any) -> NativeTensor:
        """Converts the framework's own DTensor to plain values; the shard shares memory, a leaf's is a leaf."""

    @abstractmethod
    def to_native_dtensor(self, parts: NativeTensor) -> Any:
        """Creates the framework's own DTensor on the shard's memory: a leaf from a leaf, else in its graph."""
