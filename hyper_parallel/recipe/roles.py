# SPDX-License-Identifier: Apache-2.0
"""The axes that a recipe's mesh can have: what each is called, and what it does to the model and to the batch.

    mesh: {dp: 2, tp: 4}

ROLES is the one place that knows axes by name. A new one is a row of it: the key of the recipe with its default, the
checks, the mesh, the model and the batches follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# What puts a model onto an axis: (model, axis, styles of the plan by pattern).
PutModel = Callable[[Any, Any, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Role:
    """What an axis of the mesh is for.

    ``default``: its size where the recipe has none; None for the one axis that takes the ranks which the others leave.
    ``batch_dim``: the dim of a batch that the ranks along the axis divide among them, None where each has all of it.
    ``needs_plan``: whether a plan must say how the model goes onto an axis of more than one rank.
    """

    description: str
    default: int | None
    batch_dim: int | None
    needs_plan: bool
    put_model: PutModel


def _shard_layers(model: Any, axis: Any, styles: Mapping[str, Any]) -> None:
    """What no style names is the same on all ranks."""
    from hyper_parallel.core.tensor_parallel.api import parallelize_module
    from hyper_parallel.core.tensor_parallel.style import Replicated

    parallelize_module(model, axis, {**styles, "": styles.get("", Replicated())})


def _replicate(model: Any, axis: Any, _: Mapping[str, Any]) -> None:
    from hyper_parallel.core.data_parallel import replicate

    replicate(model, axis)


# Outermost first: ranks next to each other are those of the last axis, which communicates most.
ROLES: dict[str, Role] = {
    "dp": Role(
        "ranks that share a batch; null: as many as the other axes leave of `--nproc`",
        default=None,
        batch_dim=0,
        needs_plan=False,
        put_model=_replicate,
    ),
    "tp": Role(
        "ranks that share each layer",
        default=1,
        batch_dim=None,
        needs_plan=True,
        put_model=_shard_layers,
    ),
}


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


def put_on_mesh(model: Any, mesh: Any, styles: Mapping[str, Any]) -> None:
    """Puts a model onto every axis of a mesh, the innermost first."""
    for name in reversed(mesh.mesh_dim_names or ()):
        ROLES[name].put_model(model, mesh[name], styles)
