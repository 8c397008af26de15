# SPDX-License-Identifier: Apache-2.0
"""Operators in place that change the shape of their target: ``x.t_()``, ``x.unsqueeze_(0)``.

The shard is changed in place by the framework, so that its graph, its views and its hooks are those of one device, and
the distributed tensor takes the layout and the shape that the operator gives to a new tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard.arguments import OperatorError, refuse_copy
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()
SHAPE_CHANGES = ("squeeze", "t", "transpose", "unsqueeze")


class Reshaped:
    """The way of such a call."""

    def __init__(self, dispatch: Callable[..., Any], func: Any, name: str) -> None:
        self._dispatch, self._func, self._name = dispatch, func, name

    def run(self, tensors: list[DTensor], args: Any, kwargs: Any) -> Any:
        """The target in its new shape."""
        target = tensors[0]
        refuse_copy(self._name, target)
        before = DTensor(platform.detach(target._local), target._layout, target._shape)
        view = self._dispatch(
            platform.operator(self._name), (before, *args[1:]), kwargs
        )
        if view._lost_view_of is not None:
            raise coded(
                OperatorError,
                "HP310",
                f"{self._name}_: in {target.layout} data would have to move, and the target's views would not "
                f"follow; use {self._name}(), or redistribute() first",
            )
        if self._name == "squeeze":
            args, kwargs = (target, _squeezed(target._shape, *args[1:], **kwargs)), {}
        self._func(target._local, *args[1:], **kwargs)
        target.take_form(view._layout, view._shape)
        return target


def _squeezed(shape: Any, dim: Any = None) -> tuple[int, ...]:
    """The dims of the whole that have one element, among those that are named: a shard may have more such dims."""
    dims = (
        range(len(shape))
        if dim is None
        else dim
        if isinstance(dim, (list, tuple))
        else (dim,)
    )
    return tuple(one for one in dims if len(shape) and shape[one] == 1)
