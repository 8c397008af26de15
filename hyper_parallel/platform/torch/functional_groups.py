# SPDX-License-Identifier: Apache-2.0
"""Meshes of this package as groups of torch's functional collectives: ``all_reduce(x, "sum", mesh)``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def resolve_meshes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps torch's ``_resolve_group`` so that it also accepts a mesh of one axis, or (mesh, axis)."""

    @functools.wraps(original)
    def resolve(group: Any, tag: str = "") -> Any:
        is_pair = isinstance(group, tuple) and len(group) == 2
        mesh, axis = group if is_pair else (group, None)
        return mesh.get_group(axis) if _is_ours(mesh) else original(group, tag)

    return resolve


def _is_ours(mesh: Any) -> bool:
    is_of_this_package = type(mesh).__module__.startswith("hyper_parallel.")
    return is_of_this_package and hasattr(mesh, "get_group")
