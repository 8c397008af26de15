# SPDX-License-Identifier: Apache-2.0
"""References in place of whole tensors that autograd saves, where the framework cannot free what was saved.

In forward an operator that saves a whole tensor saves its place in a unit instead, so that the tensor can be freed; in
backward it gets the tensor that was gathered again. Views of whole tensors are saved as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.fully_shard.unit import Unit
from hyper_parallel.platform import get_platform

platform = get_platform()


@dataclass(frozen=True)
class Reference:
    """A whole tensor of a unit."""

    unit: Unit
    number: int


def save_references(
    units: Callable[[], Iterable[Unit]],
) -> AbstractContextManager[Any]:
    """A context in which autograd saves references to the whole tensors of these units."""
    if platform.releases_saved_tensors:
        return nullcontext()

    def pack(tensor: Any) -> Any:
        key = platform.memory_key(tensor)
        for unit in units():
            number = unit.whole_keys.get(key)
            if number is not None:
                return Reference(unit, number)
        return tensor

    return platform.saved_tensors(pack, _unpack)


def _unpack(saved: Any) -> Any:
    if not isinstance(saved, Reference):
        return saved
    saved.unit.gather()
    return saved.unit.whole_tensors()[saved.number]
