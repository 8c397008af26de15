# SPDX-License-Identifier: Apache-2.0
"""Strategies that draw meshes, layouts and shapes for hypothesis, and arrays cut up as a layout says."""

import numpy as np
import torch
from hypothesis import strategies as st

from hyper_parallel.core.dtensor.layout import Layout, placements_of
from hyper_parallel.core.dtensor.placement_types import RaggedShard, ZigzagShard

MESHES = {2: [(2,), (1, 2)], 4: [(4,), (2, 2)], 8: [(8,), (2, 4), (4, 2), (2, 2, 2)]}
OPS = [
    (None, "sum", "avg"),
    (None, "max"),
    (None, "min"),
    (None, "prod"),
]  # those in one line can be pending together


def meshes(ranks):
    """A layout of a mesh of that many ranks, without placements."""
    return st.sampled_from(MESHES[ranks]).map(
        lambda shape: Layout(shape, tuple("abc"[: len(shape)]))
    )


@st.composite
def layouts_on(draw, mesh, count, longest, ops=None):
    """``count`` layouts of that mesh for one shape, and the shape: any axes, order, pending reductions; any sizes."""
    ndim = draw(st.integers(1, longest))
    shape = draw(st.lists(st.integers(0, 9), min_size=ndim, max_size=ndim))
    return (*(draw(one_layout(mesh, ndim, ops)) for _ in range(count)), tuple(shape))


@st.composite
def one_layout(draw, mesh, ndim, ops=None):
    ops = draw(st.sampled_from(OPS)) if ops is None else ops
    dim_axes = [[] for _ in range(ndim)]
    partial = [None] * mesh.mesh.ndim
    for axis in draw(st.permutations(range(mesh.mesh.ndim))):
        dim = draw(st.integers(-1, ndim - 1))
        if dim >= 0:
            dim_axes[dim].append(axis)
        else:
            partial[axis] = draw(st.sampled_from(ops))
    return mesh(list(placements_of(dim_axes, partial, mesh.mesh_shape))).bind(ndim)


def own_indices(layout, shape, coordinate):
    """The indices along each dim that a place has, by torch.chunk itself."""
    found = []
    for size, axes in zip(shape, layout.dim_axes, strict=True):
        indices = torch.arange(size)
        for axis in axes:
            placement, ranks = layout.placements[axis], layout.mesh_shape[axis]
            indices = _own(placement, indices, ranks, coordinate[axis])
        found.append(indices.numpy())
    return found


def _own(placement, indices, ranks, place):
    if isinstance(placement, RaggedShard):
        return indices.split(placement.sizes)[place]
    if isinstance(placement, ZigzagShard):
        chunks = [place, 2 * ranks - 1 - place]
        return torch.cat([_piece(indices, 2 * ranks, chunk) for chunk in chunks])
    sections = getattr(placement, "sections", (len(indices),))
    pieces = [_piece(part, ranks, place) for part in indices.split(sections)]
    return torch.cat(pieces)


def _piece(indices, count, place):
    pieces = indices.chunk(count) if len(indices) else ()
    return pieces[place] if place < len(pieces) else indices[:0]


def split_up(whole, layout, rng):
    """Every place's shard; where a reduction is pending, parts of both signs that reduce to the whole."""
    return {
        place: shard_of(part, layout, place)
        for place, part in _parts_of(whole, layout, rng).items()
    }


def split_for(place, whole, layout, rng):
    """What ``split_up`` gives one place, without cutting the others' shards."""
    return shard_of(_parts_of(whole, layout, rng)[place], layout, place)


def shard_of(part, layout, place):
    return part[np.ix_(*own_indices(layout, part.shape, place))]


def _parts_of(whole, layout, rng):
    """What every place has before dims are cut."""
    parts = {(): whole}
    for axis, placement in enumerate(layout.placements):
        count = layout.mesh_shape[axis]
        split = {}
        for place, value in parts.items():
            pieces = [value] * count
            if placement.is_partial():
                dtype = value.dtype if np.issubdtype(value.dtype, np.inexact) else None
                pieces = [
                    np.asarray(one, dtype)
                    for one in cut_into_parts(value, placement.reduce_op, count, rng)
                ]
            split |= {(*place, i): piece for i, piece in enumerate(pieces)}
        parts = split
    return parts


def cut_into_parts(value, op, count, rng):
    if op in ("sum", "avg"):
        others = [
            rng.standard_normal(value.shape).astype(np.result_type(value, float)) * 3
            for _ in range(count - 1)
        ]
        last = value * (count if op == "avg" else 1) - sum(others)
        return [*others, last]
    if op == "prod":
        others = [
            rng.uniform(0.5, 2.0, value.shape) * rng.choice([-1, 1], value.shape)
            for _ in range(count - 1)
        ]
        return [*others, value / np.prod(others, axis=0) if others else value]
    winner = rng.integers(0, count, value.shape)
    away = rng.uniform(0.1, 3.0, (count, *value.shape)) * (-1 if op == "max" else 1)
    return [np.where(winner == i, value, value + away[i]) for i in range(count)]
