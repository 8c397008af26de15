# SPDX-License-Identifier: Apache-2.0
"""Functions of torch that read ``tensor.layout``, which for a distributed tensor is its layout on the mesh.

torch.masked runs on whole tensors on every rank, as any operator without a rule. torch.testing.assert_close compares
whole tensors, so all ranks must call it together. With plain tensors both are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.masked
import torch.testing._comparison
from torch.testing._comparison import TensorLikePair

from hyper_parallel.platform.torch import operators
from hyper_parallel.platform.torch.dtensor_base import DTensorBase


class WholePair(TensorLikePair):
    """Two tensors to be compared, either of which may be distributed."""

    def __init__(self, actual: Any, expected: Any, **options: Any) -> None:
        super().__init__(_whole(actual), _whole(expected), **options)


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensorBase) else value


def masked_functions() -> dict[str, Callable[..., Any]]:
    """Returns the functions of torch.masked that read ``tensor.layout``, by name."""
    public = vars(torch.masked)
    return {
        name: public[name]
        for name in torch.masked.__all__
        if isinstance(public[name], FunctionType)
        and public[name].__module__ == "torch.masked._ops"
    }


def dispatch_masked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of torch.masked so that distributed tensors are dispatched."""

    def masked(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        distributed = [value for value in values if isinstance(value, DTensorBase)]
        if not distributed:
            return function(*args, **kwargs)
        return type(distributed[0]).dispatch(masked, args, kwargs)

    # By hand: functools.wraps makes importing the package noticeably slower here.
    masked.__name__, masked.__qualname__ = function.__name__, function.__qualname__
    masked.__module__, masked.__doc__ = function.__module__, function.__doc__
    masked.__wrapped__ = function  # type: ignore[attr-defined]
    operators.NAMES[masked] = f"masked.{name}"
    return masked
