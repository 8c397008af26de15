# SPDX-License-Identifier: Apache-2.0
"""PyTorch behind the platform contract, one module a part of it."""

from hyper_parallel.platform.torch.assembly import TorchPlatform

__all__ = ["TorchPlatform"]
