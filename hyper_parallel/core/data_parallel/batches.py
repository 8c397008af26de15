# SPDX-License-Identifier: Apache-2.0
"""Declares what a plain tensor outside a model is: this rank's part of the batch, or the same on every rank.

targets = local_batch(targets, model)               like the model's input
loss = F.mse_loss(model(inputs), targets)           of the whole batch, and exact
weights = same_everywhere(weights, model)
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.modules.axis import Batch, batch_of
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


def local_batch(
    tensor: Any, like: Any, *, batch_dim: int | None = None, run_check: bool = False
) -> DTensor:
    """This rank's part of a batch, as a distributed tensor that goes with a model's outputs.

    ``like``: the model, or a distributed tensor whose dim ``batch_dim`` (0, unless ``replicate`` was given another) is
    the batch. All ranks have parts of one size along a data axis, and the same part along other axes; ``run_check``
    compares that. Without a data axis the tensor is the same on every rank.
    """
    if isinstance(tensor, DTensor):
        return tensor
    layout = _layout_like("local_batch", like, len(tensor.shape), batch_dim)
    return DTensor.from_local(tensor, None, layout, run_check=run_check)


def same_everywhere(tensor: Any, like: Any, *, run_check: bool = False) -> DTensor:
    """A distributed tensor that is the same on every rank of the mesh of a model, or of a distributed tensor."""
    if isinstance(tensor, DTensor):
        return tensor
    if not isinstance(like, DTensor):
        like = _tensor_of("same_everywhere", like)
    mesh = like.device_mesh
    everywhere = [Replicate()] * mesh.ndim
    return DTensor.from_local(tensor, mesh, everywhere, run_check=run_check)


def _layout_like(name: str, like: Any, ndim: int, batch_dim: int | None) -> Layout:
    if isinstance(like, DTensor):
        dim = 0 if batch_dim is None else batch_dim
        has_dim = -len(like.shape) <= dim < len(like.shape)
        axes = like.layout.dim_axes[dim] if has_dim else ()
        return _layout_of(Batch(like.device_mesh, tuple(axes), dim), ndim)
    batch = batch_of(like)
    if batch is None:  # there is no data axis
        mesh = _tensor_of(name, like).device_mesh
        return _layout_of(Batch(mesh, (), 0), ndim)
    if batch_dim is not None:
        batch = Batch(batch.mesh, batch.axes, batch_dim)
    return _layout_of(batch, ndim)


def _layout_of(batch: Batch, ndim: int) -> Layout:
    placements: list[Placement] = batch.placements(ndim)
    if batch.axes and not any(isinstance(placement, Shard) for placement in placements):
        raise coded(
            ValueError,
            "HP413",
            f"local_batch: a tensor of {ndim} dims has no dim {batch.dim} to be the batch's",
        )
    return Layout.from_device_mesh(batch.mesh)(placements).bind(ndim)


def _tensor_of(name: str, model: Any) -> DTensor:
    """A distributed parameter of a model."""
    if isinstance(model, platform.Module):
        for tensor in platform.parameters_dict(model).values():
            if isinstance(tensor, DTensor):
                return tensor
    raise coded(
        ValueError,
        "HP413",
        f"{name}: expected a model that parallelize_module or replicate has put on a mesh, or a distributed "
        f"tensor, got {type(model).__name__}",
    )
