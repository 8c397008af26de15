# SPDX-License-Identifier: Apache-2.0
"""What each rank of a mesh holds of an array: pieces, copies, parts of a reduction; and the array of which they are.

Everything is numpy, with the ranks one after the other, the first axis of the mesh the outer one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.core.shard.rule import REPLICATE, SUM, AxisUse
from hyper_parallel.platform.transform import chunk_sizes

Array = Any
Mesh = tuple[int, ...]


def drawn_like(like: Array, rng: Any) -> Array:
    """Random numbers, as many and of the kind of those of another array."""
    if np.issubdtype(like.dtype, np.integer):
        return np.asarray(rng.integers(-9, 10, like.shape), like.dtype)
    drawn = rng.standard_normal(like.shape)
    return (
        drawn + 1j * rng.standard_normal(like.shape) if np.iscomplexobj(like) else drawn
    )


@dataclass
class Pieces:
    """Cuts arrays for the ranks of a mesh, and puts together what they have."""

    mesh: Mesh
    rng: Any
    tolerance: float

    @property
    def ranks(self) -> list[tuple[int, ...]]:
        """The place of every rank in the mesh."""
        return list(itertools.product(*map(range, self.mesh)))

    def cut(self, x: Array, places: Sequence[AxisUse]) -> list[Array]:
        """Every rank's piece of an array."""
        return self._cut(x, places, self.mesh)

    def join(self, pieces: Sequence[Array], places: Sequence[AxisUse]) -> Array:
        """The array of which these are the ranks' pieces."""
        return self._join(pieces, places, self.mesh)

    def hand_down(
        self,
        gradient: Array,
        pieces: Sequence[Array],
        places: Sequence[AxisUse],
        arriving: Sequence[AxisUse],
    ) -> list[Array]:
        """Every rank's gradient of its piece: as it arrives, and through the reduction where a piece is a part."""
        return self._hand_down(gradient, pieces, places, arriving, self.mesh)

    def _cut(self, x: Array, places: Sequence[AxisUse], mesh: Mesh) -> list[Array]:
        if not mesh:
            return [x]
        ranks, place = mesh[0], places[0]
        if place == REPLICATE:
            return self._cut(x, places[1:], mesh[1:]) * ranks
        pieces = (
            self._parts(x, place.op, ranks)
            if place.op
            else _chunks(x, place.dim, ranks)
        )
        return [
            held for piece in pieces for held in self._cut(piece, places[1:], mesh[1:])
        ]

    def _parts(self, x: Array, op: str, ranks: int) -> list[Array]:
        """Parts of both signs that give x when reduced, in its dtype."""
        drawn = [drawn_like(x, self.rng) for _ in range(ranks - 1)]
        if op in ("sum", "avg"):
            parts = [*drawn, (ranks if op == "avg" else 1) * x - sum(drawn)]
        elif op == "prod":
            drawn = [np.sign(d) * (0.5 + np.abs(d)) for d in drawn]
            parts = [*drawn, x / math.prod(drawn)]
        else:
            winner, away = (
                self.rng.integers(ranks, size=x.shape),
                self.rng.uniform(0.1, 1.1, (ranks, *x.shape)),
            )
            parts = [
                np.where(winner == i, x, x - away[i] * (1 if op == "max" else -1))
                for i in range(ranks)
            ]
        return [np.asarray(part, x.dtype) for part in parts]

    def _join(
        self, pieces: Sequence[Array], places: Sequence[AxisUse], mesh: Mesh
    ) -> Array:
        if not mesh:
            return pieces[0]
        held = [
            self._join(block, places[1:], mesh[1:]) for block in _blocks(pieces, mesh)
        ]
        if places[0] == REPLICATE:
            for other in held[1:]:
                self.require_same(
                    "result of a rank that should have a copy", other, held[0]
                )
            return held[0]
        return (
            _reduced(held, places[0].op)
            if places[0].op
            else np.concatenate(held, places[0].dim)
        )

    def _hand_down(
        self,
        gradient: Array,
        pieces: Sequence[Array],
        places: Sequence[AxisUse],
        arriving: Sequence[AxisUse],
        mesh: Mesh,
    ) -> list[Array]:
        if not mesh:
            return [gradient]
        held = _blocks(pieces, mesh)
        shares = self._cut(gradient, arriving[:1], mesh[:1])
        if places[0].op not in (
            None,
            "sum",
        ):  # the backward of a sum gives every part what arrives
            values = [self._join(block, places[1:], mesh[1:]) for block in held]
            shares = [gradient * share for share in _shares(values, places[0].op)]
        following = zip(shares, held, strict=True)
        return [
            g
            for s, block in following
            for g in self._hand_down(s, block, places[1:], arriving[1:], mesh[1:])
        ]

    def sum_over(
        self, gradients: Sequence[Array], leaving: Sequence[AxisUse]
    ) -> list[Array]:
        """The ranks' gradients after the sums that the choices ask for."""
        found = list(gradients)
        for axis, place in enumerate(leaving):
            if place == SUM:
                rests = [rank[:axis] + rank[axis + 1 :] for rank in self.ranks]
                found = [
                    sum(found[s] for s, other in enumerate(rests) if other == rest)
                    for rest in rests
                ]
        return found

    def require_same(self, what: str, mine: Array, true: Array) -> None:
        """Raises an AssertionError where two arrays differ by more than rounding."""
        if np.array_equal(
            mine, true
        ):  # most are, and the comparison of rounded numbers costs ten times as much
            return
        if mine.shape != true.shape or not np.allclose(
            mine, true, self.tolerance, self.tolerance, equal_nan=True
        ):
            np.testing.assert_allclose(
                mine,
                true,
                self.tolerance,
                self.tolerance,
                err_msg=f"the {what} is wrong",
            )


def _blocks(pieces: Sequence[Array], mesh: Mesh) -> list[Sequence[Array]]:
    width = len(pieces) // mesh[0]
    return [pieces[i * width : (i + 1) * width] for i in range(mesh[0])]


def _chunks(x: Array, dim: int | None, ranks: int) -> list[Array]:
    assert dim is not None
    sizes = chunk_sizes(x.shape[dim], ranks)
    ends = itertools.accumulate(sizes)
    before = (slice(None),) * dim
    return [
        x[(*before, slice(end - size, end))]
        for size, end in zip(sizes, ends, strict=True)
    ]


def _reduced(parts: Sequence[Array], op: str | None) -> Array:
    return getattr(np, {"avg": "mean"}.get(str(op), str(op)))(np.stack(parts), axis=0)


def _shares(parts: Sequence[Array], op: str | None) -> list[Array]:
    """The derivative of a reduction for each of its parts; no two parts are equal."""
    if op == "avg":
        return [np.full_like(part, 1 / len(parts)) for part in parts]
    if op == "prod":
        return [
            math.prod(parts[:i]) * math.prod(parts[i + 1 :]) for i in range(len(parts))
        ]
    reduced = _reduced(parts, op)
    return [(part == reduced).astype(part.dtype) for part in parts]
