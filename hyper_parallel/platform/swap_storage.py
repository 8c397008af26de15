# SPDX-License-Identifier: Apache-2.0
"""What a platform and the owner of swapped tensors know of each other: who moves a saved tensor, and when.

storage = Storage()
with platform.async_save_on_cpu(storage=storage):     storage.add(tensor) for every tensor that is saved
    loss = model(x)
"""

from __future__ import annotations

from typing import Any, Protocol


class SwappedTensor(Protocol):
    """One saved tensor whose owner decides when it moves; whatever the order of the calls, backward gets its values."""

    def offload(self, stream: Any = None) -> None:
        """Starts the copy to host memory; on the given stream, if the device has streams."""

    def release(self) -> None:
        """Frees the device memory once the copy that ``offload`` started is complete."""

    def start(self, stream: Any = None) -> bool:
        """Starts the copy back; returns False if there is nothing to copy."""

    def wait(self) -> None:
        """Makes the current stream wait for the copy back, if one was started."""


class SwapStorage(Protocol):
    """Collects the tensors that one call swaps."""

    def add(self, tensor: SwappedTensor) -> None:
        """Takes over a tensor: its copies start when the storage says so, not when it is saved."""
