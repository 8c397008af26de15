# SPDX-License-Identifier: Apache-2.0
"""Modules of a model by name: all of them, the repeated blocks, and what they weigh.

modules_by_name(model)              {"": model, "layers": ..., "layers.0": ..., ...}
find_blocks(model)                  ["layers.0", "layers.1", ...]
"""

from __future__ import annotations

import math
from typing import Any

from hyper_parallel.platform import get_platform

platform = get_platform()


def modules_by_name(model: Any) -> dict[str, Any]:
    """All modules; of those that share a name, as a wrapper does with what it wraps, the outermost one."""
    found: dict[str, Any] = {}
    for name, module in platform.get_cells_and_names(model):
        found.setdefault(name, module)
    return found


def find_blocks(model: Any) -> list[str]:
    """The names of the repeated blocks: the members of the list of modules with most parameters."""
    best: tuple[int, str, Any] = (-1, "", None)
    for name, module in platform.get_cells_and_names(model):
        size = count_elements(module)
        if platform.is_module_list(module) and size > best[0]:
            best = size, name, module
    _, name, blocks = best
    return [] if blocks is None else name_members(blocks, name)


def name_members(module: Any, name: str) -> list[str]:
    """The names of a module's own submodules, where it has this name itself."""
    members = [member for member, _ in platform.own_modules(module)]
    return [f"{name}.{member}" if name else member for member in members]


def count_elements(module: Any) -> int:
    """How many elements the parameters of a module have."""
    parameters = platform.parameters_dict(module).values()
    return sum(math.prod(parameter.shape) for parameter in parameters)
