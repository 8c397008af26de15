# SPDX-License-Identifier: Apache-2.0
"""Modules that are absent on this rank: they keep their names and types, and have no tensors.

remove_tensors(model.blocks[0], keep=[])
is_absent(model.blocks[0].mlp)                True: styles and wrappers leave it alone

A parameter that is tied to an absent one has another name here than on one device, where the first name counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hyper_parallel.platform import get_platform

_ABSENT = "_hyper_parallel_absent"
_FIRST_NAMES = "_hyper_parallel_first_names"


def remove_tensors(module: Any, keep: Collection[int]) -> None:
    """Makes a module absent, with all modules inside but those that have one of these ids."""
    platform = get_platform()
    for _, inner in platform.get_cells_and_names(module):
        if id(inner) in keep:
            continue
        for name, _ in platform.own_tensors(inner):
            platform.remove_own_tensor(inner, name)
        vars(inner)[_ABSENT] = True


def is_absent(module: Any) -> bool:
    """Whether the module is on another rank."""
    return _ABSENT in vars(module)


def set_first_names(model: Any, names: Mapping[str, str]) -> None:
    """Says which names tied parameters have in the whole model, by those that they have here."""
    vars(model)[_FIRST_NAMES] = dict(names)


def named_as_whole(model: Any) -> dict[str, Any]:
    """The parameters of a model by the names that they have in the whole model."""
    first: Mapping[str, str] = vars(model).get(_FIRST_NAMES, {})
    parameters = get_platform().parameters_dict(model).items()
    return {first.get(name, name): parameter for name, parameter in parameters}
