# SPDX-License-Identifier: Apache-2.0
"""How a tensor is placed on one axis of the mesh: sharded, replicated, or partial.

Shard(0)                   each rank of the axis holds a chunk of dim 0
FusedShard(0, (16, 8, 8))  the same for each of three sections of dim 0
RaggedShard(0, (5, 0, 3))  consecutive parts of dim 0, of explicit sizes
ZigzagShard(0)             rank i of n holds chunks i and 2 n - 1 - i of dim 0
Replicate()                every rank holds the whole tensor
Partial("sum")             every rank holds a term, and the sum of the terms is the tensor
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from hyper_parallel.core.dtensor.geometry import Spans, chunk_span
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import REDUCE_OPS

# Placements compare, hash and print as their base class does: that is cheaper to import
# than what dataclass generates for each of them.


class Placement:
    """A value: hashable, comparable, printable."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__qualname__}({fields})"

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether the tensor is sharded along this axis, optionally along that dim."""
        return isinstance(self, Shard) and (dim is None or self.dim == dim)

    def is_replicate(self) -> bool:
        """Whether the tensor is replicated along this axis."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether the tensor is Partial along this axis, optionally by that reduction."""
        return isinstance(self, Partial) and (
            reduce_op is None or self.reduce_op == reduce_op
        )


@dataclass(frozen=True, eq=False, repr=False)
class Shard(Placement):
    """Divided along ``dim`` into chunks as by torch.chunk; a negative dim counts from the end.

    A subclass for which ``is_chunked`` is False divides its dim by a rule of its own, and
    is then the only placement that may shard that dim. The rule is in the five methods
    below; everything else (layouts, redistribution, checkpoints, printing) asks them.
    """

    is_chunked: ClassVar[bool] = True
    letter: ClassVar[str] = "S"  # what it prints as

    dim: int

    def __post_init__(self) -> None:
        _check_int("dim", self.dim, type(self))

    def spans(self, size: int, ranks: int, index: int) -> Spans:
        """(offset, size) of the spans that rank ``index`` of ``ranks`` holds of a dim."""
        return (chunk_span(size, ranks, index),)

    def piece_count(self, ranks: int) -> int:
        """The number of spans that all ranks together hold, empty ones included."""
        return ranks

    def pieces_of(self, index: int, ranks: int) -> Sequence[int]:
        """Which of all spans, counted in the order of the dim, a rank holds."""
        del ranks
        return (index,)

    def owner_of(self, piece: int, ranks: int) -> tuple[int, int]:
        """The rank that holds a piece, counted in the order of the dim, and which of its spans it is."""
        del ranks
        return piece, 0

    def whole_size(self, local_size: int, ranks: int) -> int:
        """The size of the dim if every rank holds this much of it."""
        return local_size * ranks

    def __str__(self) -> str:
        return f"{self.letter}({self.dim})"


@dataclass(frozen=True, eq=False, repr=False)
class StridedShard(Shard):
    """Sharded along ``dim`` after later axes have divided it into ``split_factor`` pieces.

    FSDP over TP needs it: tensor parallel shards first, on the later axis, and data
    parallel shards each piece.
    """

    split_factor: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_int("split_factor", self.split_factor, type(self))
        if self.split_factor < 1:
            raise coded(
                ValueError,
                "HP210",
                f"StridedShard: split_factor must be at least 1, got {self.split_factor}",
            )

    def __str__(self) -> str:
        return f"S({self.dim}, {self.split_factor})"


@dataclass(frozen=True, eq=False, repr=False)
class FusedShard(Shard):
    """Sharded along ``dim`` section by section: each rank holds its chunk of every section.

    The weight that computes q, k and v needs it: its rows are those of three layers, and
    each rank holds its heads of all three.
    """

    is_chunked: ClassVar[bool] = False
    letter: ClassVar[str] = "F"

    sections: tuple[int, ...]  # their sizes, which add up to the size of the dim

    def __post_init__(self) -> None:
        super().__post_init__()
        sections = _check_sizes("sections", self.sections, type(self))
        object.__setattr__(self, "sections", sections)

    def spans(self, size: int, ranks: int, index: int) -> Spans:
        _check_total(self, self.sections, size)
        spans, start = [], 0
        for section in self.sections:
            offset, length = chunk_span(section, ranks, index)
            spans.append((start + offset, length))
            start += section
        return tuple(spans)

    def piece_count(self, ranks: int) -> int:
        return len(self.sections) * ranks

    def pieces_of(self, index: int, ranks: int) -> Sequence[int]:
        return range(index, self.piece_count(ranks), ranks)

    def owner_of(self, piece: int, ranks: int) -> tuple[int, int]:
        section, rank = divmod(piece, ranks)
        return rank, section

    def whole_size(self, local_size: int, ranks: int) -> int:
        del local_size, ranks
        return sum(self.sections)

    def __str__(self) -> str:
        return f"{self.letter}({self.dim}; {'+'.join(map(str, self.sections))})"


@dataclass(frozen=True, eq=False, repr=False)
class RaggedShard(Shard):
    """Sharded along ``dim`` into consecutive parts of the given sizes, one per rank; 0 is a valid size."""

    is_chunked: ClassVar[bool] = False
    letter: ClassVar[str] = "G"

    sizes: tuple[int, ...]  # one per rank of the axis

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "sizes", _check_sizes("sizes", self.sizes, type(self)))

    def spans(self, size: int, ranks: int, index: int) -> Spans:
        if len(self.sizes) != ranks:
            raise coded(
                ValueError,
                "HP214",
                f"{self} has {len(self.sizes)} sizes, but the axis has {ranks} ranks",
            )
        _check_total(self, self.sizes, size)
        return ((sum(self.sizes[:index]), self.sizes[index]),)

    def whole_size(self, local_size: int, ranks: int) -> int:
        del local_size, ranks
        return sum(self.sizes)

    def __str__(self) -> str:
        return f"{self.letter}({self.dim}; {'+'.join(map(str, self.sizes))})"


class ZigzagShard(Shard):
    """Divided along ``dim`` into 2 n chunks for n ranks: rank i holds chunks i and 2 n - 1 - i.

    Causal attention needs it: every rank holds an early and a late part of the sequence,
    so all have the same amount of work.
    """

    is_chunked: ClassVar[bool] = False
    letter: ClassVar[str] = "Z"

    def spans(self, size: int, ranks: int, index: int) -> Spans:
        chunks = (index, 2 * ranks - 1 - index)
        return tuple(chunk_span(size, 2 * ranks, chunk) for chunk in chunks)

    def piece_count(self, ranks: int) -> int:
        return 2 * ranks

    def pieces_of(self, index: int, ranks: int) -> Sequence[int]:
        return (index, 2 * ranks - 1 - index)

    def owner_of(self, piece: int, ranks: int) -> tuple[int, int]:
        return (piece, 0) if piece < ranks else (2 * ranks - 1 - piece, 1)


def parse_irregular(text: str) -> Shard:
    """The placement that prints as this text, such as "Z(0)"; a ValueError for any other."""
    match = re.fullmatch(r"([A-Z])\((\d+)(?:; (\d+(?:\+\d+)*))?\)", text)
    for kind in Shard.__subclasses__():
        if match is not None and not kind.is_chunked and text[0] == kind.letter:
            sizes = [tuple(map(int, match[3].split("+")))] if match[3] else []
            with suppress(TypeError):  # sizes that are missing, or not expected
                return kind(int(match[2]), *sizes)
    raise coded(ValueError, "HP210", f"{text!r} is not an irregular placement")


def _check_int(name: str, value: Any, kind: type[Shard]) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise coded(
            TypeError, "HP210", f"{kind.__name__}: {name} must be an int, got {value!r}"
        )


def _check_sizes(name: str, given: Any, kind: type[Shard]) -> tuple[int, ...]:
    sizes: tuple[Any, ...] = tuple(given)
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise coded(
            TypeError, "HP210", f"{kind.__name__}: {name} must be ints, got {sizes!r}"
        )
    if not sizes or min(sizes) < 0:
        raise coded(
            ValueError,
            "HP210",
            f"{kind.__name__}: {name} must be sizes of at least 0, got {sizes}",
        )
    return sizes


def _check_total(placement: Shard, sizes: tuple[int, ...], size: int) -> None:
    if sum(sizes) != size:
        raise coded(
            ValueError,
            "HP214",
            f"the sizes of {placement} add up to {sum(sizes)}, "
            f"but dim {placement.dim} has size {size}",
        )


@dataclass(frozen=True, eq=False, repr=False)
class Replicate(Placement):
    """Every rank has the full tensor."""

    def __str__(self) -> str:
        return "R"


def commute(reduce_ops: Iterable[str | None]) -> bool:
    """Whether reductions may be pending together: the order of a sum and a maximum makes a difference."""
    return (
        len({"sum" if op == "avg" else op for op in reduce_ops if op is not None}) <= 1
    )


@dataclass(frozen=True, eq=False, repr=False)
class Partial(Placement):
    """Every rank has a part; the tensor is the reduction of the parts by ``reduce_op``."""

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
