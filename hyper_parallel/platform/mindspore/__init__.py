# SPDX-License-Identifier: Apache-2.0
"""MindSpore behind the platform contract, one module a part of it."""

from hyper_parallel.platform.mindspore.assembly import MindSporePlatform

__all__ = ["MindSporePlatform"]
