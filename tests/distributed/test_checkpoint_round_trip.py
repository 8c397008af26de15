# SPDX-License-Identifier: Apache-2.0
"""Saved on one mesh, loaded on another: every element bit by bit, against what torch.chunk says each rank has."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import own_indices
from thorough import THOROUGH

from hyper_parallel import DTensor, FusedShard, get_platform
from hyper_parallel.core.distributed_checkpoint import load, save
from hyper_parallel.core.dtensor.layout import Layout, placements_of
from hyper_parallel.testing import run_ranks

MESHES = {1: [None], 2: [(2,), (1, 2), None], 4: [(4,), (2, 2), None]}
SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 11, 13, 31])
DTYPES = [
    "bfloat16", "bool", "complex128", "complex64", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2",
    "int16", "int32", "int64", "int8", "uint16", "uint32", "uint64", "uint8",
]  # fmt: skip


@st.composite
def placements(draw, mesh_shape, shape):
    """How a tensor lies on a mesh: dims cut by any axes in any order, or section by section."""
    dim_axes = [[] for _ in shape]
    for axis in draw(st.permutations(range(len(mesh_shape)))):
        dim = draw(st.integers(-1, len(shape) - 1))
        if dim >= 0:
            dim_axes[dim].append(axis)
    placed = list(placements_of(dim_axes, [None] * len(mesh_shape), mesh_shape))
    for dim, axes in enumerate(dim_axes):
        if len(axes) == 1 and draw(st.booleans()):
            first = draw(st.integers(0, shape[dim]))
            placed[axes[0]] = FusedShard(dim, (first, shape[dim] - first))
    return placed


@st.composite
def cases(draw):
    """(ranks that save, ranks that load, tensors): each a dtype, a shape, a seed, and two layouts; None is plain."""
    before, after = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    tensors = []
    for seed in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(SIZES, max_size=4)))
        layouts = []
        for ranks in (before, after):
            mesh = draw(st.sampled_from(MESHES[ranks]))
            layouts.append(
                None if mesh is None else (mesh, draw(placements(mesh, shape)))
            )
        tensors.append((draw(st.sampled_from(DTYPES)), shape, seed, *layouts))
    return before, after, tensors


def random_bits(dtype, shape, seed):
    """A tensor of any bits, not numbers and infinities among them."""
    count = int(np.prod(shape, dtype=np.int64)) * getattr(torch, dtype).itemsize
    bits = torch.from_numpy(
        np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    )
    if not count:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return (
        (bits & 1).bool() if dtype == "bool" else bits.view(getattr(torch, dtype))
    ).reshape(shape)


def layout_of(told, ndim):
    mesh, placed = told
    return Layout(mesh, tuple("ab"[: len(mesh)]))(placed).bind(ndim)


def tensor_on(told, whole):
    """The tensor as it lies on this rank, cut by torch.chunk itself."""
    if told is None:
        return whole.clone()
    layout, platform = layout_of(told, whole.dim()), get_platform()
    indices = own_indices(layout, tuple(whole.shape), layout.mesh.get_coordinate())
    own = (
        platform.tensor_memory(whole)[np.ix_(*indices)]
        if indices
        else platform.tensor_memory(whole)
    )
    own_bytes = np.frombuffer(own.tobytes(), np.uint8).copy()
    return DTensor(
        platform.tensor_from_bytes(own_bytes, str(whole.dtype), own.shape),
        layout,
        tuple(whole.shape),
    )


def bits(tensor):
    return get_platform().tensor_memory(get_platform().host_tensor(tensor)).tobytes()


def save_there(folder, tensors):
    save(
        {
            "t": {
                str(n): tensor_on(told, random_bits(*kind))
                for n, (*kind, told, _) in enumerate(tensors)
            }
        },
        checkpoint_id=folder,
    )


def load_here(folder, tensors):
    state = {
        str(n): tensor_on(told, torch.zeros_like(random_bits(*kind)))
        for n, (*kind, _, told) in enumerate(tensors)
    }
    report = load({"t": state}, checkpoint_id=folder)
    assert sorted(report.loaded) == sorted(f"t.{n}" for n in range(len(tensors)))
    for n, (*kind, _, told) in enumerate(tensors):
        wanted = tensor_on(told, random_bits(*kind))
        assert bits(state[str(n)]) == bits(wanted), (n, kind, told)


@settings(max_examples=100 if THOROUGH else 30, deadline=None)
@given(cases())
def test_any_layout_to_any_layout(tmp_path_factory, case):
    before, after, tensors = case
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    run_ranks(save_there, before, folder, tensors)
    run_ranks(load_here, after, folder, tensors)
