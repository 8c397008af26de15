# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallel: schedules of actions, and what stages and micro-batches need from each other."""

from hyper_parallel.core.pipeline_parallel.action import MetaStep, MetaStepType
from hyper_parallel.core.pipeline_parallel.hook_coordinator import HookCoordinator

__all__ = ["HookCoordinator", "MetaStep", "MetaStepType"]
