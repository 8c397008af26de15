# SPDX-License-Identifier: Apache-2.0
"""Lets torch's functional collectives take our meshes, or (mesh, axis), for groups: ``all_reduce(x, "sum", mesh)``."""

from __future__ import annotations

import functools
import sys
from typing import Any


def take_meshes(*, loads: bool) -> None:
    """Has torch resolve a group that is one of our meshes to the group of its axis; all else stays torch's.

    ``loads``: also where nobody has imported these collectives yet, which takes a while.
    """
    if not loads and "torch.distributed._functional_collectives" not in sys.modules:
        return
    from torch.distributed import _functional_collectives

    usual = _functional_collectives._resolve_group
    if hasattr(usual, "__wrapped__"):
        return

    @functools.wraps(usual)
    def resolve(group: Any, tag: str = "") -> Any:
        mesh, axis = (
            group if isinstance(group, tuple) and len(group) == 2 else (group, None)
        )
        return mesh.get_group(axis) if _is_ours(mesh) else usual(group, tag)

    _functional_collectives._resolve_group = resolve


def _is_ours(mesh: Any) -> bool:
    return type(mesh).__module__.startswith("hyper_parallel.") and hasattr(
        mesh, "get_group"
    )
