# SPDX-License-Identifier: Apache-2.0
"""What meshes call groups of ranks, so that an error can say which axis waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_NAMES: dict[frozenset[int], list[str]] = {}


def name_axis(ranks: Sequence[int], name: str) -> None:
    """These ranks are an axis of a mesh, or are one more of another mesh."""
    names = _NAMES.setdefault(frozenset(ranks), [])
    if name not in names:
        names.append(name)


def axis_of(ranks: Sequence[int]) -> str:
    """The axes that these ranks are, by name; nothing where no mesh has named them."""
    return " and ".join(_NAMES.get(frozenset(ranks), ()))


def forget_axes() -> None:
    """The job has ended; in another one the same ranks are something else."""
    _NAMES.clear()


@contextmanager
def separate_axes() -> Iterator[None]:
    """A context whose meshes are of ranks that are not there: their names are forgotten at its end."""
    before = {ranks: list(names) for ranks, names in _NAMES.items()}
    try:
        yield
    finally:
        _NAMES.clear()
        _NAMES.update(before)
