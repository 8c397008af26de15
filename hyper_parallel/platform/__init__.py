# SPDX-License-Identifier: Apache-2.0
"""The platform layer: the only code that knows the framework."""

from hyper_parallel.platform.errors import CommunicationError
from hyper_parallel.platform.platform import (
    CheckpointPolicy,
    Platform,
    PlatformType,
    get_platform,
)

__all__ = [
    "CheckpointPolicy",
    "CommunicationError",
    "Platform",
    "PlatformType",
    "get_platform",
]
