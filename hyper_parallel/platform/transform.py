# SPDX-License-Identifier: Apache-2.0
"""The steps of a redistribution as functions of a local tensor, on top of the platform's collectives.

    transform = platform.get_tensor_transform()
    y = transform.all_to_all(x, gather_dim=0, split_dim=1, group=group)     # Shard(0) -> Shard(1)

Every step is differentiable and its backward is the adjoint step. Sizes follow torch.chunk, so pieces may be uneven
or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.platform.error_codes import coded

if TYPE_CHECKING:
    from hyper_parallel.platform.platform import Platform


def chunk_sizes(size: int, pieces: int) -> list[int]:
    """The sizes of ``pieces`` pieces as torch.chunk cuts them: the first ones larger, the last ones less or nothing."""
    return [chunk_span(size, pieces, index)[1] for index in range(pieces)]


def chunk_span(size: int, pieces: int, index: int) -> tuple[int, int]:
    """(offset, size) of one of these pieces."""
    step = -(-size // pieces)
    offset = min(index * step, size)
    return offset, min(step, size - offset)


class TensorTransform:
    """Slice, all-gather, all-to-all, reduce-scatter and all-reduce along any dim."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform

    def slice(self, x: Any, dim: int, pieces: int, index: int) -> Any:
        """Piece ``index`` of ``pieces`` along ``dim``; no communication."""
        return self._platform.chunk(x, dim, pieces, index)

    def all_gather(
        self, x: Any, dim: int, group: Any, sizes: Sequence[int] | None = None
    ) -> Any:
        """Every rank's piece joined along ``dim``; ``sizes`` where the pieces differ."""
        count = len(self._platform.get_process_group_ranks(group))
        return self._platform.differentiable_all_gather_concat(
            x, group, count, dim, sizes
        )

    def reduce_scatter(self, x: Any, dim: int, op: str, group: Any) -> Any:
        """The reduction's piece for this rank along ``dim``."""
        count = len(self._platform.get_process_group_ranks(group))
        return self._platform.differentiable_reduce_scatter(x, count, dim, op, group)

    def all_reduce(self, x: Any, op: str, group: Any) -> Any:
        """The reduction on every rank."""
        return self._platform.differentiable_all_reduce(x, op, group)

    def all_to_all(
        self,
        x: Any,
        gather_dim: int,
        split_dim: int,
        group: Any,
        gather_sizes: Sequence[int] | None = None,
    ) -> Any:
        """Gathers ``gather_dim`` and keeps this rank's piece of ``split_dim``, in one exchange.

        ``gather_sizes``: each rank's size along ``gather_dim``, where they differ.
        """
        from hyper_parallel.platform.adjoints import all_to_all_along

        platform = self._platform
        count = len(platform.get_process_group_ranks(group))
        gather_dim, split_dim = gather_dim % len(x.shape), split_dim % len(x.shape)
        if gather_dim == split_dim:
            raise coded(
                ValueError,
                "HP123",
                f"all_to_all: gather_dim and split_dim are both {gather_dim}; they must differ",
            )
        if gather_sizes is not None and len(gather_sizes) != count:
            raise coded(
                ValueError,
                "HP123",
                f"all_to_all: {len(gather_sizes)} gather_sizes for a group of {count} ranks",
            )
        sizes = list(gather_sizes or [x.shape[gather_dim]] * count)
        split_sizes = chunk_sizes(x.shape[split_dim], count)
        return all_to_all_along(
            platform, x, gather_dim, split_dim, sizes, split_sizes, group
        )
