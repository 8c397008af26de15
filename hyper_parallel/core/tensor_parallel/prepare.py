# SPDX-License-Identifier: Apache-2.0
"""Styles for what goes into a module and what comes out, with nothing done to the module itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import Placement
from hyper_parallel.core.tensor_parallel.base import (
    ParallelStyle,
    checked_placement,
    handed_out,
)
from hyper_parallel.core.tensor_parallel.line import Line
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()
Placements = Placement | Sequence[Placement | None] | None


class PrepareModuleInput(ParallelStyle):
    """Brings a module's inputs from the layouts that they have to those that it wants; None leaves one alone."""

    def __init__(
        self,
        *,
        input_layouts: Placements = None,
        desired_input_layouts: Placements = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _several(input_layouts)
        self.desired_input_layouts = _several(desired_input_layouts)
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        _assert_pairs(
            "input_layouts",
            self.input_layouts,
            "desired_input_layouts",
            self.desired_input_layouts,
        )
        _assert_pairs(
            "input_kwarg_layouts",
            sorted(self.input_kwarg_layouts),
            "desired_input_kwarg_layouts",
            sorted(self.desired_input_kwarg_layouts),
        )

    def told(self) -> dict[str, Any]:
        """What the style was told beyond its defaults."""
        named = {
            name: self.desired_input_kwarg_layouts[name]
            for name in self.input_kwarg_layouts
        }
        return {"desired": [str(p) for p in self.desired_input_layouts or ()], **named}

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Puts the module on a mesh of one axis and returns it."""
        line, local = Line(device_mesh), self.use_local_output
        in_order = _preparers(
            line, self.input_layouts, self.desired_input_layouts, local
        )
        by_name = {
            name: _preparer(line, have, self.desired_input_kwarg_layouts[name], local)
            for name, have in self.input_kwarg_layouts.items()
        }

        def enter(owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.input_layouts is not None:
                args = _all_prepared(owner, "input", args, in_order)
            given = {
                name: prepare for name, prepare in by_name.items() if name in kwargs
            }
            made = {
                name: prepare(owner, f"argument {name}", kwargs[name])
                for name, prepare in given.items()
            }
            return args, {**kwargs, **made}

        platform.register_forward_pre_hook(module, enter, with_kwargs=True)
        return module


class PrepareModuleOutput(ParallelStyle):
    """Brings a module's outputs from the layouts that they have to those that are wanted; None leaves one alone."""

    def __init__(
        self,
        *,
        output_layouts: Placements,
        desired_output_layouts: Placements,
        use_local_output: bool = True,
    ) -> None:
        self.output_layouts = _several(output_layouts) or ()
        self.desired_output_layouts = _several(desired_output_layouts) or ()
        self.use_local_output = use_local_output
        _assert_pairs(
            "output_layouts",
            self.output_layouts,
            "desired_output_layouts",
            self.desired_output_layouts,
        )

    def told(self) -> dict[str, Any]:
        """What the style was told beyond its defaults."""
        return {"desired": [str(p) for p in self.desired_output_layouts]}

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Puts the module on a mesh of one axis and returns it."""
        line, local = Line(device_mesh), self.use_local_output
        in_order = _preparers(
            line, self.output_layouts, self.desired_output_layouts, local
        )

        def leave(owner: Any, _: Any, output: Any) -> Any:
            values = tuple(output) if isinstance(output, (list, tuple)) else (output,)
            made = _all_prepared(owner, "output", values, in_order)
            if not isinstance(output, (list, tuple)):
                return made[0]
            return (
                type(output)(*made)
                if hasattr(output, "_fields")
                else type(output)(made)
            )

        platform.register_forward_hook(module, leave)
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """PrepareModuleInput and PrepareModuleOutput in one."""

    def __init__(
        self,
        *,
        input_layouts: Placements = None,
        desired_input_layouts: Placements = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Placements,
        desired_output_layouts: Placements,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def told(self) -> dict[str, Any]:
        """What the style was told beyond its defaults."""
        return {
            "input": self.prepare_module_input,
            "output": self.prepare_module_output,
        }

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Puts the module on a mesh of one axis and returns it."""
        self.prepare_module_input.apply(module, device_mesh)
        return self.prepare_module_output.apply(module, device_mesh)


def _several(layouts: Any) -> tuple[Placement | None, ...] | None:
    if layouts is None:
        return None
    found = (layouts,) if isinstance(layouts, Placement) else tuple(layouts)
    return tuple(checked_placement("a layout", one) for one in found)


def _assert_pairs(name: str, have: Any, other: str, want: Any) -> None:
    if (have is None) != (want is None) or (
        have is not None and len(have) != len(want)
    ):
        raise coded(
            AssertionError,
            "HP407",
            f"{name} and {other} must have one length, got {have} and {want}",
        )
    if (
        have is not None
        and have
        and isinstance(have[0], str)
        and list(have) != list(want)
    ):
        raise coded(
            AssertionError,
            "HP407",
            f"{name} and {other} must name the same arguments, got {have} and {want}",
        )


Prepare = Callable[
    [Any, str, Any], Any
]  # of a module, what the value is to it, and the value


def _preparers(
    line: Line, have: Sequence[Any] | None, want: Sequence[Any] | None, local: bool
) -> list[Prepare]:
    return [
        _preparer(line, *pair, local)
        for pair in zip(have or (), want or (), strict=True)
    ]


def _preparer(
    line: Line, have: Placement | None, want: Placement | None, local: bool
) -> Prepare:
    if have is None:
        return lambda module, what, value: value  # noqa: ARG005 - as the other
    take, move = line.taker(have), line.mover(want) if want is not None else None

    def prepare(module: Any, what: str, value: Any) -> Any:
        if not platform.is_tensor(value):
            raise coded(
                ValueError,
                "HP407",
                f"{type(module).__name__}: {what} has the layout {have}, but it is {type(value).__name__}",
            )
        value = take(module, value)
        value = move(value) if move is not None else value
        return handed_out(module, value) if local else value

    return prepare


def _all_prepared(
    module: Any, what: str, values: tuple[Any, ...], prepare: Sequence[Prepare]
) -> tuple[Any, ...]:
    if len(values) != len(prepare):
        raise coded(
            ValueError,
            "HP407",
            f"{type(module).__name__}: {len(prepare)} {what} layouts were given, but it has {len(values)} {what}s",
        )
    return tuple(
        one(module, f"{what} {i}", value)
        for i, (one, value) in enumerate(zip(prepare, values, strict=True))
    )
