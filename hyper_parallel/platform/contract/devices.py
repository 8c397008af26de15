# SPDX-License-Identifier: Apache-2.0
"""Devices and their random number generators.

Example::

    with platform.seeded(7):
        noise = platform.randn((4,))
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class Devices(ABC):
    """The device of this process, its memory and its generators."""

    @abstractmethod
    def device_type(self) -> str:
        """Returns the type of device that tensors train on in this process: cpu, cuda or npu."""

    @abstractmethod
    def device(self, index: int | None = None) -> Any:
        """Returns the device with that index; without one, this process's own."""

    def peak_memory(self) -> int:
        """Returns the peak bytes of tensors on this process's device; on a CPU, of the whole process."""
        if self.device_type() != "cpu":
            return self._device_memory()
        import resource  # not everywhere

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )

    @abstractmethod
    def _device_memory(self) -> int:
        """Returns an accelerator's peak memory in bytes."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seeds every generator of the framework."""

    @abstractmethod
    def draw_seed(self) -> int:
        """Draws a seed from the process's generator; equal on ranks whose generators are in the same state."""

    @abstractmethod
    def seeded(self, seed: int) -> AbstractContextManager[Any]:
        """Seeds the device's generator within a context and restores its state afterwards."""

    @contextmanager
    def reseeding(self) -> Iterator[Callable[[int], AbstractContextManager[Any]]]:
        """Gives a ``seeded`` for use within a context, at whose end the generator's state is that of its beginning."""
        yield self.seeded

    @abstractmethod
    def get_rng_state(self) -> Any:
        """Returns the state of the generator of this process's device."""

    @abstractmethod
    def set_rng_state(self, state: Any) -> None:
        """Restores a state from ``get_rng_state``."""

    @abstractmethod
    def get_rng_states(self) -> dict[str, Any]:
        """Returns the states of all generators that this process draws from, as uint8 tensors in host memory."""

    @abstractmethod
    def set_rng_states(self, states: Mapping[str, Any]) -> None:
        """Restores some or all of the states from ``get_rng_states``."""
