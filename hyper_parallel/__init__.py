# SPDX-License-Identifier: Apache-2.0
"""Write a model for one device, say how its tensors lie on a mesh of devices, train it on the whole mesh."""

from hyper_parallel.platform import CheckpointPolicy, CommunicationError, Platform, PlatformType, get_platform

__version__ = "0.1.0"

__all__ = ["CheckpointPolicy", "CommunicationError", "Platform", "PlatformType", "get_platform"]
