# SPDX-License-Identifier: Apache-2.0
"""Random numbers on a mesh: those of one device, sharded; or the same on copies and different on every shard.

Ranks may be seeded differently (``manual_seed(seed + rank)``) or have drawn different amounts, and nobody but they
themselves could tell. So the seed of a draw comes from the first rank that has a copy: eight bytes for each draw whose
result has copies. What restores the generators, such as recompute or a checkpoint, draws the same again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.collectives import attributed
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.platform import get_platform

platform = get_platform()

_MIXED_BY = 0x9E3779B97F4A7C15  # odd, so that pieces of one seed never get the same one


def seed_of_piece(layout: Layout, piece: int) -> int:
    """A seed for a piece of a tensor: the same on ranks that hold copies of it, another for every other piece."""
    copied = [
        axis
        for axis, placement in enumerate(layout.placements)
        if not placement.is_shard()
    ]
    seed = _of_first_rank(platform.draw_seed(), layout.mesh, copied)
    return (seed ^ (piece * _MIXED_BY)) % 2**62


def as_one_device(
    mesh: DeviceMesh, draw: Callable[[], Any], *, always_draws: bool = True
) -> Any:
    """What ``draw`` gives, the same on all ranks of a mesh: what the generator of each gives if they are in step.

    ``always_draws``: it draws random numbers whatever it is given; if not, it may be called twice.
    """
    before = platform.get_rng_state()
    own = _digest(before)
    if not always_draws:
        drawn = draw()
        if (
            _digest(platform.get_rng_state()) == own
        ):  # it draws nothing, or has a generator of its own
            return drawn
    axes = list(range(mesh.ndim))
    if not _is_true_anywhere(_of_first_rank(own, mesh, axes) != own, mesh, axes):
        return draw() if always_draws else drawn
    platform.set_rng_state(before)
    seed = _of_first_rank(platform.draw_seed(), mesh, axes)
    with platform.seeded(seed):
        return draw()


def _of_first_rank(number: int, mesh: DeviceMesh, axes: list[int]) -> int:
    """The number of the first rank along these axes."""
    ranks = mesh.ranks_along(axes)
    if len(ranks) == 1:
        return number
    with attributed(implicit=True):
        sent = platform.broadcast(
            _tensor_of(number), ranks[0], platform.create_group(ranks)
        )
    return int(platform.tensor_to_numpy(sent)[0])


def _is_true_anywhere(statement: bool, mesh: DeviceMesh, axes: list[int]) -> bool:
    ranks = mesh.ranks_along(axes)
    if len(ranks) == 1:
        return statement
    with attributed(implicit=True):
        found = platform.all_reduce(
            _tensor_of(int(statement)), platform.create_group(ranks), op="max"
        )
    return bool(platform.tensor_to_numpy(found)[0])


def _tensor_of(number: int) -> Any:
    return platform.tensor(np.array([number], np.int64), device=platform.device())


def _digest(state: Any) -> int:
    found = hashlib.sha256(platform.tensor_to_numpy(state).tobytes()).digest()
    return int.from_bytes(found[:7], "little")
