# SPDX-License-Identifier: Apache-2.0
"""How a tensor lies on one axis of the mesh: cut, copied, or waiting to be reduced.

Shard(0)                   the pieces of dim 0 lie on the ranks of the axis
FusedShard(0, (16, 8, 8))  the same for each of three sections of dim 0: a rank has its pieces of all of them
Replicate()                every rank has the whole
Partial("sum")             every rank has a part, and the sum of the parts is the tensor
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import REDUCE_OPS
from hyper_parallel.platform.transform import chunk_span


class Placement:
    """A value: hashable, comparable, printable."""

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether the tensor is cut along this axis, and if asked, along that dim."""
        return isinstance(self, Shard) and (dim is None or self.dim == dim)

    def is_replicate(self) -> bool:
        """Whether every rank has the whole."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether every rank has a part, and if asked, one for that reduction."""
        return isinstance(self, Partial) and (
            reduce_op is None or self.reduce_op == reduce_op
        )


@dataclass(frozen=True)
class Shard(Placement):
    """Cut along ``dim`` as torch.chunk cuts; a negative dim counts from the end."""

    dim: int

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise coded(
                TypeError, "HP210", f"Shard: dim must be an int, got {self.dim!r}"
            )

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True)
class StridedShard(Shard):
    """Cut along ``dim`` after later axes have cut it into ``split_factor`` pieces: this axis is not the outer one.

    FSDP over TP needs it: tensor parallel cuts first, on the later axis, and data parallel cuts each piece.
    """

    split_factor: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.split_factor, int) or isinstance(
            self.split_factor, bool
        ):
            raise coded(
                TypeError,
                "HP210",
                f"StridedShard: split_factor must be an int, got {self.split_factor!r}",
            )
        if self.split_factor < 1:
            raise coded(
                ValueError,
                "HP210",
                f"StridedShard: split_factor must be at least 1, got {self.split_factor}",
            )

    def __str__(self) -> str:
        return f"S({self.dim}, {self.split_factor})"


@dataclass(frozen=True)
class FusedShard(Shard):
    """Cut along ``dim`` section by section, each as torch.chunk cuts; a rank has its pieces one after the other.

    One weight that makes q, k and v needs it: its rows are those of three layers, and each rank has its heads of all.
    """

    sections: tuple[int, ...]  # their sizes, which add up to that of the dim

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "sections", tuple(self.sections))
        if not all(
            isinstance(size, int) and not isinstance(size, bool)
            for size in self.sections
        ):
            raise coded(
                TypeError,
                "HP210",
                f"FusedShard: sections must be ints, got {self.sections!r}",
            )
        if not self.sections or min(self.sections) < 0:
            raise coded(
                ValueError,
                "HP210",
                f"FusedShard: expected the size of every section, none negative, got {self.sections}",
            )

    def spans(self, ranks: int, index: int) -> tuple[tuple[int, int], ...]:
        """(offset, size) of the pieces that one of so many ranks has, one for each section."""
        found, start = [], 0
        for size in self.sections:
            offset, length = chunk_span(size, ranks, index)
            found.append((start + offset, length))
            start += size
        return tuple(found)

    def __str__(self) -> str:
        return f"F({self.dim}; {'+'.join(map(str, self.sections))})"


@dataclass(frozen=True)
class Replicate(Placement):
    """Every rank has the whole."""

    def __str__(self) -> str:
        return "R"


def commute(reduce_ops: Iterable[str | None]) -> bool:
    """Whether reductions may be pending together: the order of a sum and a maximum makes a difference."""
    return (
        len({"sum" if op == "avg" else op for op in reduce_ops if op is not None}) <= 1
    )


@dataclass(frozen=True)
class Partial(Placement):
    """Every rank has a part; reduced by ``reduce_op`` they are the tensor."""

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op == "product":  # torch's name for it
            object.__setattr__(self, "reduce_op", "prod")
        if self.reduce_op not in REDUCE_OPS:
            raise coded(
                ValueError,
                "HP210",
                f"Partial: reduce_op must be one of {', '.join(REDUCE_OPS)}, got {self.reduce_op!r}",
            )

    def __str__(self) -> str:
        return "P" if self.reduce_op == "sum" else f"P({self.reduce_op})"
