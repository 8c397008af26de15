# SPDX-License-Identifier: Apache-2.0
"""Mapping a function over nested containers, the same way for every framework.

tree_map(double, {"a": [1, (2, 3)]}) == {"a": [2, (4, 6)]}
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable
from typing import Any


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """The same structure with ``fn(leaf)`` at every leaf of dicts, lists, tuples, sets and dataclasses."""
    twin: Any
    if isinstance(tree, (dict, UserDict)):
        values = {key: tree_map(fn, value) for key, value in tree.items()}
        if type(tree) is dict:
            return values
        twin = copy.copy(
            tree
        )  # keeps what a subclass carries, such as defaultdict's factory
        for (
            key,
            value,
        ) in values.items():  # not update(), which outputs of transformers refuse
            twin[key] = value
        return twin
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(tree_map(fn, value) for value in tree))
    if isinstance(tree, (list, tuple, set, frozenset)):
        return type(tree)(tree_map(fn, value) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        twin = copy.copy(tree)
        for field in dataclasses.fields(tree):
            # object.__setattr__: frozen dataclasses are values too.
            object.__setattr__(
                twin, field.name, tree_map(fn, getattr(tree, field.name))
            )
        return twin
    return fn(tree)


def leaves(tree: Any) -> list[Any]:
    """Every leaf of a nested container, in the order of ``tree_map``."""
    found: list[Any] = []
    tree_map(found.append, tree)
    return found
