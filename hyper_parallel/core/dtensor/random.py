# SPDX-License-Identifier: Apache-2.0
"""Random numbers on a mesh: those of one device, cut; or the same on copies and others on every piece.

Both rest on generators that are in step: every rank draws the same from its own. That is checked the first time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()

_IN_STEP: set[tuple[DeviceMesh, tuple[int, ...]]] = set()  # the axes along which the ranks were found to agree
platform.forget_groups_with(_IN_STEP.clear)

_MIXED_BY = 0x9E3779B97F4A7C15  # odd, so that pieces of one seed never get the same one


def seed_of_piece(layout: Layout, piece: int) -> int:
    """A seed for a piece of a tensor: the same on ranks that hold copies of it, another for every other piece.

    It is drawn from the generator of the process, so that what restores that generator draws the same again.
    """
    seed = platform.draw_seed()
    copied = [axis for axis, placement in enumerate(layout.placements) if not placement.is_shard()]
    _require_in_step(layout.mesh, copied, seed)
    return (seed ^ (piece * _MIXED_BY)) % 2**62


def as_one_device(mesh: DeviceMesh, draw: Callable[[], Any]) -> Any:
    """What ``draw`` gives, which must be the same on all ranks of a mesh."""
    axes = tuple(range(mesh.ndim))
    if (mesh, axes) in _IN_STEP:
        return draw()
    before = _state()
    drawn = draw()
    if _state() != before:  # else it needed no random numbers, or had a generator of its own
        _require_in_step(mesh, axes, before)
    return drawn


def _state() -> str:
    return hashlib.sha256(platform.tensor_to_numpy(platform.get_rng_state()).tobytes()).hexdigest()


def _require_in_step(mesh: DeviceMesh, axes: Iterable[int], found: Any) -> None:
    """A RuntimeError on all ranks along these axes unless all found the same; asked once for each mesh and axes."""
    key = mesh, tuple(axes)
    if key in _IN_STEP:
        return
    ranks = mesh.ranks_along(key[1])
    everyone: list[Any] = [None] * len(ranks)
    if len(ranks) > 1:
        platform.all_gather_object(everyone, found, platform.create_group(ranks))
        others = [rank for rank, drawn in zip(ranks, everyone, strict=True) if drawn != everyone[0]]
        if others:
            raise RuntimeError(
                coded(
                    "HP226",
                    f"random numbers on {mesh}: the generators of ranks {others} are not in step with that of rank "
                    f"{ranks[0]}, so that copies of one tensor would differ; seed all ranks alike (manual_seed) and "
                    "draw the same on all of them",
                )
            )
    _IN_STEP.add(key)
