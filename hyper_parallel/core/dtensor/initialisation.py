# SPDX-License-Identifier: Apache-2.0
"""Parameters without data, and the data later: the same numbers on every mesh as one device would have drawn.

with init_empty_weights():
    model = Model()                       no memory
distribute_module(model, mesh, ...)       still none
init_parameters(model)                    each parameter drawn whole, cut, and the rest dropped
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from hyper_parallel.platform import get_platform


def init_on_device(
    device: Any, include_buffers: bool = False
) -> AbstractContextManager[Any]:
    """A context in which new parameters land on a device."""
    return get_platform().init_on_device(device, include_buffers)


def init_empty_weights(include_buffers: bool = False) -> AbstractContextManager[Any]:
    """A context in which new parameters have a shape and a dtype, and no data."""
    return init_on_device(get_platform().meta_device, include_buffers)


def init_parameters(module: Any, stage_index: int = 0) -> None:
    """Gives data to parameters that have none, plain or distributed, each as one device would have drawn it."""
    get_platform().init_parameters(module, stage_index)
