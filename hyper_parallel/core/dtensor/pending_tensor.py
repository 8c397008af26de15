# SPDX-License-Identifier: Apache-2.0
"""A redistribution under way.

pending = x.redistribute(placements=[Replicate()], async_op=True)
...                                   # computation that needs no result
whole = pending.wait()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.collectives import is_nonlinear
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.redistribution import plan
from hyper_parallel.core.dtensor.steps import PendingPlan
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded


class PendingTensor:
    """A tensor whose communication has started; ``wait()`` ends it and returns the tensor.

    The tensor that is redistributed must not be changed in place before that.
    """

    def __init__(
        self, tensor: Any, target: Layout, finish: Callable[[Any], Any]
    ) -> None:
        """``finish`` makes the tensor of the target layout from its shard, or from None."""
        platform, local = get_platform(), tensor._local
        self._tensor, self._finish = tensor, finish
        self._version = platform.version_of(local)
        self._pending: PendingPlan | None = None
        self._result: Any = None
        if not any(map(is_nonlinear, tensor._layout.placements)):
            itemsize = platform.get_element_size(local)
            steps = plan(tensor._layout, target, tensor._shape, itemsize)
            self._pending = PendingPlan(steps, platform.detach(local))

    @classmethod
    def done(cls, result: Any) -> PendingTensor:
        """For a tensor whose communication has ended."""
        pending = object.__new__(cls)
        pending._result = result
        return pending

    def wait(self) -> Any:
        """The distributed tensor, in the graph as if it had been redistributed at once."""
        if self._result is None:
            local = self._tensor._local
            if get_platform().version_of(local) != self._version:
                raise coded(
                    RuntimeError,
                    "HP235",
                    "redistribute: the tensor was changed in place between async_op=True and wait(); "
                    "change it after wait(), or a clone of it",
                )
            value = None if self._pending is None else self._pending.finish()
            self._result = self._finish(value)
            self._pending = None
        return self._result
