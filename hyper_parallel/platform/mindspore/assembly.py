# SPDX-License-Identifier: Apache-2.0
"""The parts of the contract on MindSpore put together."""

from __future__ import annotations

from typing import Any

import mindspore
from mindspore import nn

from hyper_parallel.platform.mindspore import patches, private, tensors
from hyper_parallel.platform.mindspore.collectives import Collectives
from hyper_parallel.platform.mindspore.deferred_init import DeferredInit
from hyper_parallel.platform.mindspore.dtensor_base import DTensorBase
from hyper_parallel.platform.mindspore.first_order import FirstOrderFunction
from hyper_parallel.platform.mindspore.gradients import Gradients
from hyper_parallel.platform.mindspore.interop import Interop
from hyper_parallel.platform.mindspore.modules import Modules
from hyper_parallel.platform.mindspore.operators import Operators
from hyper_parallel.platform.mindspore.recompute import Recompute
from hyper_parallel.platform.mindspore.training import Training
from hyper_parallel.platform.platform import PlatformType

patches.install()


class MindSporePlatform(
    Collectives,
    Modules,
    Gradients,
    Recompute,
    DeferredInit,
    Interop,
    Training,
    Operators,
):
    """MindSpore as the core sees it."""

    Tensor = mindspore.Tensor
    tensor = staticmethod(tensors.tensor)
    Parameter = mindspore.Parameter
    Module = nn.Cell
    DTensorBase = DTensorBase
    Function = FirstOrderFunction
    HigherOrderFunction = private.function()
    PipelineStageBase = nn.Cell
    platform_type = PlatformType.MINDSPORE
    tensor_dtype = mindspore

    def get_symmetric_memory_handler(self) -> Any:
        from hyper_parallel.platform.mindspore.symmetric_memory import (
            SymmetricMemoryHandler,
        )

        return SymmetricMemoryHandler(self)
