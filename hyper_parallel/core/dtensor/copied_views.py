# SPDX-License-Identifier: Apache-2.0
"""Views that had to be copies: they follow the tensor that they were taken from.

    v = x[1:3]        x is sharded along that dim, so data moves: v is a copy
    x.add_(10)
    v.full_tensor()   v is taken again, and has the new values and their gradient

A change is seen by the version of the base, which is the same on all ranks, so that all of them take the view again.
Changing the copy itself is refused. An operator that may return a view or a copy on one device, such as reshape, is
not taken again, since nobody knows which: its result is refused once the base has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


class Taken(NamedTuple):
    """From what a tensor was taken, how it is taken again, and what the base was like then."""

    base: Any
    again: Callable[[], Any]
    is_view: bool  # whether one device would surely give a view
    name: str
    local: Any  # the shard of the base, and its version
    version: int | None
    recording: bool
    forms: int  # how often the base had changed its shape in place


def remember_base(
    tensor: Any, base: Any, name: str, again: Callable[[], Any], is_view: bool
) -> None:
    """Has a tensor follow the one that it was copied from, where a view was asked for."""
    tensor._lost_view_of = tensor._lost_view_of or name
    version = platform.version_of(base._local)
    if (
        version is None or not platform.counts_changes
    ):  # nobody could tell that the base has changed
        return
    recording = not tensor._unrecorded
    tensor._taken = Taken(
        base, again, is_view, name, base._local, version, recording, base._forms
    )
    tensor._spec = None  # so that no short way is taken to it


def follow_base(tensor: Any) -> None:
    """Takes a tensor again from its base if that has changed since."""
    taken = tensor._taken
    base = taken.base.current()
    if base._local is taken.local and platform.version_of(base._local) == taken.version:
        return
    if not taken.is_view or base._forms != taken.forms:
        raise coded(
            RuntimeError,
            "HP229",
            f"{taken.name}: the tensor that it was taken from has been changed in place since. On one device the "
            "result may be a view of that tensor or a copy; here data was moved, and it is a copy. Call "
            f"{taken.name} again after the change, or clone() the result before it",
        )
    with platform.recording(taken.recording):
        fresh = taken.again()
    tensor._local, tensor._routes, tensor._gathered_from = fresh._local, None, None
    tensor._taken = fresh._taken
