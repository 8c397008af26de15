# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallel: what the stages of a model and their micro-batches need from each other."""

from hyper_parallel.core.pipeline_parallel.hook_coordinator import HookCoordinator

__all__ = ["HookCoordinator"]
