# SPDX-License-Identifier: Apache-2.0
"""What every style is, and how values go in and out of the modules that have one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor, distribute_tensor, layout_of
from hyper_parallel.core.dtensor.modes import MODES
from hyper_parallel.core.dtensor.placement_types import Placement
from hyper_parallel.core.tensor_parallel.line import is_even
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


class ParallelStyle(ABC):
    """What ``parallelize_module`` does to a module. ``src_data_rank``: whose parameters count; None: all are equal."""

    src_data_rank: int | None = 0

    @abstractmethod
    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Puts the module on a mesh of one axis and returns it."""

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={value}" for name, value in self.told().items())
        return f"{type(self).__name__}({told})"

    def told(self) -> dict[str, Any]:
        """What the style was told beyond its defaults."""
        return {}

    def _distribute(
        self, module: Any, name: str, mesh: DeviceMesh, placement: Placement
    ) -> None:
        """Puts one of the module's own parameters on the mesh."""
        tensor = dict(platform.own_tensors(module)).get(name)
        if tensor is None:
            return
        if isinstance(tensor, DTensor):
            if tensor.layout is not layout_of(mesh, [placement], len(tensor.shape)):
                raise coded(
                    ValueError,
                    "HP405",
                    f"{type(self).__name__}: {name} of {type(module).__name__} already lies in {tensor.layout} and "
                    f"cannot lie as {placement} on {mesh}; a module takes one style, and where two share a "
                    "parameter their styles must agree, as RowwiseParallel for an embedding and ColwiseParallel "
                    "for a Linear do",
                )
            return
        source = (
            None
            if self.src_data_rank is None or platform.is_meta(tensor)
            else mesh.rank_list[self.src_data_rank]
        )
        made = distribute_tensor(tensor, mesh, [placement], src_data_rank=source)
        platform.set_own_tensor(module, name, made)


def first_tensor(module: Any, args: tuple[Any, ...]) -> Any:
    """What goes into a module, which is its first argument."""
    if not args or not platform.is_tensor(args[0]):
        raise coded(
            ValueError,
            "HP407",
            f"{type(module).__name__}: expected a tensor as its first positional argument",
        )
    return args[0]


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


def checked_placement(name: str, value: Any) -> Placement | None:
    """The value, if it is a placement or None."""
    if value is not None and not isinstance(value, Placement):
        raise coded(
            TypeError,
            "HP402",
            f"{name}: expected a placement such as Shard(1) or Replicate(), got {value!r}",
        )
    return value


def handed_out(module: Any, value: Any, may_be_uneven: bool = False) -> Any:
    """The plain shard of a distributed tensor, from which the next module can tell the whole.

    ``may_be_uneven``: the next module knows the size of the whole by itself.
    """
    if not isinstance(value, DTensor):
        return value
    if MODES.replicate_plain and not all(
        placement.is_replicate() for placement in value.placements
    ):
        raise coded(
            ValueError,
            "HP406",
            f"{type(module).__name__}: its output in {value.layout} would be handed out as a plain shard, but in "
            "this model plain tensors are taken for copies; say use_local_output=False for the styles in it",
        )
    if not may_be_uneven and not is_even(value._layout, tuple(value.shape)):
        raise coded(
            ValueError,
            "HP406",
            f"{type(module).__name__}: its output of shape {tuple(value.shape)} in {value.layout} has shards of "
            "different sizes, from which the next module could not tell the whole; say use_local_output=False",
        )
    return value.to_local()
