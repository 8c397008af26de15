# SPDX-License-Identifier: Apache-2.0
"""What goes into every module of a model and what comes out, in the order in which it happens.

trace = Trace(model)
with trace:
    loss = model(x)
trace.events            of inner modules before outer ones; of a module that raises, only the input
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.modules.blocks import modules_by_name
from hyper_parallel.core.modules.boundary import attach
from hyper_parallel.platform import get_platform
from hyper_parallel.verification.stages import Part

platform = get_platform()


@dataclass(frozen=True)
class Value:
    """A tensor as it was at one moment: this rank's elements, and how they lie, if it says."""

    array: Any
    dtype: str
    shape: tuple[int, ...]  # of the whole; of a plain tensor, its own
    layout: Layout | None = None
    pending: Any = (
        None  # of a tensor with a pending reduction, a twin that can be reduced
    )

    @classmethod
    def of(cls, tensor: Any) -> Value:
        """What a tensor holds now; it may be changed in place later."""
        array = platform.tensor_to_numpy(tensor).copy()
        if not isinstance(tensor, DTensor):
            return cls(array, str(tensor.dtype), tuple(tensor.shape))
        layout, shape = tensor.layout, tuple(tensor.shape)
        twin = (
            DTensor(platform.clone(tensor.to_local()), layout, shape)
            if layout.is_partial()
            else None
        )
        return cls(array, str(tensor.dtype), shape, layout, twin)


@dataclass(frozen=True)
class Event:
    """A module is called, or is done."""

    place: str  # "input" or "output"
    module: str
    call: int
    within: str | None  # the module whose code called it
    values: tuple[Value, ...]

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells it from all others of a step."""
        return self.place, self.module, self.call


class Trace:
    """Records a model's calls while it is entered; of a pipeline's stages those of their modules, by micro batch."""

    def __init__(self, model: Any, part: Part | None = None) -> None:
        self.events: list[Event] = []
        self.running: list[
            tuple[str, int]
        ] = []  # (module, call), the innermost last; what raised is still there
        self._model, self._part = model, part
        self._calls: Counter[str] = Counter()
        self._handles: list[Any] = []

    def __enter__(self) -> Trace:
        part = self._part
        watched = modules_by_name(self._model) if part is None else part.modules
        for name, module in watched.items():
            self._watch(name, module)
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _watch(self, name: str, module: Any) -> None:
        def enter(_: Any, args: Any, kwargs: Any) -> None:
            self._calls[name] = self._number_of_call(name)
            self._record("input", name, self._calls[name], (args, kwargs))
            self.running.append((name, self._calls[name]))

        def leave(_: Any, output: Any) -> None:
            while (
                self.running and self.running[-1][0] != name
            ):  # those that raised what their caller caught
                self.running.pop()
            if self.running:
                _, call = self.running.pop()
                self._record("output", name, call, output)

        # The trace is the outermost phase: it records inputs and outputs as the caller sees them.
        handle = attach(module, "trace", enter=enter, leave=leave, source="verify")
        self._handles.append(handle)

    def _number_of_call(self, name: str) -> int:
        return self._calls[name] + 1 if self._part is None else self._part.micro() + 1

    def _record(self, place: str, name: str, call: int, tree: Any) -> None:
        within = self.running[-1][0] if self.running else None
        values = tuple(Value.of(tensor) for tensor in _tensors(tree))
        self.events.append(Event(place, name, call, within, values))


def _tensors(tree: Any) -> Iterator[Any]:
    """The tensors in nested containers. Nothing is built anew, which the outputs of some libraries refuse."""
    if platform.is_tensor(tree):
        if isinstance(tree, DTensor) or (
            platform.is_dense(tree) and not platform.is_meta(tree)
        ):
            yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from _tensors(getattr(tree, field.name))
