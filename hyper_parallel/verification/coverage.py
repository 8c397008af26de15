# SPDX-License-Identifier: Apache-2.0
"""What a comparison cannot vouch for: numbers that are not finite, gradients that nobody has, plans that do nothing.

Two steps that are nan everywhere are equal element by element, whatever the plan does; so are two plain steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.ledger import CommunicationLedger
from hyper_parallel.verification.step import Step
from hyper_parallel.verification.trace import Event, Value

# As many names are listed; a model with one nan has it in every gradient.
MOST_NAMED = 3


def find_gaps(
    truth: Step, mine: Step, mesh: DeviceMesh, ledger: CommunicationLedger
) -> Iterator[str]:
    """Why this rank's two steps say nothing about the plan, a sentence each."""
    yield from _not_finite(truth, "one process")
    yield from _not_finite(mine, "the mesh")
    if not truth.gradients and not mine.gradients:
        yield "no gradient was compared: no parameter has one, in either step"
    is_parallel = (
        mesh.size() == 1
        or bool(ledger.entries)
        or any(value.layout is not None for value in _values(mine))
    )
    if not is_parallel:
        yield "nothing was distributed: the step on the mesh has no distributed tensor and no collective"


def _not_finite(step: Step, where: str) -> Iterator[str]:
    named = []
    if step.loss is not None and not is_finite(step.loss.array):
        named.append("the loss")
    outputs = [event for event in step.trace.events if event.place == "output"]
    if any(not event.module and not _all_finite(event.values) for event in outputs):
        named.append("the output of the model")
    gradients = [
        name for name, value in step.gradients.items() if not is_finite(value.array)
    ]
    if gradients:
        named.append(_told_gradients(gradients, step.gradients))
    if named:
        first = _first_module(step.trace.events)
        yield f"nan or infinite on {where}: {', '.join(named)}{first}"


def _told_gradients(gradients: list[str], of_all: Mapping[str, Value]) -> str:
    if len(gradients) == len(of_all):
        return "every gradient"
    more = len(gradients) - MOST_NAMED
    names = ", ".join(gradients[:MOST_NAMED])
    return f"the gradients of {names}{f' and {more} more' if more > 0 else ''}"


def _first_module(events: Iterable[Event]) -> str:
    """Where the numbers stop being finite, if it is a module whose inputs are."""
    inputs: dict[tuple[str, int], bool] = {}
    for event in events:
        finite = _all_finite(event.values)
        if event.place == "input":
            inputs[event.module, event.call] = finite
        elif not finite and inputs.get((event.module, event.call), False):
            module = (
                f"module {event.module!r}" if event.module else "the model's own code"
            )
            return f"; first in {module}"
    return ""


def _values(step: Step) -> Iterator[Value]:
    yield from step.parameters.values()
    yield from step.gradients.values()
    for event in step.trace.events:
        yield from event.values
    if step.loss is not None:
        yield step.loss


def _all_finite(values: Iterable[Value]) -> bool:
    return all(is_finite(value.array) for value in values)


def is_finite(array: Any) -> bool:
    """Whether every number is."""
    if array.dtype.kind in "biu":
        return True
    wide = (
        array if array.dtype.kind in "fc" else array.astype(np.float64)
    )  # such as bfloat16, which is none of numpy's
    return bool(np.isfinite(wide).all())
