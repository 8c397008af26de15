# SPDX-License-Identifier: Apache-2.0
"""Running a model on tensors without data, on simulated ranks: what planning needs of a framework.

model = platform.copy_without_data(model)
with platform.simulate_ranks():           this process counts as rank 0 of any mesh; collectives only count
    parallelize_module(model, mesh["tp"], plan)
    model(**inputs)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


class Planning(ABC):
    """Models and collectives without data."""

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
