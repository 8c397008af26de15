# SPDX-License-Identifier: Apache-2.0
"""How keys and values travel where nothing else is said: gathered at once, or passed around.

set_rotate_method("alltoall")
"""

from __future__ import annotations

from hyper_parallel.platform.error_codes import coded

_ROTATES = {"allgather": False, "alltoall": True}
_METHOD = ["allgather"]  # of this process


def set_rotate_method(rotate_method: str) -> None:
    """Gathers all keys and values at once ("allgather"), or passes them from rank to rank ("alltoall").

    It holds for what is applied or entered from now on. The first needs memory for the keys of all ranks.
    """
    rotates(rotate_method)
    _METHOD[0] = rotate_method


def rotates(rotate_method: str | None) -> bool:
    """Whether keys go round by this method, or by the one that was set."""
    name = _METHOD[0] if rotate_method is None else rotate_method
    if name not in _ROTATES:
        raise coded(
            ValueError,
            "HP802",
            f"context parallel: unknown rotate method {name!r}; expected one of {', '.join(map(repr, _ROTATES))}",
        )
    return _ROTATES[name]
