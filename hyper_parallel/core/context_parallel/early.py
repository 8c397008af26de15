# SPDX-License-Identifier: Apache-2.0
"""Exchanges of heads that begin before attention: as soon as a projection has computed queries, keys or values.

    early.start(layer, projected, 4, group)  (batch, sequence, heads * head_dim), as the projection returns it
    ...                                     the other projections
    early.take(query, 4)                     the exchange under way, if these are the same numbers as seen by attention

What a projection returns is recognised by its memory, so attention must get a view of it. Where something lies between
them, such as a rotary embedding, nothing is taken, and the exchange is not begun early again.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.pending import Pending, start_all_to_all

platform = get_platform()


class _Started(NamedTuple):
    owner: object
    projected: Any  # is kept, so that no other tensor gets its memory
    key: Any
    version: int | None
    degree: int
    pending: Pending


class _Early(threading.local):
    def __init__(self) -> None:
        self.started: list[_Started] = []


_EARLY = _Early()


def start(owner: object, projected: Any, degree: int, group: Any) -> None:
    """Starts the exchange of a plain (batch, sequence, heads * head_dim), of which all ranks have equal parts.

    ``owner``: the projection. What it returned before and nobody took, as in a recomputation that ended early, is
    forgotten.
    """
    _EARLY.started = [one for one in _EARLY.started if one.owner is not owner]
    local = platform.detach(projected)
    sizes = [local.shape[1]] * degree
    features = [local.shape[2] // degree] * degree
    pending = start_all_to_all(platform, local, 1, 2, sizes, features, group)
    key, version = platform.memory_key(local), platform.version_of(local)
    _EARLY.started.append(_Started(owner, local, key, version, degree, pending))


def take(tensor: Any, degree: int) -> Pending | None:
    """The exchange of what is (batch, heads, sequence, head_dim) now; the positions of all ranks, in their order."""
    if not _EARLY.started:
        return None
    batch, heads, size, head_dim = tensor.shape
    back = platform.operator("transpose")(tensor, 1, 2)
    key = platform.memory_key(back.reshape((batch, size, heads * head_dim)))
    shape = (batch, size * degree, heads // degree, head_dim)
    for number, one in enumerate(_EARLY.started):
        is_same = one.key == key and one.degree == degree and heads % degree == 0
        if is_same and platform.version_of(one.projected) == one.version:
            del _EARLY.started[number]
            return _by_heads(one.pending, shape)
    return None


def _by_heads(pending: Pending, shape: tuple[int, ...]) -> Pending:
    transpose = platform.operator("transpose")
    return Pending(None, lambda: transpose(pending.finish().reshape(shape), 1, 2))


def end() -> int:
    """Ends what nobody has taken; returns how many exchanges those were."""
    left, _EARLY.started = _EARLY.started, []
    for one in left:
        one.pending.finish()
    return len(left)


def forget() -> None:
    """Forgets what nobody has taken, after an error: other ranks may never come."""
    _EARLY.started = []
