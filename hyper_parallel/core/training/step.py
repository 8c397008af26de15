# SPDX-License-Identifier: Apache-2.0
"""One step of training: forward, backward, clipping, optimizer.

loss, norm = training_step(model, optimizer, lambda: model(x).square().mean(), max_norm=1.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hyper_parallel.platform import get_platform

platform = get_platform()


def training_step(
    module: Any,
    optimizer: Any,
    loss_of: Callable[[], Any],
    max_norm: float | None = None,
) -> tuple[float, float]:
    """Updates a module by the gradients of a loss, clipped to ``max_norm``; returns the loss and the gradients' norm.

    ``loss_of()`` runs forward and returns one number. The norm is that of all gradients together before clipping.
    Gradients go through everything in the order of the module's parameters, so that both frameworks round alike.
    """
    parameters = [
        parameter
        for parameter in platform.parameters_dict(module).values()
        if platform.requires_grad(parameter)
    ]
    loss, gradients = platform.compute_gradients(loss_of, parameters)
    limit = math.inf if max_norm is None else max_norm
    norm = platform.clip_grad_norm_(gradients, limit)
    platform.apply_gradients(optimizer, gradients)
    return loss.item(), norm.item()
