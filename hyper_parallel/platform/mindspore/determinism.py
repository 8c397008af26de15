# SPDX-License-Identifier: Apache-2.0
"""Whether a recompute saves what forward saved: MindSpore would hand other tensors to backward without a word.

with Determinism().watching():
    mindspore.recompute(function, x, use_reentrant=False)     its hooks report to this object
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hyper_parallel.platform.error_codes import coded


class _Next(threading.local):
    determinism: Determinism | None = None


_NEXT = _Next()


class Determinism:
    """What one call saved in forward; ``begin`` and ``end`` are around each recompute."""

    def __init__(self) -> None:
        self._saved: list[str] = []
        self._count = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which the next call of MindSpore's recompute reports to this object."""
        _NEXT.determinism = self
        try:
            yield
        finally:
            _NEXT.determinism = None

    def note(self, tensor: Any) -> None:
        """Takes a tensor that forward saved."""
        self._saved.append(_describe(tensor))

    def begin(self) -> None:
        """A recompute begins."""
        self._count = 0

    def check(self, tensor: Any) -> None:
        """Compares a tensor that the recompute saved with what forward saved in its place."""
        index, again = self._count, _describe(tensor)
        self._count += 1
        if index < len(self._saved) and self._saved[index] != again:
            raise _differs(
                f"saved tensor {index} was {self._saved[index]} in forward and is {again} in the recompute"
            )

    def end(self) -> None:
        """The recompute has run to its end without an error."""
        if self._count < len(self._saved):
            raise _differs(
                f"forward saved {len(self._saved)} tensors and the recompute {self._count}; the first that is "
                f"missing is {self._saved[self._count]}"
            )


def _describe(tensor: Any) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"


def _differs(what: str) -> RuntimeError:
    return coded(
        RuntimeError,
        "HP136",
        f"checkpoint: {what}: the function under checkpoint must do the same both times; "
        "determinism_check='none' turns this check off",
    )


def note_forward(usual: Callable[..., None]) -> Callable[..., None]:
    """Wraps the constructor of MindSpore's hooks for forward."""

    @functools.wraps(usual)
    def init(self: Any, handle: Any) -> None:
        usual(self, handle)
        determinism, _NEXT.determinism = _NEXT.determinism, None
        handle.determinism = determinism
        if determinism is None:
            return
        pack = self.pack_hook

        def note_and_pack(tensor: Any) -> Any:
            determinism.note(tensor)
            return pack(tensor)

        self.pack_hook = note_and_pack

    return init


def check_recompute(usual: Callable[..., None]) -> Callable[..., None]:
    """Wraps the constructor of MindSpore's hooks for the recompute."""

    @functools.wraps(usual)
    def init(self: Any, weak_handle: Any, recompute_key: Any) -> None:
        usual(self, weak_handle, recompute_key)
        determinism = weak_handle().determinism
        if determinism is None:
            return
        pack = self.pack_hook

        def check_and_pack(tensor: Any) -> Any:
            determinism.check(tensor)
            return pack(tensor)

        self.pack_hook = check_and_pack

    return init
