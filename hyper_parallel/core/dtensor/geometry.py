# SPDX-License-Identifier: Apache-2.0
"""Spans, boxes and regions: which elements of a tensor the ranks of a mesh hold.

    nested_span(10, [(2, 1), (4, 0)])        (5, 2): half 1 of 10 elements, quarter 0 of it
    overlap(((0, 4), (0, 6)), ((2, 4), (0, 3)))     ((2, 2), (0, 3))

A span is ``(offset, size)`` along one dim, a box has one span per dim, and a region has
one or several spans per dim. Everything here is integers: no platform, no mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from hyper_parallel.platform.transform import chunk_sizes, chunk_span

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.placement_types import Shard

__all__ = [
    "Box",
    "Partition",
    "Region",
    "Span",
    "Spans",
    "chunk_sizes",
    "chunk_span",
    "nested_span",
    "overlap",
    "slices_within",
    "volume",
]

Span = tuple[int, int]  # (offset, size) along a dim
Spans = tuple[Span, ...]  # what one coordinate holds of a dim, in ascending order
Box = tuple[Span, ...]  # one span per dim


def nested_span(size: int, chunks: Sequence[tuple[int, int]]) -> Span:
    """The span left after taking chunk ``index`` of ``count``, for each pair in turn."""
    offset = 0
    for count, index in chunks:
        start, size = chunk_span(size, count, index)
        offset += start
    return offset, size


def overlap(left: Box, right: Box) -> Box | None:
    """The box that two boxes share; None if they share no element."""
    shared = []
    for (start, size), (other_start, other_size) in zip(left, right, strict=True):
        first = max(start, other_start)
        stop = min(start + size, other_start + other_size)
        if stop <= first:
            return None
        shared.append((first, stop - first))
    return tuple(shared)


def volume(box: Box) -> int:
    """The number of elements in a box."""
    return math.prod(size for _, size in box)


def slices_within(part: Box, box: Box, start: Sequence[int]) -> tuple[slice, ...]:
    """Where a part of a box lies in a tensor that stores the box from ``start`` on."""
    slices = []
    for (offset, size), (box_offset, _), begin in zip(part, box, start, strict=True):
        first = offset - box_offset + begin
        slices.append(slice(first, first + size))
    return tuple(slices)


class Region:
    """What one coordinate holds of a tensor: the product of its spans of each dim.

    The rank stores the spans of a dim one after the other in one local tensor.
    """

    def __init__(self, spans: tuple[Spans, ...]) -> None:
        self.spans = spans

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the local tensor."""
        return tuple(sum(size for _, size in spans) for spans in self.spans)

    @property
    def volume(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def boxes(self) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Each box that is not empty, and where it begins in the local tensor."""
        starts = []
        for spans in self.spans:
            sizes = [size for _, size in spans]
            starts.append(list(itertools.accumulate(sizes, initial=0))[:-1])
        pairs = [
            list(zip(spans, begins, strict=True))
            for spans, begins in zip(self.spans, starts, strict=True)
        ]
        for chosen in itertools.product(*pairs):
            box = tuple(span for span, _ in chosen)
            if volume(box):
                yield box, tuple(start for _, start in chosen)

    def shared_with(self, other: Region) -> int:
        """The number of elements that both regions have."""
        count = 0
        for (mine, _), (theirs, _) in itertools.product(self.boxes(), other.boxes()):
            shared = overlap(mine, theirs)
            count += volume(shared) if shared is not None else 0
        return count


class Partition:
    """How a mesh divides the dims of a tensor.

    ``dim_axes`` has for each dim the axes that shard it, outermost first. A dim in
    ``rules`` is sharded by one axis, in spans that its placement gives; any other dim is
    chunked as torch.chunk does, axis by axis.
    """

    def __init__(
        self,
        mesh_shape: tuple[int, ...],
        dim_axes: tuple[tuple[int, ...], ...],
        rules: Mapping[int, Shard],
    ) -> None:
        self.mesh_shape = mesh_shape
        self.dim_axes = dim_axes
        self.rules = rules

    def spans(self, dim: int, size: int, coordinate: Sequence[int]) -> Spans:
        """What a coordinate holds of a dim of this size."""
        axes = self.dim_axes[dim]
        if dim in self.rules:
            axis = axes[0]
            rule = self.rules[dim]
            return rule.spans(size, self.mesh_shape[axis], coordinate[axis])
        chunks = [(self.mesh_shape[axis], coordinate[axis]) for axis in axes]
        return (nested_span(size, chunks),)

    def region(self, shape: Sequence[int], coordinate: Sequence[int]) -> Region:
        """What a coordinate holds of a tensor of this shape."""
        spans = (self.spans(dim, size, coordinate) for dim, size in enumerate(shape))
        return Region(tuple(spans))
