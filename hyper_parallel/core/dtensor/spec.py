# SPDX-License-Identifier: Apache-2.0
"""What stands for a tensor's layout, shape and dtype in the keys of plans: one object, quick to compare."""

from __future__ import annotations

import functools
from typing import Any

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.platform import get_platform

platform = get_platform()


class _Spec:
    """One for each layout, shape and dtype that is in use."""

    __slots__ = ()


_SPECS: dict[Any, _Spec] = {}
_MOST_SPECS = 1 << 16


def spec_of(tensor: Any) -> Any:
    """What stands for a tensor, which remembers it."""
    key = (tensor._layout, tensor._shape, tensor._local.dtype, waits_for_value(tensor))
    spec = _SPECS.get(key)
    if spec is None:
        if len(_SPECS) >= _MOST_SPECS:
            _SPECS.clear()
        spec = _SPECS[key] = _Spec()
    if tensor._taken is None:
        tensor._spec = spec
    return spec


def waits_for_value(tensor: Any) -> bool:
    """Whether something else than a sum is pending in a tensor that gradients flow through.

    The gradient of a part is then another than that of the value, so operators take the value.
    """
    return has_other_than_sum(tensor._layout) and bool(
        platform.requires_grad(tensor._local)
    )


@functools.lru_cache(maxsize=4096)
def has_other_than_sum(layout: Layout) -> bool:
    """Whether a reduction is pending that is no sum."""
    return (
        any(op not in (None, "sum") for op in layout.partial)
        if layout.placements
        else False
    )
