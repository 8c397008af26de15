# SPDX-License-Identifier: Apache-2.0
"""Parts of whole sequences for a rank, the reverse, and what has to be known about positions and labels.

parts = shard_buffers({"ids": ids, "labels": shift_labels(ids)}, mesh["cp"], load_balance=True)
positions = local_positions(ids.shape[1], mesh["cp"], load_balance=True)        of the tokens of this rank
ids = unshard_buffers(parts, mesh["cp"], load_balance=True)["ids"]

These are plain tensors, for models that are not on the mesh. A model that ``shard_sequence`` was applied to takes whole
sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.collectives import redistribute
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import layout_of
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Replicate, Shard, ZigzagShard
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


def placement_of(seq_dim: int, load_balance: bool) -> Shard:
    """The placement of a sequence; balanced, a rank has an early and a late part of it."""
    return ZigzagShard(seq_dim) if load_balance else Shard(seq_dim)


def shard_buffers(
    buffers: Mapping[str, Any],
    mesh: DeviceMesh,
    seq_dims: int | Mapping[str, int] = 1,
    *,
    load_balance: bool = False,
) -> dict[str, Any]:
    """This rank's part of each whole tensor, a copy.

    ``seq_dims``: where the sequence is, the same for all or by name. Its length must be a multiple of the ranks, with
    ``load_balance`` of twice as many; pad the tokens up to it, and their labels with -100.
    """
    parts = {}
    for name, whole in buffers.items():
        dim = seq_dims if isinstance(seq_dims, int) else seq_dims[name]
        parts[name] = shard_buffer(name, whole, mesh, dim, load_balance)
    return parts


def shard_buffer(
    name: str, whole: Any, mesh: DeviceMesh, seq_dim: int, load_balance: bool
) -> Any:
    """The same for one tensor; ``name`` is for messages."""
    layout = _layout_of(name, whole, mesh, seq_dim, load_balance)
    ranks = mesh.size() * (2 if load_balance and mesh.size() > 1 else 1)
    size = whole.shape[seq_dim]
    if size % ranks:
        raise coded(
            ValueError,
            "HP803",
            f"{name} has {size} positions, but {mesh.size()} ranks need a multiple of {ranks}"
            f"{' to have the same work' if load_balance else ''}; pad it to {-(-size // ranks) * ranks}",
        )
    return platform.clone(platform.detach(layout.part_of(whole)).contiguous())


def unshard_buffers(
    buffers: Mapping[str, Any],
    mesh: DeviceMesh,
    seq_dims: int | Mapping[str, int] = 1,
    *,
    load_balance: bool = False,
) -> dict[str, Any]:
    """The reverse: the whole tensors, gathered from the parts of all ranks."""
    wholes = {}
    for name, part in buffers.items():
        dim = seq_dims if isinstance(seq_dims, int) else seq_dims[name]
        wholes[name] = unshard_buffer(name, part, mesh, dim, load_balance)
    return wholes


def unshard_buffer(
    name: str, part: Any, mesh: DeviceMesh, seq_dim: int, load_balance: bool
) -> Any:
    """The same for one tensor."""
    layout = _layout_of(name, part, mesh, seq_dim, load_balance)
    whole = layout.with_placements([Replicate()])
    shape = layout.get_global_shape(tuple(part.shape))
    local = platform.detach(part)
    if mesh.size() == 1:
        return platform.clone(local)
    return redistribute(local, layout, whole, shape)


def _layout_of(
    name: str, tensor: Any, mesh: DeviceMesh, seq_dim: int, load_balance: bool
) -> Layout:
    ndim = len(tensor.shape)
    if mesh.ndim != 1:
        raise coded(
            ValueError,
            "HP808",
            f"context parallel: expected a mesh of one axis, got {mesh}; take one of its axes, as mesh['cp']",
        )
    if type(seq_dim) is not int or not -ndim <= seq_dim < ndim:
        raise coded(
            ValueError,
            "HP803",
            f"{name} of shape {tuple(tensor.shape)} has no dim {seq_dim!r} to be the sequence",
        )
    return layout_of(mesh, [placement_of(seq_dim % ndim, load_balance)], ndim)


def local_positions(size: int, mesh: DeviceMesh, *, load_balance: bool = False) -> Any:
    """The positions, in a sequence of this length, of the tokens of this rank."""
    placement = placement_of(0, load_balance)
    index = mesh.get_local_rank()
    spans = placement.spans(size, mesh.size(), index)
    positions = [np.arange(start, start + length) for start, length in spans]
    whole: list[int] = np.concatenate(positions).tolist()
    return platform.tensor(whole, dtype=platform.str_to_dtype("int64"))


def shift_labels(tokens: Any, seq_dim: int = 1, ignore_index: int = -100) -> Any:
    """The label of each token: the one after it, and ``ignore_index`` for the last. Shift before sharding."""
    ndim = len(tokens.shape)
    before: Sequence[slice] = [slice(None)] * (seq_dim % ndim)
    last = tokens[(*before, slice(-1, None))]
    ignored = platform.full_like(last, ignore_index)
    return platform.cat([tokens[(*before, slice(1, None))], ignored], seq_dim % ndim)


def document_ids_of(position_ids: Any) -> Any:
    """The number of each token's document, from positions that begin again with every document; (batch, sequence)."""
    positions = platform.tensor_to_numpy(position_ids)
    follows = positions[:, 1:] == positions[:, :-1] + 1
    starts = np.concatenate([np.zeros_like(positions[:, :1]), ~follows], axis=1)
    ids: list[list[int]] = np.cumsum(starts, axis=1).tolist()
    return platform.tensor(ids, dtype=platform.str_to_dtype("int64"))
