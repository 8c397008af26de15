# SPDX-License-Identifier: Apache-2.0
"""What stands for a tensor's layout, shape and dtype in the keys of plans: one object, quick to compare."""

from __future__ import annotations

from typing import Any


class _Spec:
    """One for each layout, shape and dtype that is in use."""

    __slots__ = ()


_SPECS: dict[Any, _Spec] = {}
_MOST_SPECS = 1 << 16


def spec_of(tensor: Any) -> Any:
    """What stands for a tensor, which remembers it."""
    key = (tensor._layout, tensor._shape, tensor._local.dtype)
    spec = _SPECS.get(key)
    if spec is None:
        if len(_SPECS) >= _MOST_SPECS:
            _SPECS.clear()
        spec = _SPECS[key] = _Spec()
    tensor._spec = spec
    return spec
