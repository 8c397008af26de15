# SPDX-License-Identifier: Apache-2.0
"""One step of training, forward and backward, with all that can be compared afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.modules.absent import named_as_whole
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.verification.stages import Part
from hyper_parallel.verification.trace import Trace, Value

platform = get_platform()


class Task(NamedTuple):
    """A model, what goes into its loss besides it, and the loss: ``loss(model, *batch)``, one number.

    ``gap``: why the plan is not tested by this, where that is known. With ``part``, of a pipeline, the loss comes with
    the gradients.
    """

    model: Any
    batch: Sequence[Any]
    loss: Callable[..., Any]
    gap: str = ""
    part: Part | None = None


@dataclass
class Step:
    """What a step made, as far as it got."""

    trace: Trace
    parameters: dict[str, Value] = field(default_factory=dict)  # before the step
    buffers: dict[str, Value] = field(default_factory=dict)  # after it
    gradients: dict[str, Value] = field(default_factory=dict)  # those that are not None
    loss: Value | None = None
    random: bytes = b""  # the state of the generator after forward
    drew: bool = False  # whether forward drew random numbers
    error: Exception | None = None
    part: Part | None = None


def run(task: Task, seed: int) -> Step:
    """One step, in which everything is drawn from one seed."""
    step = Step(Trace(task.model, task.part), part=task.part)
    step.parameters = {
        name: Value.of(one) for name, one in named_as_whole(task.model).items()
    }
    seed_all(seed)
    try:
        gradients = _gradients(task, lambda: _forward(task, step))
    except Exception as error:  # noqa: BLE001 - whatever the model raises is what was found
        step.error = error
        return step
    step.gradients = {
        name: Value.of(one) for name, one in gradients.items() if one is not None
    }
    step.buffers = {name: Value.of(one) for name, one in buffers_of(task.model)}
    return step


def _forward(task: Task, step: Step) -> Any:
    before = _random_state()
    with step.trace:
        loss = task.loss(task.model, *task.batch)
    if not platform.is_tensor(loss) or tuple(loss.shape) not in ((), (1,)):
        told = (
            f"shape {tuple(loss.shape)}"
            if platform.is_tensor(loss)
            else type(loss).__name__
        )
        raise coded(
            TypeError,
            "HP711",
            f"verify: expected a loss of one number, got {told}; give loss=, as loss(model, *batch)",
        )
    step.random = _random_state()
    step.drew = step.random != before
    step.loss = Value.of(loss)
    return loss


def _gradients(task: Task, loss_of: Callable[[], Any]) -> dict[str, Any]:
    """The gradients of a loss by the names of the parameters."""
    parameters = named_as_whole(task.model)
    if task.part is not None:
        loss_of()
        return {name: platform.gradient_of(one) for name, one in parameters.items()}
    if hasattr(platform.Tensor, "backward"):
        loss_of().backward()
        return {name: one.grad for name, one in parameters.items()}
    trained = {
        name: one for name, one in parameters.items() if platform.requires_grad(one)
    }
    _, pairs = platform.compute_gradients(loss_of, list(trained.values()))
    return {name: pair[1] for name, pair in zip(trained, pairs, strict=True)}


def buffers_of(model: Any) -> Iterator[tuple[str, Any]]:
    """The tensors of a model that are no parameters, by dotted names."""
    parameters = {id(one) for one in platform.parameters_dict(model).values()}
    for path, module in platform.get_cells_and_names(model):
        for name, tensor in platform.own_tensors(module):
            if id(tensor) not in parameters:
                yield f"{path}.{name}" if path else name, tensor


def seed_all(seed: int) -> None:
    """Seeds all that a model or a loss may draw from."""
    platform.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def generators_kept() -> Iterator[None]:
    """A context after which all generators go on as if nothing had been drawn."""
    states, own, numpys = (
        platform.get_rng_states(),
        random.getstate(),
        np.random.get_state(),
    )
    try:
        yield
    finally:
        platform.set_rng_states(states)
        random.setstate(own)
        np.random.set_state(numpys)


def _random_state() -> bytes:
    state: bytes = platform.tensor_to_numpy(platform.get_rng_state()).tobytes()
    return state
