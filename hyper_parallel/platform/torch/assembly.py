# SPDX-License-Identifier: Apache-2.0
"""The parts of the contract on torch put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.platform.platform import P2POp, PlatformType
from hyper_parallel.platform.torch import patches
from hyper_parallel.platform.torch.attention import Attention
from hyper_parallel.platform.torch.collectives import Collectives
from hyper_parallel.platform.torch.deferred_init import DeferredInit
from hyper_parallel.platform.torch.dtensor_base import DTensorBase
from hyper_parallel.platform.torch.gradients import Gradients
from hyper_parallel.platform.torch.interop import Interop
from hyper_parallel.platform.torch.modules import Modules
from hyper_parallel.platform.torch.recompute import Recompute
from hyper_parallel.platform.torch.training import Training

patches.install()


class TorchPlatform(
    Collectives,
    Modules,
    Gradients,
    Recompute,
    DeferredInit,
    Interop,
    Training,
    Attention,
):
    """PyTorch as the core sees it."""

    Tensor = torch.Tensor
    tensor = staticmethod(torch.tensor)
    Parameter = torch.nn.Parameter
    Module = torch.nn.Module
    DTensorBase = DTensorBase
    Function = HigherOrderFunction = torch.autograd.Function
    PipelineStageBase = torch.nn.Module
    platform_type = PlatformType.PYTORCH
    tensor_dtype = torch

    def _start_p2p(self, ops: Sequence[P2POp]) -> list[Any]:
        from hyper_parallel.platform.torch import p2p

        if p2p.is_carried_by_gloo(self, ops):
            return super()._start_p2p(ops)
        return p2p.start_coalesced(self, ops)

    def get_symmetric_memory_handler(self) -> Any:
        """Untested on hardware: CUDA's symmetric memory."""
        from hyper_parallel.platform.torch.symmetric_memory import (
            SymmetricMemoryHandler,
        )

        return SymmetricMemoryHandler(self)
