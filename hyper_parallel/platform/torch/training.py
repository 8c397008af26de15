# SPDX-License-Identifier: Apache-2.0
"""What training needs of torch: optimizers by name, gradients, memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hyper_parallel.platform.platform import Platform

_OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


class Training(Platform):
    """The part of the contract that is about training as a whole."""

    def prepare_module(self, module: Any, dtype: str) -> Any:
        kind = self.str_to_dtype(dtype)
        if any(parameter.is_meta for parameter in module.parameters()):
            return module.to(kind)
        return module.to(self.device(), kind)

    def new_optimizer(
        self, kind: str, groups: Sequence[Mapping[str, Any]], **options: Any
    ) -> Any:
        return _OPTIMIZERS[kind]([dict(group) for group in groups], **options)

    def set_learning_rate(self, optimizer: Any, rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate

    def compute_gradients(
        self, loss_of: Callable[[], Any], parameters: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        """The loss, and the parameters, each of which now has its gradient."""
        loss = loss_of()
        loss.backward()
        return loss, parameters

    def apply_gradients(self, optimizer: Any, gradients: Sequence[Any]) -> None:  # noqa: ARG002 - parameters have them
        optimizer.step()
        optimizer.zero_grad()

    def _device_memory(self) -> int:
        """Untested on hardware: the peak that torch's allocator has seen."""
        return int(torch.accelerator.max_memory_allocated())
