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
    if isinstance(tree, (dict, UserDict)):
        return _map_mapping(fn, tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(tree_map(fn, value) for value in tree))
    if isinstance(tree, (list, tuple, set, frozenset)):
        return type(tree)(tree_map(fn, value) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_dataclass(fn, tree)
    return fn(tree)


def _map_mapping(fn: Callable[[Any], Any], tree: Any) -> Any:
    values = {key: tree_map(fn, value) for key, value in tree.items()}
    if type(tree) is dict:
        return values
    # A copy keeps what a subclass carries, such as defaultdict's factory.
    twin = copy.copy(tree)
    for key, value in values.items():  # outputs of transformers refuse update()
        twin[key] = value
    return twin


def _map_dataclass(fn: Callable[[Any], Any], tree: Any) -> Any:
    twin = copy.copy(tree)
    for field in dataclasses.fields(tree):
        value = tree_map(fn, getattr(tree, field.name))
        # object.__setattr__: frozen dataclasses are values too.
        object.__setattr__(twin, field.name, value)
    return twin


def leaves(tree: Any) -> list[Any]:
    """Every leaf of a nested container, in the order of ``tree_map``."""
    found: list[Any] = []
    tree_map(found.append, tree)
    return found
