# SPDX-License-Identifier: Apache-2.0
"""The platform: the contract as one class, and the choice of the framework.

    platform = get_platform()
    total = platform.all_reduce(x, group)

``contract/`` declares what a framework must offer. Only ``platform/<framework>/`` imports a framework; what needs none
(the registry of groups, containers, micro batches) is written once beside the contract.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from hyper_parallel.platform.checks import REDUCE_OPS
from hyper_parallel.platform.contract import PlatformType
from hyper_parallel.platform.contract.activations import Activations, CheckpointPolicy
from hyper_parallel.platform.contract.attention import Attention
from hyper_parallel.platform.contract.autograd import Autograd
from hyper_parallel.platform.contract.collectives import (
    HYPER_PARALLEL_CHECK,
    P2POp,
    Traffic,
)
from hyper_parallel.platform.contract.devices import Devices
from hyper_parallel.platform.contract.differentiable import DifferentiableCollectives
from hyper_parallel.platform.contract.external import External
from hyper_parallel.platform.contract.memory import Memory
from hyper_parallel.platform.contract.modules import Modules, Projection
from hyper_parallel.platform.contract.native import Native, NativeMesh, NativeTensor
from hyper_parallel.platform.contract.ranks import EXISTING_COMM_GROUPS
from hyper_parallel.platform.contract.tensors import OpName, Tensors
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.order import HYPER_PARALLEL_CHECK_ORDER

__all__ = [
    "EXISTING_COMM_GROUPS",
    "HYPER_PARALLEL_CHECK",
    "HYPER_PARALLEL_CHECK_ORDER",
    "HYPER_PARALLEL_PLATFORM",
    "HYPER_PARALLEL_PLATFORM_MINDSPORE",
    "HYPER_PARALLEL_PLATFORM_TORCH",
    "REDUCE_OPS",
    "CheckpointPolicy",
    "NativeMesh",
    "NativeTensor",
    "OpName",
    "P2POp",
    "Platform",
    "PlatformType",
    "Projection",
    "Traffic",
    "get_mindspore_platform",
    "get_platform",
    "get_torch_platform",
    "platform",
]

HYPER_PARALLEL_PLATFORM = "HYPER_PARALLEL_PLATFORM"
HYPER_PARALLEL_PLATFORM_MINDSPORE = "mindspore"
HYPER_PARALLEL_PLATFORM_TORCH = "torch"


class Platform(
    DifferentiableCollectives,
    Autograd,
    Modules,
    Devices,
    Memory,
    Native,
    Activations,
    Attention,
    External,
    Tensors,
):
    """Everything that the library asks of a framework. ``group=None`` means the default group everywhere."""


# The chosen platform; None until get_platform() is called. Tests reset it.
platform: Platform | None = None


def get_platform() -> Platform:
    """The one platform of this process.

    HYPER_PARALLEL_PLATFORM decides; else the framework that the program has imported, if it is exactly one; else
    MindSpore if it is installed; else torch.
    """
    global platform  # noqa: PLW0603 - the contract names this variable as the cache
    if platform is None:
        platform = _choose()()
    return platform


def get_torch_platform() -> Platform:
    """The platform on PyTorch."""
    try:
        from hyper_parallel.platform.torch import TorchPlatform
    except ModuleNotFoundError as error:
        raise coded(
            ImportError,
            "HP101",
            f"PyTorch is not installed ({error}); pip install 'hyper_parallel[torch]'",
        ) from error
    return TorchPlatform()


def get_mindspore_platform() -> Platform:
    """The platform on MindSpore."""
    try:
        from hyper_parallel.platform.mindspore import MindSporePlatform
    except ModuleNotFoundError as error:
        raise coded(
            ImportError, "HP101", f"the MindSpore platform cannot be had here ({error})"
        ) from error
    chosen: Platform = MindSporePlatform()
    return chosen


def _choose() -> Callable[[], Platform]:
    makers = {
        HYPER_PARALLEL_PLATFORM_TORCH: get_torch_platform,
        HYPER_PARALLEL_PLATFORM_MINDSPORE: get_mindspore_platform,
    }
    named = os.environ.get(HYPER_PARALLEL_PLATFORM)
    if named is not None:
        if named.lower() not in makers:
            raise coded(
                ValueError,
                "HP102",
                f"{HYPER_PARALLEL_PLATFORM} must be 'torch' or 'mindspore', got {named!r}",
            )
        return makers[named.lower()]
    imported = [name for name in makers if name in sys.modules]
    if len(imported) == 1:
        return makers[imported[0]]
    return _first_that_imports


def _first_that_imports() -> Platform:
    reasons = []
    for make in (get_mindspore_platform, get_torch_platform):
        try:
            return make()
        except ImportError as error:
            reasons.append(str(error))
    raise coded(
        ImportError,
        "HP101",
        "hyper_parallel needs PyTorch or MindSpore: pip install 'hyper_parallel[torch]' or "
        f"'hyper_parallel[mindspore]' ({'; '.join(reasons)})",
    )
