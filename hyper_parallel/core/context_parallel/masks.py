# SPDX-License-Identifier: Apache-2.0
"""Masks of attention on a sharded sequence: their rows lie as the queries do, and they have a column for every key.

place_masks(query, key, mask)       a plain mask as a distributed one: its shape tells how it lies
own_mask(mask, query, axes, ...)    the rows and heads that this rank needs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hyper_parallel.core.context_parallel.division import Division
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.dtensor.routes import local_for
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


def own_mask(
    mask: DTensor, query: DTensor, axes: Sequence[int], division: Division
) -> Any:
    """The rows and heads of a mask that this rank needs, and all its columns, in four dims."""
    shape = tuple(mask.shape)
    exchanges_heads = division.degree > 1

    def is_taken(axis: int, dim: int) -> bool:
        of_sequence = dim == -2 and axis in axes
        return shape[dim] > 1 and not (of_sequence and exchanges_heads)

    local = local_for(mask, _layout_like(query, len(shape), is_taken))
    local = local.reshape((*(1,) * (4 - len(shape)), *local.shape))
    if not exchanges_heads:
        return local
    if local.shape[1] > 1:
        share = local.shape[1] // division.degree
        first = share * division.inner_index
        local = local[:, first : first + share]
    if local.shape[2] > 1:
        spans = division.joined_queries().spans or ((0, 0),)
        parts = [local[:, :, start : start + size] for start, size in spans]
        local = parts[0] if len(parts) == 1 else platform.cat(parts, 2)
    return local


def place_masks(
    query: Any, key: Any, attn_mask: Any = None, **_: Any
) -> Mapping[int, DTensor]:
    """A plain mask as a distributed one, by its id: each dim is whole, or as large as this rank's part."""
    is_plain = attn_mask is not None and not isinstance(attn_mask, DTensor)
    if not is_plain or not isinstance(query, DTensor):
        return {}
    given, ndim = tuple(attn_mask.shape), len(query.shape)
    lacking = max(0, ndim - len(given))
    whole = (*query.shape[:-1], key.shape[-2])[lacking:]
    local = (*query._local.shape[:-1], key.shape[-2])[lacking:]
    sizes = list(zip(given, whole, local, strict=False))
    if len(given) > ndim or not all(size in (1, *known) for size, *known in sizes):
        raise coded(
            ValueError,
            "HP804",
            f"scaled_dot_product_attention: rank {query.device_mesh.rank} got a plain mask of shape {given} for "
            f"queries of shape {tuple(query.shape)} in {query.layout} and {key.shape[-2]} keys; each of its dims must "
            f"be 1, whole, or as large as in this rank's part {tuple(query._local.shape)}, and it has a column for "
            "every key",
        )
    owned = [
        _is_part(query, dim - len(given), *known) for dim, known in enumerate(sizes)
    ]
    layout = _layout_like(query, len(given), lambda _, dim: owned[dim])
    pairs = zip(sizes, owned, strict=True)
    shape = [full if size > 1 or own else 1 for (size, full, _), own in pairs]
    placed = DTensor.from_local(attn_mask, None, layout, shape=shape)
    return {id(attn_mask): placed}


def _is_part(query: DTensor, dim: int, size: int, full: int, part: int) -> bool:
    """Whether a dim of a mask, from the end, is this rank's part of the queries' dim."""
    if dim == -1 or size != part or part == full:
        return False
    # A size of 1 is the same for all, but where every rank has one.
    return size > 1 or bool(query._layout.get_dim_split_num(dim) == full)


def _layout_like(
    query: DTensor, ndim: int, is_taken: Callable[[int, int], bool]
) -> Layout:
    """The layout of a mask that lies as the queries do, in the dims (from the end) of which that is to be taken."""
    lacking = len(query.shape) - ndim
    placements: list[Placement] = []
    for axis, placement in enumerate(query._layout.placements):
        own: Placement = Replicate()
        if isinstance(placement, Shard) and placement.dim >= lacking:
            dim = placement.dim - len(query.shape)
            if is_taken(axis, dim):
                own = replace(placement, dim=ndim + dim)
        placements.append(own)
    return Layout.from_device_mesh(query.device_mesh)(placements).bind(ndim)
