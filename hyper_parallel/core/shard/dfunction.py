# SPDX-License-Identifier: Apache-2.0
"""Autograd functions that a user writes for local tensors and calls with distributed ones.

class Swiglu(DFunction):
    _op_name = "swiglu"                     the rule goes by this name

    @staticmethod
    def forward(ctx, gate, up): ...
    @staticmethod
    def backward(ctx, grad): ...

y = Swiglu.apply(gate, up)
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import OpName

platform = get_platform()


class DFunction(platform.Function):  # type: ignore[misc, name-defined]
    """The framework's autograd function; with distributed tensors it runs on the shards by the rule of ``_op_name``."""

    _op_name: str | None = None

    @staticmethod
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG004
        """The result, on local tensors."""
        raise coded(
            NotImplementedError, "HP318", "a DFunction must define forward(ctx, ...)"
        )

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # noqa: ARG004
        """The gradient of every argument, on local tensors."""
        raise coded(
            NotImplementedError, "HP318", "a DFunction must define backward(ctx, ...)"
        )

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Runs forward and records backward."""
        if not any(isinstance(value, DTensor) for value in (*args, *kwargs.values())):
            return super().apply(*args, **kwargs)
        if cls._op_name is None:
            raise coded(
                ValueError,
                "HP318",
                f"{cls.__name__}.apply: called with distributed tensors, but {cls.__name__} has no _op_name; set "
                "it to the name of a DistributedOp that says what happens to their layouts",
            )
        return _OP_DISPATCHER.dispatch(
            super().apply, args, kwargs, OpName(cls._op_name, False, None)
        )
