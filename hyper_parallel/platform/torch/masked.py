# SPDX-License-Identifier: Apache-2.0
"""torch.masked with distributed tensors: on whole tensors on every rank, as any operator without a rule.

Its functions decide by ``tensor.layout``, which for a distributed tensor is where it lies on its mesh. So these stand
in for them; for plain tensors they are those functions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.masked

from hyper_parallel.platform.torch import operators
from hyper_parallel.platform.torch.dtensor_base import DTensorBase


def _dispatched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def masked(*args: Any, **kwargs: Any) -> Any:
        distributed = [
            value
            for value in (*args, *kwargs.values())
            if isinstance(value, DTensorBase)
        ]
        if not distributed:
            return function(*args, **kwargs)
        return type(distributed[0]).dispatch(masked, args, kwargs)

    operators.NAMES[masked] = f"masked.{name}"
    return masked


for _name in torch.masked.__all__:
    _function = getattr(torch.masked, _name)
    if inspect.isfunction(_function) and _function.__module__ == "torch.masked._ops":
        setattr(torch.masked, _name, _dispatched(_name, _function))
