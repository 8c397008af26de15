# SPDX-License-Identifier: Apache-2.0
"""Styles for what goes into a module and what comes out, with nothing done to the module itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import Placement
from hyper_parallel.core.modules.layouts import Crossing, ModuleLayouts
from hyper_parallel.core.tensor_parallel.base import LayoutStyle, check_placement
from hyper_parallel.platform.error_codes import coded

Placements = Placement | Sequence[Placement | None] | None


@dataclass(frozen=True, repr=False, kw_only=True)
class PrepareModuleInput(LayoutStyle):
    """Redistributes a module's inputs from the layouts that they have to those desired; None leaves one alone."""

    input_layouts: Placements = None
    desired_input_layouts: Placements = None
    # Not hashed, since dicts are not hashable; they take part in comparisons.
    input_kwarg_layouts: Mapping[str, Placement] | None = field(
        default=None, hash=False
    )
    desired_input_kwarg_layouts: Mapping[str, Placement] | None = field(
        default=None, hash=False
    )
    use_local_output: bool = False

    def __post_init__(self) -> None:
        _normalize(self, "input_layouts", "desired_input_layouts")
        for name in ("input_kwarg_layouts", "desired_input_kwarg_layouts"):
            object.__setattr__(self, name, dict(getattr(self, name) or {}))
        _check_names(self, "input_kwarg_layouts", "desired_input_kwarg_layouts")

    def _options(self) -> dict[str, Any]:
        desired = self.desired_input_kwarg_layouts or {}
        named = {name: desired[name] for name in self.input_kwarg_layouts or {}}
        options = {"desired": _texts(self.desired_input_layouts), **named}
        if self.use_local_output:
            options["use_local_output"] = True
        return options

    def layouts(self, module: Any, device_mesh: DeviceMesh) -> ModuleLayouts:  # noqa: ARG002 - the same for all
        """The layouts of the module's inputs."""
        desired = self.desired_input_kwarg_layouts or {}
        named = [
            (name, Crossing(have, desired[name], self.use_local_output))
            for name, have in (self.input_kwarg_layouts or {}).items()
            if have is not None
        ]
        inputs = _crossings(
            self.input_layouts, self.desired_input_layouts, self.use_local_output
        )
        return ModuleLayouts(inputs=inputs, keyword_inputs=tuple(named))


@dataclass(frozen=True, repr=False, kw_only=True)
class PrepareModuleOutput(LayoutStyle):
    """Redistributes a module's outputs from the layouts that they have to those desired; None leaves one alone."""

    output_layouts: Placements
    desired_output_layouts: Placements
    use_local_output: bool | None = None

    def __post_init__(self) -> None:
        for name in ("output_layouts", "desired_output_layouts"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name)) or ())
        _normalize(self, "output_layouts", "desired_output_layouts")

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"desired": _texts(self.desired_output_layouts)}
        if self.use_local_output is not None:
            options["use_local_output"] = self.use_local_output
        return options

    def layouts(self, module: Any, device_mesh: DeviceMesh) -> ModuleLayouts:  # noqa: ARG002 - the same for all
        """The layouts of the module's outputs."""
        outputs = _crossings(
            self.output_layouts, self.desired_output_layouts, self.use_local_output
        )
        return ModuleLayouts(outputs=outputs)


@dataclass(frozen=True, repr=False, init=False)
class PrepareModuleInputOutput(LayoutStyle):
    """PrepareModuleInput and PrepareModuleOutput in one."""

    prepare_module_input: PrepareModuleInput
    prepare_module_output: PrepareModuleOutput

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
        use_local_output: bool | None = None,
    ) -> None:
        prepare_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        prepare_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )
        object.__setattr__(self, "prepare_module_input", prepare_input)
        object.__setattr__(self, "prepare_module_output", prepare_output)

    def _options(self) -> dict[str, Any]:
        return {
            "input": self.prepare_module_input,
            "output": self.prepare_module_output,
        }

    def layouts(self, module: Any, device_mesh: DeviceMesh) -> ModuleLayouts:
        """The layouts of the module's inputs and outputs."""
        entering = self.prepare_module_input.layouts(module, device_mesh)
        leaving = self.prepare_module_output.layouts(module, device_mesh)
        return replace(entering, outputs=leaving.outputs)


def _as_tuple(layouts: Any) -> tuple[Placement | None, ...] | None:
    if layouts is None:
        return None
    given = (layouts,) if isinstance(layouts, Placement) else tuple(layouts)
    return tuple(check_placement("a layout", one) for one in given)


def _normalize(style: LayoutStyle, name: str, desired_name: str) -> None:
    """Makes tuples of two options that must have one length."""
    have, want = (_as_tuple(getattr(style, option)) for option in (name, desired_name))
    object.__setattr__(style, name, have)
    object.__setattr__(style, desired_name, want)
    _check_lengths(name, have, desired_name, want)


def _check_lengths(name: str, have: Any, desired_name: str, want: Any) -> None:
    # AssertionErrors are part of the interface here, as in torch.
    is_same = (have is None) == (want is None)
    if not is_same or (have is not None and len(have) != len(want)):
        raise coded(
            AssertionError,
            "HP407",
            f"{name} and {desired_name} must have one length, got {have} and {want}",
        )


def _check_names(style: LayoutStyle, name: str, desired_name: str) -> None:
    have, want = (sorted(getattr(style, option)) for option in (name, desired_name))
    _check_lengths(name, have, desired_name, want)
    if have != want:
        raise coded(
            AssertionError,
            "HP407",
            f"{name} and {desired_name} must name the same arguments, got {have} and {want}",
        )


def _crossings(
    have: Any, want: Any, to_local: bool | None
) -> tuple[Crossing | None, ...] | None:
    if have is None:
        return None
    pairs = zip(have, want, strict=True)
    return tuple(
        None if plain is None else Crossing(plain, wanted, to_local)
        for plain, wanted in pairs
    )


def _texts(placements: Any) -> list[str]:
    return [str(placement) for placement in placements or ()]
