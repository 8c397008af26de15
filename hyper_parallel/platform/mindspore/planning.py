# SPDX-License-Identifier: Apache-2.0
"""MindSpore has no tensors without data, so models are planned on PyTorch; plans that were saved serve here too."""

from __future__ import annotations

from typing import Any, NoReturn

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import Platform


class NoPlanning(Platform):
    """The part of the contract that is about planning."""

    def copy_without_data(self, module: Any) -> Any:
        _refuse(module)

    def simulate_ranks(self) -> Any:
        _refuse()

    def listen_to_functions(self, listener: Any) -> Any:
        _refuse(listener)


def _refuse(*_: Any) -> NoReturn:
    raise coded(
        NotImplementedError,
        "HP903",
        "auto_plan: MindSpore has no tensors without data, on which a model is planned; plan it on PyTorch, save the "
        "plan, and load it here: the styles are the same",
    )
