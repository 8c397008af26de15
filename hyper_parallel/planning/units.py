# SPDX-License-Identifier: Apache-2.0
"""The parts of a model that are planned by themselves: repeated blocks, each kind of which is planned once.

find_units(model)            {"model.layers.0": ..., "model.layers.1": ...}
group_units(units)           [["model.layers.0", "model.layers.1"]]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hyper_parallel.core.modules.blocks import count_elements
from hyper_parallel.platform import get_platform

platform = get_platform()
_MOSTLY = 0.9  # of the parameters of a block


def find_units(model: Any) -> dict[str, Any]:
    """The members of the model's lists of modules; of lists in lists the inner ones, if they hold nearly all."""
    return dict(_walk("", model))


def _walk(path: str, module: Any) -> Iterator[tuple[str, Any]]:
    for own, child in platform.own_modules(module):
        name = f"{path}.{own}" if path else own
        if not platform.is_module_list(child) or _holds_single_layers(child):
            yield from _walk(name, child)
            continue
        for number, member in platform.own_modules(child):
            inner = dict(_walk(f"{name}.{number}", member))
            held = sum(count_elements(one) for one in inner.values())
            if held and held >= _MOSTLY * count_elements(member):
                yield from inner.items()
            elif count_elements(member):
                yield f"{name}.{number}", member


def _holds_single_layers(modules: Any) -> bool:
    return any(
        platform.projection(member) is not None
        for _, member in platform.own_modules(modules)
    )


def group_units(units: Mapping[str, Any]) -> list[list[str]]:
    """The names of units that are alike: of one type, with parameters of the same names and shapes."""
    groups: dict[Any, list[str]] = {}
    for name, module in units.items():
        parameters = platform.parameters_dict(module).items()
        shapes = tuple((own, tuple(one.shape)) for own, one in parameters)
        groups.setdefault((type(module), _generalize(name), shapes), []).append(name)
    return list(groups.values())


def _generalize(name: str) -> str:
    """The name with its first number left out, as blocks of one list share it."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def to_patterns(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """The fewest patterns that match these names and none of the others that are known."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_generalize(name), []).append(name)
    everyone: dict[str, int] = {}
    for name in known:
        general = _generalize(name)
        everyone[general] = everyone.get(general, 0) + 1
    patterns: list[str] = []
    for pattern, members in found.items():
        is_exact = everyone.get(pattern, 0) == len(members) and len(members) > 1
        patterns += [pattern] if is_exact else members
    return patterns
