# SPDX-License-Identifier: Apache-2.0
"""What every style is: it says what is done to a module along one axis of devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh


class ParallelStyle(ABC):
    """What ``parallelize_module`` does to a module; subclass it for a style of your own.

    ``src_data_rank``: the index along the mesh of the rank whose parameters the others get; None: they are equal.
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Parallelizes the module along a mesh of one axis and returns it."""

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in self._options().items())
        return f"{type(self).__name__}({given})"

    def _options(self) -> dict[str, Any]:
        """The options that differ from their defaults, for printing."""
        return {}

    def _with_source(self, src_data_rank: int | None) -> ParallelStyle:
        """The style with another ``src_data_rank``."""
        self.src_data_rank = src_data_rank
        return self
