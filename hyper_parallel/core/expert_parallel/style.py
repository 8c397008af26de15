# SPDX-License-Identifier: Apache-2.0
"""Styles for modules with experts: whole experts on each rank, parts of each expert, or both.

ExpertParallel().apply(model.layers[0].mlp.experts, mesh["ep"])
ExpertTensorParallel().apply(model.layers[0].mlp.experts, mesh["ep", "tp"])
parallelize_module(model, mesh["ep"], {"model.layers.*.mlp.experts": ExpertParallel()})

Modules have weights [experts, out, in]. Plain tokens that go in are this rank's own along ``ep``, and the same along
``tp``; plain tokens come out. Nothing is kept between calls.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import (
    FusedShard,
    Placement,
    Shard,
)
from hyper_parallel.core.expert_parallel.dispatcher import (
    AllToAllTokenDispatcher,
    check_experts,
)
from hyper_parallel.core.expert_parallel.experts import Where
from hyper_parallel.core.expert_parallel.foreign import take_over
from hyper_parallel.core.expert_parallel.parameters import shard_parameter
from hyper_parallel.core.expert_parallel.placed import (
    count_experts,
    own_parameters,
    place,
    placed_of,
)
from hyper_parallel.core.modules.style import ParallelStyle
from hyper_parallel.platform.error_codes import coded


class BaseExpertParallel(ParallelStyle):
    """Shards experts and runs them on the tokens of all ranks; subclass it for another exchange."""

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Shards the module's experts, and has its calls run where they are; returns the module."""
        where = self._where(device_mesh)
        self._check(module, where)
        take_over(module, type(self).__name__)
        self._partition_fn("", module, device_mesh)
        before = placed_of(module)
        exchange = self if where.ep is not None else before.exchange
        place(
            module,
            Where(where.ep or before.where.ep, where.tp or before.where.tp),
            exchange,
        )
        return module

    @abstractmethod
    def _where(self, device_mesh: DeviceMesh) -> Where:
        """Along which axes of the mesh experts are shared, and along which each of them is."""

    def _check(self, module: Any, where: Where) -> None:
        if where.ep is not None:
            name = f"{type(self).__name__}: {type(module).__name__}"
            check_experts(count_experts(module), where.ep.size(), name)

    @abstractmethod
    def _partition_fn(self, name: str, module: Any, device_mesh: DeviceMesh) -> None:
        """Shards the module's own parameters along the mesh."""

    def _token_dispatch(
        self, module: Any, inputs: Sequence[Any], device_mesh: DeviceMesh
    ) -> tuple[Any, Any, Any]:
        """Brings rows to the ranks of their experts: (rows, how many each expert here has, context)."""
        return AllToAllTokenDispatcher().dispatch(module, inputs, device_mesh)

    def _dispatch_beside(
        self,
        module: Any,
        inputs: Sequence[Any],
        device_mesh: DeviceMesh,
        work: Callable[[], None],
    ) -> tuple[Any, Any, Any]:
        """``_token_dispatch`` that does some work while rows travel; an exchange of a subclass ends before."""
        function = getattr(self._token_dispatch, "__func__", None)
        if function is not BaseExpertParallel._token_dispatch:
            dispatched = self._token_dispatch(module, inputs, device_mesh)
            work()
            return dispatched
        finish = AllToAllTokenDispatcher().start(module, inputs, device_mesh)
        try:
            work()
        finally:  # nothing may be under way after an error: all ranks have started it
            dispatched = finish()
        return dispatched

    def _token_combine(
        self, module: Any, routed_output: Any, device_mesh: DeviceMesh, ctx: Any
    ) -> Any:
        """Brings results back."""
        return AllToAllTokenDispatcher().combine(
            module, routed_output, device_mesh, ctx
        )


class ExpertParallel(BaseExpertParallel):
    """Each rank has some of the experts; tokens travel to them and back."""

    def _where(self, device_mesh: DeviceMesh) -> Where:
        return Where(ep=_one_axis(device_mesh, type(self).__name__))

    def _partition_fn(self, name: str, module: Any, device_mesh: DeviceMesh) -> None:
        del name
        for own, tensor in own_parameters(module).items():
            if len(tensor.shape) > 1:
                placements = {device_mesh: Shard(0)}
                shard_parameter(module, own, placements, self.src_data_rank)


class TensorParallel(BaseExpertParallel):
    """Each rank has a part of every expert; tokens stay, and partial outputs are summed.

    After ``ExpertParallel`` on another axis of the same mesh it shards the experts of each rank further.
    """

    def _where(self, device_mesh: DeviceMesh) -> Where:
        return Where(tp=_one_axis(device_mesh, type(self).__name__))

    def _partition_fn(self, name: str, module: Any, device_mesh: DeviceMesh) -> None:
        del name
        for own, tensor in own_parameters(module).items():
            placements = {device_mesh: part_of_expert(module, own, tensor)}
            shard_parameter(module, own, placements, self.src_data_rank)


class ExpertTensorParallel(BaseExpertParallel):
    """Both, on a mesh of two axes, (ep, tp): each rank has a part of some experts.

    Along ``tp`` tokens are divided before they travel, so that each travels once.
    """

    def _where(self, device_mesh: DeviceMesh) -> Where:
        names = device_mesh.mesh_dim_names or ()
        if device_mesh.ndim != 2 or len(names) != 2:
            raise coded(
                ValueError,
                "HP456",
                f"{type(self).__name__}: expected a mesh of two axes, (ep, tp), got {device_mesh}; in plans, which are "
                "for one axis, say ExpertParallel() for mesh['ep'], then TensorParallel() for mesh['tp']",
            )
        return Where(ep=device_mesh[names[0]], tp=device_mesh[names[1]])

    def _partition_fn(self, name: str, module: Any, device_mesh: DeviceMesh) -> None:
        del name
        where = self._where(device_mesh)
        assert where.ep is not None
        assert where.tp is not None
        for own, tensor in own_parameters(module).items():
            part = part_of_expert(module, own, tensor)
            placements = {where.ep: Shard(0), where.tp: part}
            shard_parameter(module, own, placements, self.src_data_rank)


def _one_axis(mesh: DeviceMesh, name: str) -> DeviceMesh:
    if mesh.ndim != 1:
        raise coded(
            ValueError,
            "HP456",
            f"{name}: expected a mesh of one axis, got {mesh}; take one of its axes, or flatten them",
        )
    return mesh


# Of the weights [experts, out, in] of an expert: along which dim its hidden features lie, and in how many sections.
_HIDDEN_DIMS = {
    "w1": (1, 1),
    "w2": (2, 1),
    "w3": (1, 1),
    "gate_proj": (1, 1),
    "up_proj": (1, 1),
    "gate_up_proj": (1, 2),
    "down_proj": (2, 1),
}


def part_of_expert(module: Any, name: str, tensor: Any) -> Placement:
    """The placement that shards the hidden features of every expert."""
    is_turned = getattr(module, "is_transposed", False)
    if name not in _HIDDEN_DIMS or len(tensor.shape) != 3 or is_turned:
        raise coded(
            TypeError,
            "HP455",
            f"{name} of {type(module).__name__} is not known to have hidden features of experts; TensorParallel shards "
            f"weights [experts, out, in] called {', '.join(_HIDDEN_DIMS)}",
        )
    dim, sections = _HIDDEN_DIMS[name]
    if sections == 1:
        return Shard(dim)
    return FusedShard(dim, (int(tensor.shape[dim]) // sections,) * sections)
