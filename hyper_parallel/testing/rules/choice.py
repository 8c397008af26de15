# SPDX-License-Identifier: Apache-2.0
"""One combination of choices, one for each axis of a mesh: evaluates the call as they say, and compares it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.shard.arguments import flat
from hyper_parallel.core.shard.rule import REPLICATE, SUM, AxisUse, Choice
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.testing.rules.call import CaughtCall
from hyper_parallel.testing.rules.gradients import gradients_of, results_of
from hyper_parallel.testing.rules.pieces import Array, Pieces


class OneChoice:
    """A call under one combination of choices."""

    def __init__(
        self, caught: CaughtCall, combination: tuple[Choice, ...], pieces: Pieces
    ) -> None:
        self.caught, self.combination, self.pieces = caught, combination, pieces

    def places(self, side: str) -> list[tuple[AxisUse, ...]]:
        """Where each tensor of one side of the rule lies, an entry for each axis."""
        return list(
            zip(
                *[flat(getattr(choice, side)) for choice in self.combination],
                strict=True,
            )
        )

    def of_operands(self, side: str) -> list[tuple[AxisUse, ...]]:
        """The same for the tensors among the arguments, in their order."""
        places = self.places(side)
        return [places[i] for i in self.caught.rules]

    def local_call(self, place: Sequence[int]) -> Callable[..., list[Any]]:
        """The call on the rank at this place of the mesh, as a function of its shards."""
        return lambda *shards: self.caught.evaluate(self.combination, place, shards)

    def compare(
        self,
        operands: Sequence[Any],
        expected: list[Array],
        weights: list[Any],
        true: list[Any],
    ) -> None:
        """Raises an AssertionError where a result or a gradient is not that of the plain call."""
        arrays = [flat(operands)[i] for i in self.caught.ours]
        held = [
            self.pieces.cut(*pair)
            for pair in zip(arrays, self.of_operands("operands"), strict=True)
        ]
        inputs = list(zip(*held, strict=True))
        ranks = zip(self.pieces.ranks, inputs, strict=True)
        outputs = [
            results_of(self.local_call(place), shards) for place, shards in ranks
        ]
        results = list(zip(*outputs, strict=True))
        for one in zip(results, expected, self.places("results"), strict=True):
            self._compare_result(*one)
        if any(choice.kind == "order" for choice in self.combination):
            return  # only where nothing is recorded
        for i, gradients in enumerate(
            zip(*self._differentiate(inputs, results, weights), strict=True)
        ):
            self._compare_gradient(i, held[i], gradients, true[self.caught.ours[i]])

    def _compare_result(
        self, mine: Sequence[Array], true: Array, places: Sequence[AxisUse]
    ) -> None:
        shares = self.pieces.cut(
            true, [REPLICATE if place.op else place for place in places]
        )
        if [x.shape for x in mine] != [x.shape for x in shares]:
            raise coded(
                AssertionError, "HP604", "a rank's result is not the piece it should be"
            )
        if wrong := {str(x.dtype) for x in mine if x.dtype != true.dtype}:
            raise coded(
                AssertionError,
                "HP604",
                f"a result's dtype is {', '.join(sorted(wrong))}, not {true.dtype}",
            )
        self.pieces.require_same("result", self.pieces.join(mine, places), true)

    def _differentiate(
        self,
        inputs: Sequence[Sequence[Array]],
        results: Sequence[Sequence[Array]],
        weights: Sequence[Any],
    ) -> list[list[Any]]:
        """Every rank's gradients. The ranks share no tensor, so that one backward serves them all."""
        width = len(inputs[0])
        starts = range(0, width * len(inputs), width)

        def on_all_ranks(*tensors: Any) -> list[Any]:
            shards = [tensors[start : start + width] for start in starts]
            ranks = zip(self.pieces.ranks, shards, strict=True)
            return [y for place, held in ranks for y in self.local_call(place)(*held)]

        arriving = zip(*self._arriving(results, weights), strict=True)
        everything = [array for arrays in inputs for array in arrays]
        gradients = gradients_of(
            on_all_ranks, everything, [g for share in arriving for g in share]
        )
        return [gradients[start : start + width] for start in starts]

    def _arriving(
        self, results: Sequence[Sequence[Array]], weights: Sequence[Any]
    ) -> list[list[Any]]:
        """For each result the gradient that arrives at every rank; None where it has none."""
        sides = zip(
            weights,
            results,
            self.places("results"),
            self.places("grads_in"),
            strict=True,
        )
        nothing = [None] * len(self.pieces.ranks)
        return [
            nothing if side[0] is None else self.pieces.hand_down(*side)
            for side in sides
        ]

    def _compare_gradient(
        self,
        i: int,
        held: Sequence[Array],
        gradients: Sequence[Any],
        true: Array | None,
    ) -> None:
        number, leaving = self.caught.rules[i], self.of_operands("grads_out")[i]
        if (true is None) != (gradients[0] is None):
            raise coded(
                AssertionError,
                "HP604",
                f"operand {number} has a gradient in one call and none in the other",
            )
        if true is None:
            return
        parts = [REPLICATE if place == SUM else place for place in leaving]
        right = self.pieces.hand_down(
            true, held, self.of_operands("operands")[i], parts
        )
        for mine, one in zip(
            self.pieces.sum_over(gradients, leaving), right, strict=True
        ):
            self.pieces.require_same(f"gradient of operand {number}", mine, one)
