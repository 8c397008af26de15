# SPDX-License-Identifier: Apache-2.0
"""A model outside of training: nothing is dropped at random, counted or recorded.

with evaluating(model):
    loss = compute(model, x)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hyper_parallel.platform import get_platform

platform = get_platform()


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluates within the context: without gradients, and with all modules as they are outside of training."""
    modules = [module for _, module in platform.get_cells_and_names(model)]
    in_training = [module for module in modules if module.training]
    _set_training(in_training, False)
    try:
        with platform.no_grad():
            yield
    finally:
        _set_training(in_training, True)


def _set_training(modules: list[Any], is_on: bool) -> None:
    for module in modules:
        module.training = is_on
