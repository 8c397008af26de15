# SPDX-License-Identifier: Apache-2.0
"""Which models run in this thread whose plain tensors count as the same on every rank."""

from __future__ import annotations

import threading

from hyper_parallel.core.dtensor.modes import MODES
from hyper_parallel.core.modules.boundary import call_being_entered


class _Running(threading.local):
    """Per model: the call that entered it, and what held for plain tensors before."""

    def __init__(self) -> None:
        self.stack: list[tuple[object | None, bool]] = []


_RUNNING = _Running()


def begin_model() -> None:
    """From now on plain tensors among distributed ones count as the same on every rank."""
    _RUNNING.stack.append((call_being_entered(), MODES.replicate_plain))
    MODES.replicate_plain = True


def end_model() -> None:
    """Ends what the last ``begin_model`` began."""
    _, MODES.replicate_plain = _RUNNING.stack.pop()


def is_inside_model() -> bool:
    """Whether a model runs whose inputs have been wrapped: a plain tensor is then one that it has made.

    While a model is being entered, its inputs still come from its caller.
    """
    stack = _RUNNING.stack
    if not stack:
        return False
    entering = call_being_entered()
    return entering is None or any(call is not entering for call, _ in stack)
