# SPDX-License-Identifier: Apache-2.0
"""Styles that are values: they say how a module is laid out along one axis of devices."""

from __future__ import annotations

import copy
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import Placement
from hyper_parallel.core.modules.layouts import ModuleLayouts, apply_layouts
from hyper_parallel.core.modules.style import ParallelStyle
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


@dataclass(frozen=True, repr=False, kw_only=True)
class LayoutStyle(ParallelStyle):
    """A style that is a value: it decides on layouts, which ``apply_layouts`` executes. Equal styles do the same."""

    @abstractmethod
    def layouts(self, module: Any, device_mesh: DeviceMesh) -> ModuleLayouts:
        """The layouts of the module's parameters, inputs and outputs; nothing is done to the module."""

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Parallelizes the module along a mesh of one axis and returns it."""
        layouts = self.layouts(module, device_mesh)
        return apply_layouts(
            module,
            device_mesh,
            layouts,
            source=self,
            src_data_rank=self.src_data_rank,
        )

    def _with_source(self, src_data_rank: int | None) -> ParallelStyle:
        """A copy of the style with another ``src_data_rank``, which takes no part in comparisons."""
        copied = copy.copy(self)
        object.__setattr__(copied, "src_data_rank", src_data_rank)
        return copied


def own_tensor(module: Any, name: str) -> Any:
    """A parameter or buffer of the module itself."""
    tensors = dict(platform.own_tensors(module))
    if name not in tensors:
        raise coded(
            ValueError,
            "HP407",
            f"{type(module).__name__} has no {name} of its own, but {', '.join(tensors) or 'no tensors at all'}: "
            "weight_norm, spectral_norm and other parametrizations compute it anew in every forward; remove them "
            "first (torch.nn.utils.parametrize.remove_parametrizations, torch.nn.utils.remove_weight_norm)",
        )
    return tensors[name]


def check_placement(name: str, value: Any) -> Placement | None:
    """The value, if it is a placement or None; raises otherwise."""
    if value is not None and not isinstance(value, Placement):
        raise coded(
            TypeError,
            "HP402",
            f"{name}: expected a placement such as Shard(1) or Replicate(), got {value!r}",
        )
    return value
