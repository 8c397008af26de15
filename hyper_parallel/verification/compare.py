# SPDX-License-Identifier: Apache-2.0
"""How far a tensor of this rank is from its part of the true one.

Every rank has the whole truth, so that nothing is communicated, except for the sum of what is still in parts. A copy is
compared on every rank that has one. A plain tensor does not say how it lies: it is right if it is what some layout
would give this rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import (
    Placement,
    Replicate,
    Shard,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.verification.report import Difference
from hyper_parallel.verification.trace import Value

platform = get_platform()

# Of the largest element: sums in another order differ by that at most in models of any common depth.
TOLERANCES = {
    "float64": 1e-9,
    "float32": 1e-4,
    "float16": 1e-2,
    "bfloat16": 5e-2,
    "complex128": 1e-9,
    "complex64": 1e-4,
}
SMALL = 1e-3  # of the largest magnitude: what is smaller may be nothing but rounding


class Comparison:
    """Compares tensors on one rank of a mesh. ``irregular``: the placements of parameters to try."""

    def __init__(
        self,
        mesh: DeviceMesh,
        tolerance: float | None = None,
        irregular: Sequence[Shard] = (),
    ) -> None:
        self.mesh = mesh
        self.rank = mesh.rank
        self._tolerance = tolerance
        self._irregular = tuple(irregular)

    def difference(
        self, kind: str, name: str, truth: Value, mine: Value, scale: float
    ) -> Difference:
        """Of a whole tensor and what this rank has of its twin; ``scale`` is the size of what stands beside it."""
        own = largest(truth.array)
        allowed = self._allowed(mine.dtype, max(own, SMALL * scale))
        found, note = self._distance(truth, mine)
        return Difference(kind, name, found, own, allowed, self.rank, note)

    def missing(
        self, kind: str, name: str, there: Value, scale: float, note: str
    ) -> Difference:
        """Of a tensor that has no twin; zeros are none."""
        own, allowed = largest(there.array), self._allowed(there.dtype, SMALL * scale)
        return Difference(
            kind, name, own, own, allowed, self.rank, note if own > allowed else ""
        )

    def _allowed(self, dtype: str, scale: float) -> float:
        exact = dtype.rpartition(".")[2].lower() not in TOLERANCES
        tolerance = (
            TOLERANCES.get(dtype.rpartition(".")[2].lower(), 0.0)
            if self._tolerance is None
            else self._tolerance
        )
        return 0.0 if exact else scale * tolerance

    def _distance(self, truth: Value, mine: Value) -> tuple[float, str]:
        """The largest difference of an element, and what keeps them from being compared."""
        shape, whole = truth.shape, platform.tensor(truth.array)
        if mine.layout is not None:
            if mine.shape != shape:
                return math.inf, f"its shape is {mine.shape}, expected {shape}"
            if mine.pending is not None:
                with platform.no_grad():
                    return _far(
                        truth.array,
                        platform.tensor_to_numpy(mine.pending.full_tensor()),
                    ), ""
            return _far(_part_of(mine.layout, whole), mine.array), ""
        layouts = _layouts(self.mesh, shape, mine.shape, self._irregular)
        if not layouts:
            return math.inf, f"its shape is {mine.shape}, which is no part of {shape}"
        return min(_far(_part_of(layout, whole), mine.array) for layout in layouts), ""


def _part_of(layout: Layout, whole: Any) -> Any:
    return platform.tensor_to_numpy(layout.part_of(whole))


def _far(true: Any, mine: Any) -> float:
    """The largest difference of two arrays; infinite where only one has a nan or an infinite number."""
    if true.shape != mine.shape:
        return math.inf
    if true.size == 0 or np.array_equal(true, mine):
        return 0.0
    wide = np.complex128 if np.iscomplexobj(true) else np.float64
    true, mine = true.astype(wide), mine.astype(wide)
    same = (true == mine) | (np.isnan(true) & np.isnan(mine))
    with np.errstate(invalid="ignore", over="ignore"):
        distance = np.where(same, 0.0, np.abs(true - mine))
    return float(np.where(np.isnan(distance), math.inf, distance).max())


def largest(array: Any) -> float:
    """The largest finite magnitude."""
    magnitudes = np.abs(
        array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
    )
    return float(np.where(np.isfinite(magnitudes), magnitudes, 0.0).max(initial=0.0))


@lru_cache(maxsize=4096)
def _layouts(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    local: tuple[int, ...],
    irregular: tuple[Shard, ...],
) -> tuple[Layout, ...]:
    """The layouts in which this rank has that much of a tensor."""
    if len(shape) != len(local):
        return ()
    found = []
    for placements in itertools.product(
        _placements(mesh, shape, irregular), repeat=mesh.ndim
    ):
        if not _go_together(placements):
            continue
        layout = Layout.from_device_mesh(mesh)(list(placements)).bind(len(shape))
        if layout.local_shape(shape) == local:
            found.append(layout)
    return tuple(found)


def _go_together(placements: Sequence[Placement]) -> bool:
    """Whether at most one axis has an irregular placement, and no other shards its dim."""
    shards = [p for p in placements if isinstance(p, Shard)]
    irregular = [p for p in shards if not p.is_chunked]
    if len(irregular) > 1:
        return False
    return not irregular or [p.dim for p in shards].count(irregular[0].dim) == 1


def _placements(
    mesh: DeviceMesh, shape: tuple[int, ...], irregular: tuple[Shard, ...]
) -> Iterator[Placement]:
    yield Replicate()
    for dim, size in enumerate(shape):
        yield Shard(dim)
        for placement in irregular:
            moved = replace(placement, dim=dim)
            if all(_fits(moved, size, ranks) for ranks in mesh.mesh_shape):
                yield moved


def _fits(placement: Shard, size: int, ranks: int) -> bool:
    try:
        placement.spans(size, ranks, 0)
    except ValueError:
        return False
    return True
