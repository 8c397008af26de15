# SPDX-License-Identifier: Apache-2.0
"""How the arguments of a step are divided into micro batches.

BatchDimSpec(1)                                 divide at dim 1
BatchDimSpec(-1)                                every micro batch gets the whole value
BatchDimSpec.from_tuple((0, 1))                 one spec per positional argument
BatchDimSpec.from_dict({"mask": 0})             one spec per keyword argument
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WHOLE = -1


@dataclass(frozen=True)
class BatchDimSpec:
    """The dim at which a tensor is divided into micro batches; -1: every micro batch gets the whole value."""

    batch_dim: int

    def __post_init__(self) -> None:
        if not isinstance(self.batch_dim, int) or isinstance(self.batch_dim, bool):
            raise TypeError(
                f"BatchDimSpec: batch_dim must be an int, got {self.batch_dim!r}"
            )

    @staticmethod
    def from_tuple(batch_dims: Sequence[int]) -> tuple[BatchDimSpec, ...]:
        """One spec per positional argument."""
        return tuple(BatchDimSpec(dim) for dim in batch_dims)

    @staticmethod
    def from_dict(batch_dims: Mapping[str, int]) -> dict[str, BatchDimSpec]:
        """One spec per keyword argument."""
        return {name: BatchDimSpec(dim) for name, dim in batch_dims.items()}


def find_batch_dim(spec: Any) -> int:
    """The dim of a spec in any form: an int, a BatchDimSpec, None, or torch's TensorChunkSpec."""
    if spec is None:
        return 0
    if isinstance(spec, int) and not isinstance(spec, bool):
        return spec
    for name in ("batch_dim", "split_dim"):
        dim = getattr(spec, name, None)
        if isinstance(dim, int):
            return dim
    if type(spec).__name__ == "_Replicate":  # torch's way to say that it is not divided
        return WHOLE
    raise TypeError(f"a batch dim must be an int, a BatchDimSpec or None, got {spec!r}")
