# SPDX-License-Identifier: Apache-2.0
"""Tells whether a tensor may have been changed in place: MindSpore counts what a few operators change, and no more.

What is changed by way of the platform or of a distributed tensor is counted here, for all tensors together. Anything
else can only happen to a tensor that a user has: leaves, what is not recorded, what is *shown*, such as the plain
tensor that a distributed one was made of, and what shares memory with any of these. Of them nobody knows, and the
others are never handed out.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.platform.mindspore import private

_IN_PLACE = (
    "Inplace",
    "Assign",
    "Scatter",
)  # how the names of operators begin that may change an operand
_count = 0


def note() -> None:
    """Counts a change, of whatever tensor: another one may share its memory."""
    global _count  # noqa: PLW0603 - there is one memory
    _count += 1


def note_operator(found: Any) -> None:
    """Counts a change if an operator may make one."""
    if str(getattr(found, "name", "")).startswith(_IN_PLACE):
        note()


def note_change_of(tensor: Any) -> None:
    """Counts a change of this tensor, if anybody goes by its version."""
    if version_of(tensor) is not None:
        note()


def show(tensor: Any) -> None:
    """A user has the tensor, or one that shares its memory."""
    tensor._is_shown = True


def show_with(tensor: Any, source: Any) -> None:
    """Of what may share memory with a source nobody knows more than of that."""
    if version_of(source) is None:
        tensor._is_shown = True


def version_of(tensor: Any) -> int | None:
    """A number that is another after a change; None where a change would not be seen."""
    if (
        getattr(tensor, "_is_shown", False)
        or private.is_leaf(tensor)
        or not private.requires_grad(tensor)
    ):
        return None
    return _count
