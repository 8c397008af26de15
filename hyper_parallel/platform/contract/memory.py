# SPDX-License-Identifier: Apache-2.0
"""The memory of tensors: sharing it, identifying it, and noticing that it was modified.

Example::

    version = platform.version_of(x)
    x.add_(1)
    assert platform.version_of(x) != version
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

_PACKED = 16  # bytes


def round_up(nbytes: int) -> int:
    """The bytes that so many take where tensors are packed one behind the other."""
    return -(-nbytes // _PACKED) * _PACKED


class Memory(ABC):
    """The memory behind tensors, and tensors without any, on which models are planned."""

    # Whether ``version_of`` notices every modification; if not, ``mark_escaped`` and ``mark_alias`` are called.
    counts_changes = True

    # Whether ``release_memory`` also frees what autograd has saved, which is valid again once the memory is restored.
    releases_saved_tensors = True

    @abstractmethod
    def host_tensor(self, tensor: Any) -> Any:
        """Returns this rank's elements as a plain contiguous tensor in host memory, without a copy if it is one."""

    @abstractmethod
    def tensor_memory(self, tensor: Any) -> Any:
        """Views a plain tensor's elements as a numpy array of opaque items; None if the memory cannot be shared."""

    @abstractmethod
    def tensor_from_bytes(self, data: Any, dtype: str, shape: Sequence[int]) -> Any:
        """Creates a plain tensor in host memory on top of a contiguous uint8 array."""

    @abstractmethod
    def pack_bytes(self, header: bytes, tensors: Sequence[Any]) -> Any:
        """Copies a header and the elements of plain tensors into one new tensor of bytes, each at a multiple of 16."""

    @abstractmethod
    def unpack_bytes(
        self, packed: Any, start: int, specs: Sequence[tuple[str, Sequence[int]]]
    ) -> list[Any]:
        """Returns the tensors of these dtypes and shapes that ``pack_bytes`` has packed behind ``start`` bytes."""

    @abstractmethod
    def memory_key(self, tensor: Any) -> Any:
        """Returns a key that is equal for tensors (or their shards) that are the same elements of the same memory."""

    @abstractmethod
    def memory_of(self, tensor: Any) -> MutableMapping[Any, Any]:
        """Returns a mapping that lives as long as the tensor without keeping it alive, for caching derived tensors."""

    @abstractmethod
    def alias(self, tensor: Any) -> Any:
        """Returns a plain tensor in the same memory, outside the graph, whose modifications are counted separately."""

    @abstractmethod
    def release_memory(self, tensor: Any) -> None:
        """Frees the memory of a tensor and of all its aliases, which must not be read until it is restored."""

    @abstractmethod
    def restore_memory(self, tensor: Any) -> None:
        """Allocates memory that was released; its contents are undefined."""

    @abstractmethod
    def version_of(self, tensor: Any) -> int | None:
        """Returns a counter that changes when the tensor is modified in place; None if changes are not counted."""

    def versions_of(self, tensors: Sequence[Any]) -> tuple[int | None, ...]:
        """Returns the ``version_of`` of each tensor."""
        return tuple(self.version_of(tensor) for tensor in tensors)

    @abstractmethod
    def note_change(self, tensor: Any) -> None:
        """Counts a modification that the framework could not see, so that ``version_of`` changes."""

    def mark_escaped(self, tensor: Any) -> None:  # noqa: B027 - a framework that counts need not know
        """Records that the user holds the tensor or an alias of it, and may modify it unseen."""

    def mark_alias(self, tensor: Any, source: Any) -> None:  # noqa: B027 - a framework that counts need not know
        """Records that a tensor may share memory with another one."""

    @abstractmethod
    def is_meta(self, tensor: Any) -> bool:
        """Returns whether the tensor has a shape and a dtype but no data."""

    @property
    @abstractmethod
    def meta_device(self) -> Any:
        """Returns the framework's device without storage."""

    @abstractmethod
    def init_on_device(
        self, device: Any, include_buffers: bool = False
    ) -> AbstractContextManager[Any]:
        """Creates new parameters, and optionally buffers, on ``device`` within a context."""

    # --- planning: models and collectives without data

    @abstractmethod
    def copy_without_data(self, module: Any) -> Any:
        """Returns a copy of a module whose tensors have shapes and dtypes alone; shared tensors stay shared."""

    @abstractmethod
    def simulate_ranks(self) -> AbstractContextManager[None]:
        """Within it this process is rank 0 of any mesh, new tensors have no data, and collectives send nothing.

        Listeners hear of every collective. No other thread may communicate meanwhile.
        """

    @abstractmethod
    def listen_to_functions(
        self, listener: Callable[[str, tuple[Any, ...], Any], None]
    ) -> AbstractContextManager[None]:
        """Calls ``listener(name, args, result)`` after every function of the framework that gets a tensor."""
