# SPDX-License-Identifier: Apache-2.0
"""The axes that a recipe's mesh can have: what each is called, and what it does to the model and to the batch.

    mesh: {dp: 2, tp: 4}

ROLES is the one place that knows axes by name. A new one is a row of it: the key of the recipe with its default, the
checks, the mesh, the model and the batches follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Placing:
    """What a recipe says about putting a model onto its mesh.

    ``styles``: those of the plan by pattern. ``units``: the modules that are sharded together along a ``dp_shard``
    axis, inside the unit of the whole model. ``options``: of every ``fully_shard`` call. ``context``: of
    ``shard_sequence``.
    """

    styles: Mapping[str, Any]
    units: Sequence[Any] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    context: Mapping[str, Any] = field(default_factory=dict)


# What puts a model onto an axis: (model, mesh of all axes, what the recipe says).
PutModel = Callable[[Any, Any, Placing], None]


@dataclass(frozen=True)
class Role:
    """What an axis of the mesh is for.

    ``default``: its size where the recipe has none; None for the one axis that takes the ranks which the others leave.
    ``batch_dim``: the dim of a batch that the ranks along the axis divide among them, None where each has all of it.
    ``needs_plan``: whether a plan must say how the model goes onto an axis of more than one rank.
    ``is_optional``: whether a mesh has no such axis where its size is 1.
    """

    description: str
    default: int | None
    batch_dim: int | None
    needs_plan: bool
    put_model: PutModel
    is_optional: bool = False


def _shard_layers(model: Any, mesh: Any, placing: Placing) -> None:
    """What no style names is the same on all ranks."""
    from hyper_parallel.core.expert_parallel import (
        BaseExpertParallel,
        ExpertTensorParallel,
        TensorParallel,
    )
    from hyper_parallel.core.tensor_parallel.api import parallelize_module
    from hyper_parallel.core.tensor_parallel.style import Replicated

    styles: dict[str, Any] = {}
    for pattern, style in placing.styles.items():
        if isinstance(style, ExpertTensorParallel):
            styles[pattern] = TensorParallel()
        elif not isinstance(style, BaseExpertParallel):
            styles[pattern] = style
    parallelize_module(model, mesh["tp"], {**styles, "": styles.get("", Replicated())})


def _share_experts(model: Any, mesh: Any, placing: Placing) -> None:
    """The ranks have other rows of the batch, so that all but the experts is replicated."""
    from hyper_parallel.core.data_parallel import replicate
    from hyper_parallel.core.expert_parallel import BaseExpertParallel, ExpertParallel
    from hyper_parallel.core.tensor_parallel.api import parallelize_module

    styles = {
        pattern: ExpertParallel()
        for pattern, style in placing.styles.items()
        if isinstance(style, BaseExpertParallel)
    }
    parallelize_module(model, mesh["ep"], styles)
    replicate(model, mesh["ep"])


def _replicate(model: Any, mesh: Any, _: Placing) -> None:
    from hyper_parallel.core.data_parallel import replicate

    replicate(model, mesh["dp"])


def shard_state(model: Any, mesh: Any, placing: Placing) -> None:
    """Shards units along ``dp_shard``, replicated along ``dp_replicate`` if there is one; not those of a plan."""
    from hyper_parallel.core.fully_shard import HSDPModule, fully_shard

    names = mesh.mesh_dim_names
    if "dp_shard" not in names or isinstance(model, HSDPModule):
        return
    is_hybrid = "dp_replicate" in names
    data = mesh["dp_replicate", "dp_shard"] if is_hybrid else mesh["dp_shard"]
    for unit in placing.units:
        fully_shard(unit, mesh=data, **placing.options)
    fully_shard(model, mesh=data, batch_dim=0, **placing.options)


def _shard_sequence(model: Any, mesh: Any, placing: Placing) -> None:
    from hyper_parallel.core.context_parallel import shard_sequence

    shard_sequence(model, mesh["cp"], **placing.context)


def _leave_to_dp_shard(_: Any, __: Any, ___: Placing) -> None:
    """The same call puts a model onto both axes."""


def _leave_to_stages(_: Any, __: Any, ___: Placing) -> None:
    """A model is divided before it is put onto the axes of its stages."""


# Outermost first: ranks next to each other are those of the last axis, which communicates most.
ROLES: dict[str, Role] = {
    "pp": Role(
        "ranks that have some of the layers each, and pass micro batches on",
        default=1,
        batch_dim=None,
        needs_plan=False,
        put_model=_leave_to_stages,
        is_optional=True,
    ),
    "dp": Role(
        "ranks that share a batch; null: as many as the other axes leave of `--nproc`",
        default=None,
        batch_dim=0,
        needs_plan=False,
        put_model=_replicate,
    ),
    "dp_replicate": Role(
        "ranks that share a batch and have copies of what `dp_shard` divides",
        default=1,
        batch_dim=0,
        needs_plan=False,
        put_model=_leave_to_dp_shard,
        is_optional=True,
    ),
    "dp_shard": Role(
        "ranks that share a batch, the parameters, their gradients and the optimizer's state",
        default=1,
        batch_dim=0,
        needs_plan=False,
        put_model=shard_state,
        is_optional=True,
    ),
    "ep": Role(
        "ranks that share a batch, and the experts among them",
        default=1,
        batch_dim=0,
        needs_plan=True,
        put_model=_share_experts,
        is_optional=True,
    ),
    "cp": Role(
        "ranks that share each sequence",
        default=1,
        batch_dim=None,
        needs_plan=False,
        put_model=_shard_sequence,
        is_optional=True,
    ),
    "tp": Role(
        "ranks that share each layer",
        default=1,
        batch_dim=None,
        needs_plan=True,
        put_model=_shard_layers,
    ),
}


def select_axes(sizes: Mapping[str, int | None]) -> dict[str, int]:
    """The axes that a mesh of these sizes has: with ``dp_shard`` there is no ``dp`` of one rank."""
    axes = {
        name: size or 1
        for name, size in sizes.items()
        if not ROLES[name].is_optional or (size or 1) > 1
    }
    if "dp_shard" in axes and axes["dp"] == 1:
        del axes["dp"]
    return axes


def find_elastic() -> str:
    """The role that takes the ranks which the others leave."""
    [name] = [name for name, role in ROLES.items() if role.default is None]
    return name


def select_row_axes(axes: Mapping[str, int]) -> dict[str, int]:
    """Those of a mesh's axes along which the rows of a batch are divided."""
    return {name: size for name, size in axes.items() if ROLES[name].batch_dim == 0}


def find_rows(mesh: Any) -> tuple[int, int]:
    """Which part of a batch's rows this rank has, and of how many."""
    axes = dict(zip(mesh.mesh_dim_names, mesh.mesh_shape, strict=True))
    part, parts = 0, 1
    for name, size in select_row_axes(axes).items():
        part = part * size + mesh.get_local_rank(name)
        parts *= size
    return part, parts


def format_axes(axes: Mapping[str, int]) -> str:
    """A mesh as people write it: "dp=2 x tp=4"."""
    return " x ".join(f"{name}={size}" for name, size in axes.items())


def put_rest_on_mesh(model: Any, mesh: Any, placing: Placing) -> None:
    """Puts a model onto the axes that a plan's own function may leave out."""
    names = mesh.mesh_dim_names or ()
    if "cp" in names and not _is_on_axis(model, "cp"):
        _shard_sequence(model, mesh, placing)
    shard_state(model, mesh, placing)


def _is_on_axis(model: Any, name: str) -> bool:
    from hyper_parallel.core.dtensor.dtensor import DTensor
    from hyper_parallel.platform import get_platform

    parameters = get_platform().parameters_dict(model).values()
    meshes = [one.device_mesh for one in parameters if isinstance(one, DTensor)]
    return any(name in (mesh.mesh_dim_names or ()) for mesh in meshes)


def put_on_mesh(model: Any, mesh: Any, placing: Placing) -> None:
    """Puts a model onto every axis of a mesh, the innermost first."""
    for name in reversed(mesh.mesh_dim_names or ()):
        ROLES[name].put_model(model, mesh, placing)
