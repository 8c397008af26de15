# SPDX-License-Identifier: Apache-2.0
"""Training: one step of a model, on any mesh that it lies on."""

from hyper_parallel.core.training.step import training_step

__all__ = ["training_step"]
