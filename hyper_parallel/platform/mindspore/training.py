# SPDX-License-Identifier: Apache-2.0
"""A step of training on MindSpore: optimizers by name, gradients as a function's, clipping, memory."""

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

    def training_step(
        self,
        module: Any,  # noqa: ARG002 - the optimizer knows its parameters
        optimizer: Any,
        loss_of: Callable[[], Any],
        max_norm: float | None,
    ) -> tuple[float, float]:
        parameters = (
            optimizer.parameters
        )  # in the order of its groups, in which it takes gradients

        def named() -> (
            Any
        ):  # MindSpore asks for the name of what it differentiates, which not all that can be called has
            return loss_of()

        loss, gradients = mindspore.value_and_grad(named, None, weights=parameters)()
        pairs = zip(parameters, gradients, strict=True)
        norm = self.clip_grad_norm_(
            pairs, float("inf") if max_norm is None else max_norm
        )
        optimizer(gradients)
        return loss.item(), norm.item()

    def _device_memory(self) -> int:
        """Untested on hardware: the peak that MindSpore's allocator has seen."""
        return int(mindspore.runtime.max_memory_allocated())
