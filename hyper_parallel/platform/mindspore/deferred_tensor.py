# SPDX-License-Identifier: Apache-2.0
"""Tensors without data that know how to get it, and those that are cut from them.

    later = deferred_tensor.tensor(shape, dtype, draw)         # on the meta device; draw() will be its data
    half = deferred_tensor.derived(later, (2, 4), lambda whole: whole[:2])

MindSpore runs no operator on a tensor without data, so what the platform may have to do to one goes by here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from mindspore import mint

Draw = Callable[[], Any]

# By identity, as a tensor is not compared by ``==``.
_DRAWS: dict[int, tuple[weakref.ref[Any], Draw]] = {}


def remember(tensor: Any, draw: Draw) -> None:
    """From now on ``draw()`` is what the tensor will have as its data."""
    key = id(tensor)

    def forget(gone: Any) -> None:
        if key in _DRAWS and _DRAWS[key][0] is gone:
            del _DRAWS[key]

    _DRAWS[key] = weakref.ref(tensor, forget), draw


def draw_of(tensor: Any) -> Draw | None:
    """What gives the tensor's data; None if nobody knows."""
    found = _DRAWS.get(id(tensor))
    return found[1] if found is not None and found[0]() is tensor else None


def tensor(shape: Sequence[int], dtype: Any, draw: Draw | None) -> Any:
    """A tensor without data that will have what ``draw`` gives."""
    made = mint.empty(tuple(shape), dtype=dtype, device="meta")
    if draw is not None:
        remember(made, draw)
    return made


def derived(source: Any, shape: Sequence[int], function: Callable[[Any], Any]) -> Any:
    """A tensor without data that will have what the function makes of the source's data."""
    draw = draw_of(source)
    return tensor(
        shape, source.dtype, None if draw is None else lambda: function(draw())
    )
