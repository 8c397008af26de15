# SPDX-License-Identifier: Apache-2.0
"""Parameters without data that are initialized later, on every mesh with the values of one device.

with init_empty_weights():
    model = Model()                       no memory
distribute_module(model, mesh, ...)       still none
init_parameters(model)                    each parameter is drawn in full, and only the shard is kept
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from hyper_parallel.platform import get_platform


def init_on_device(
    device: Any, include_buffers: bool = False
) -> AbstractContextManager[Any]:
    """A context in which new parameters are created on a device."""
    return get_platform().init_on_device(device, include_buffers)


def init_empty_weights(include_buffers: bool = False) -> AbstractContextManager[Any]:
    """A context in which new parameters have a shape and a dtype but no data."""
    return init_on_device(get_platform().meta_device, include_buffers)


def init_parameters(module: Any, stage_index: int = 0) -> None:
    """Initializes parameters without data, plain or distributed, with the values of one device."""
    get_platform().init_parameters(module, stage_index)
