# SPDX-License-Identifier: Apache-2.0
"""Strategies that draw meshes, layouts and shapes for hypothesis."""

from hypothesis import strategies as st

from hyper_parallel.core.dtensor.layout import Layout, placements_of

MESHES = {2: [(2,), (1, 2)], 4: [(4,), (2, 2)], 8: [(8,), (2, 4), (4, 2), (2, 2, 2)]}
OPS = [(None, "sum", "avg"), (None, "max"), (None, "min"), (None, "prod")]  # those in one line can be pending together


def meshes(ranks):
    """A layout of a mesh of that many ranks, without placements."""
    return st.sampled_from(MESHES[ranks]).map(lambda shape: Layout(shape, tuple("abc"[: len(shape)])))


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
