# SPDX-License-Identifier: Apache-2.0
"""The contract between the library and a framework, in parts.

Each module declares one part as an abstract class; ``platform.platform.Platform`` inherits them all. The first
sentence of a method's docstring is its contract, and ``docs/platform.md`` is generated from them.
"""

import enum

__all__ = ["PlatformType"]


class PlatformType(enum.Enum):
    """The frameworks that implement the contract."""

    MINDSPORE = "mindspore"
    PYTORCH = "torch"
