# SPDX-License-Identifier: Apache-2.0
"""The base of the core's autograd functions on MindSpore, which refuses gradients of gradients.

MindSpore 2.10 leaves terms out of the second derivatives of its own operators, on plain tensors as well: of ``matmul``,
``bmm``, ``linear``, ``mean`` and ``amax``, compared with PyTorch. What is communicated would be exact; the numbers
would be wrong all the same, and other ones than those of the layers of ``mindspore.nn`` on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.mindspore import private
from hyper_parallel.platform.platform import get_platform

_Function: Any = private.function()


class FirstOrderFunction(_Function):
    """An autograd function whose backward raises where it is itself recorded."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = cls.__dict__.get("backward")
        if own is not None:
            cls.backward = staticmethod(_first_order_only(own.__func__))


def _first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        # The same on all ranks: it is the state of the tape, and not that of a shard.
        if private.executor().requires_grad():
            raise coded(
                NotImplementedError,
                "HP142",
                "gradients of gradients of distributed tensors are not supported on MindSpore, whose own operators "
                "(matmul, mean) have wrong second derivatives; take them with PyTorch, or compute the first "
                "gradient by a formula",
            )
        with get_platform().in_backward():
            return backward(ctx, *gradients)

    return checked
