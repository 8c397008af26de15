# SPDX-License-Identifier: Apache-2.0
"""What travels between a session and its pool of ranks: a function by name, its arguments, and how it ended."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.ranks.failures import Cause, Failure
from hyper_parallel.ranks.import_file import import_file


@dataclass(frozen=True)
class Target:
    """A module-level function, found again in another process by its file and name."""

    module: str
    file: str
    name: str

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Target:
        """The target for a function; a ValueError if another process could not find it."""
        name = getattr(function, "__qualname__", repr(function))
        if not inspect.isfunction(function) or "<" in name:
            raise coded(
                ValueError,
                "HP602",
                f"run_ranks: {name} must be a function at module level, so that the ranks can import it",
            )
        return cls(
            function.__module__,
            str(Path(inspect.getfile(inspect.unwrap(function))).resolve()),
            name,
        )

    def load(self) -> Callable[..., Any]:
        """The function itself, without the decorators that run it on ranks."""
        found: Any = _module(self.module, self.file)
        for part in self.name.split("."):
            found = getattr(found, part)
        function: Callable[..., Any] = inspect.unwrap(found)
        return function

    def __str__(self) -> str:
        return f"{Path(self.file).name}::{self.name}"


@dataclass(frozen=True)
class Job:
    """One run of a function on every rank, with the surroundings it should see."""

    number: int
    target: Target
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    store_port: int
    seconds: float
    path: list[str] = field(default_factory=list)
    warning_filters: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """How a job ended on one rank: with a value, or with a failure and the error that it raised, if any."""

    rank: int
    value: Any = None
    failure: Failure | None = None
    error: BaseException | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the process is gone or must go."""
        return self.failure is not None and self.failure.cause in _LOST


_LOST = (Cause.DIED, Cause.HUNG)


def _module(name: str, file: str) -> Any:
    if name == "__main__":
        # The parent's script: its functions are wanted, not another run of it.
        name = "__ranks_main__"
    if name in sys.modules:
        return sys.modules[name]
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if (
        spec is not None
        and spec.origin is not None
        and Path(spec.origin).resolve() == Path(file)
    ):
        return importlib.import_module(name)
    return import_file(file, name)  # a test module that pytest imported by its file
