# SPDX-License-Identifier: Apache-2.0
"""Whole models on long sequences: every rank of an axis computes a part of each sequence.

parallelize_module(model, mesh["tp"], plan)                  if there is such an axis
shard_sequence(model, mesh["cp"], load_balance=True)
loss = model(ids, labels=labels).loss                        of whole sequences, the same on all ranks of the axis

The model's code stays as it is: positions, rotary tables and masks are distributed tensors, and lie as they are needed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from hyper_parallel.core.context_parallel.attention import (
    Method,
    make_method,
    overrides_with,
)
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.modes import MODES, Override
from hyper_parallel.core.dtensor.placement_types import Shard, ZigzagShard
from hyper_parallel.core.modules.axis import (
    Batch,
    MeshAxis,
    axis_of,
    batch_of,
    set_batch,
)
from hyper_parallel.core.modules.boundary import attach
from hyper_parallel.core.modules.lifting import lift_module
from hyper_parallel.core.modules.plain import treat_plain_as_replicated
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


def shard_sequence(
    module: Any,
    device_mesh: DeviceMesh,
    *,
    seq_dim: int = 1,
    load_balance: bool = False,
    method: str = "allgather",
    ulysses_degree: int | None = None,
    src_data_rank: int | None = 0,
) -> Any:
    """Shards the sequences that a module gets along a mesh of one axis; returns the module, with new parameters.

    Parameters are replicated along the axis and their gradients summed, as ``replicate`` does along a data axis, which
    may be added before or after. Plain inputs are whole sequences, the same on all ranks of the axis: the first tensor
    with a dim ``seq_dim`` says how long they are, and all inputs of that length are sharded, unevenly if need be.
    ``load_balance`` gives every rank an early and a late part, so that causal attention is the same work for all.
    ``method``, ``ulysses_degree``: as in ``attention_method``. ``src_data_rank``: the index along the axis of the rank
    whose parameters the others get; None where they are equal.
    """
    if device_mesh.ndim != 1:
        raise coded(
            ValueError,
            "HP808",
            f"shard_sequence: expected a mesh of one axis, got {device_mesh}; take one of its axes, as mesh['cp']",
        )
    if seq_dim < 0:
        raise coded(
            ValueError,
            "HP808",
            f"shard_sequence: seq_dim must be at least 0, since inputs have different numbers of dims; got {seq_dim}",
        )
    how = make_method(method, ulysses_degree)
    check_degree(how, device_mesh.size())
    modules = [one for _, one in platform.get_cells_and_names(module)]
    batch = batch_of(module)
    mesh = lift_module(
        module, device_mesh, src_data_rank=src_data_rank, caller="shard_sequence"
    )
    lifted = _lift_batch(batch, mesh)
    for one in modules:
        set_batch(one, lifted)
    placement = ZigzagShard(seq_dim) if load_balance else Shard(seq_dim)
    source = f"sequences sharded along {device_mesh}"
    treat_plain_as_replicated(module, MeshAxis(device_mesh), "data axis", source=source)
    attach(
        module, "data axis", enter=_shard_inputs(device_mesh, placement), source=source
    )
    use_method(modules, how, source)
    return module


def check_degree(method: Method, ranks: int) -> None:
    """Raises a ValueError if so many ranks cannot exchange heads like this."""
    spans = (((0, 0),),) * ranks
    method.division(range(ranks), 0, spans, spans)


def _lift_batch(batch: Batch | None, mesh: DeviceMesh) -> Batch:
    """What plain tensors are on a mesh with more axes."""
    if batch is None:
        return Batch(mesh, (), 0)
    names = batch.mesh.mesh_dim_names or ()
    axes = tuple(mesh.axis_index(names[axis]) for axis in batch.axes)
    return Batch(mesh, axes, batch.dim)


def _shard_inputs(axis_mesh: DeviceMesh, placement: Shard) -> Any:
    """Shards the inputs of a module that are as long as the first one."""
    redistribute = MeshAxis(axis_mesh).redistribute_fn(placement)
    dim = placement.dim

    def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del module
        length = None

        def shard(value: Any) -> Any:
            nonlocal length
            if not isinstance(value, DTensor) or len(value.shape) <= dim:
                return value
            length = value.shape[dim] if length is None else length
            own = value.placements[axis_of(value.device_mesh, axis_mesh)]
            if value.shape[dim] != length or not own.is_replicate():
                return value
            return redistribute(value)

        return platform.apply_to_tensors(shard, (args, kwargs))

    return enter


class _Before(threading.local):
    """What held for the attention operator when modules were entered."""

    def __init__(self) -> None:
        self.stack: list[Mapping[str, Override]] = []


_BEFORE = _Before()


def use_method(modules: list[Any], method: Method, source: Any) -> None:
    """Computes attention by a method while any of these modules runs.

    A module may also run by itself, as when a part of a model is recomputed.
    """

    def enter(module: Any, args: Any, kwargs: Any) -> None:
        del module, args, kwargs
        _BEFORE.stack.append(MODES.overrides)
        MODES.overrides = overrides_with(method)

    def leave(module: Any, output: Any) -> None:
        del module, output
        MODES.overrides = _BEFORE.stack.pop()

    def undo(module: Any) -> None:
        leave(module, None)

    for module in modules:
        has_parts = len(list(platform.get_cells_and_names(module))) > 1
        if has_parts or module is modules[0]:
            attach(
                module, "user", enter=enter, leave=leave, on_error=undo, source=source
            )
