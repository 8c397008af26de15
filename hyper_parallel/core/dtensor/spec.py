# SPDX-License-Identifier: Apache-2.0
"""The interned (layout, shape, dtype) of a tensor, which is cheap to compare in the keys of plans."""

from __future__ import annotations

import functools
from typing import Any

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.platform import get_platform

platform = get_platform()


class _Spec:
    """One object per layout, shape and dtype in use."""

    __slots__ = ()


_SPECS: dict[Any, _Spec] = {}
_MOST_SPECS = 1 << 16


def spec_of(tensor: Any) -> Any:
    """The interned (layout, shape, dtype) key, cached on the tensor."""
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
    """Whether a tensor that requires a gradient is Partial by something other than a sum.

    The gradient of a part then differs from that of the value, so operators use the reduced value.
    """
    return has_other_than_sum(tensor._layout) and bool(
        platform.requires_grad(tensor._local)
    )


@functools.lru_cache(maxsize=4096)
def has_other_than_sum(layout: Layout) -> bool:
    """Whether a placement is Partial by something other than a sum."""
    return (
        any(op not in (None, "sum") for op in layout.partial)
        if layout.placements
        else False
    )
