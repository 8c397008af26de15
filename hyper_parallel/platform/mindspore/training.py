# SPDX-License-Identifier: Apache-2.0
"""What training needs of MindSpore: optimizers by name, gradients as a function's, memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mindspore
from mindspore import Parameter
from mindspore.experimental import optim

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import Platform

_OPTIMIZERS = {"adamw": optim.AdamW, "adam": optim.Adam, "sgd": optim.SGD}


class Training(Platform):
    """The part of the contract that is about training as a whole."""

    def prepare_module(self, module: Any, dtype: str) -> Any:
        kind = self.str_to_dtype(dtype)
        wrong = [
            name
            for name, p in module.parameters_and_names()
            if self.is_floating_point(p) and p.dtype != kind
        ]
        if wrong:
            raise coded(
                ValueError,
                "HP138",
                f"prepare_module: parameter {wrong[0]} is not {dtype}; MindSpore makes parameters with the dtype "
                "that the module says: change it there",
            )
        if self.device_type() == "cpu":
            # The threads that prepare operators ahead wait by spinning, which takes most of the time of small ones.
            mindspore.set_context(pynative_synchronize=True)
        return module

    def new_optimizer(
        self, kind: str, groups: Sequence[Mapping[str, Any]], **options: Any
    ) -> Any:
        return _OPTIMIZERS[kind]([dict(group) for group in groups], **options)

    def set_learning_rate(self, optimizer: Any, rate: float) -> None:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Parameter):
                mindspore.ops.assign(
                    group["lr"], mindspore.Tensor(rate, group["lr"].dtype)
                )
            else:
                group["lr"] = rate

    def compute_gradients(
        self, loss_of: Callable[[], Any], parameters: Sequence[Any]
    ) -> tuple[Any, Sequence[Any]]:
        """The loss, and each parameter with its gradient."""

        # MindSpore asks for the name of what it differentiates, which not every callable has.
        def compute_loss() -> Any:
            return loss_of()

        compute = mindspore.value_and_grad(compute_loss, None, weights=list(parameters))
        loss, gradients = compute()
        return loss, list(zip(parameters, gradients, strict=True))

    def apply_gradients(self, optimizer: Any, gradients: Sequence[Any]) -> None:
        of_parameter = {id(parameter): gradient for parameter, gradient in gradients}
        # In the order of the optimizer's groups, in which it takes them.
        optimizer(tuple(of_parameter[id(one)] for one in optimizer.parameters))

    def _device_memory(self) -> int:
        """Untested on hardware: the peak that MindSpore's allocator has seen."""
        return int(mindspore.runtime.max_memory_allocated())
