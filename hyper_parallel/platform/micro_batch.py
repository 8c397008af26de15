# SPDX-License-Identifier: Apache-2.0
"""Splitting a call's arguments into micro batches.

split = platform.micro_batch(2, args_batch_dim=(0, "whole"))
args, kwargs = split((inputs, table), {})     # args[i] == [piece i of inputs, table]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.platform.error_codes import coded

if TYPE_CHECKING:
    from hyper_parallel.platform.platform import Platform

WHOLE = "whole"


class MicroBatch:
    """Splits positional and keyword arguments into ``count`` micro batches along each tensor's batch dim.

    A dim is an int, an object with an int ``batch_dim``, None for dim 0, or ``"whole"`` for a tensor that every
    micro batch gets undivided. What is no tensor, and a tensor without dims, goes undivided to all.
    """

    def __init__(
        self,
        platform: Platform,
        count: int,
        args_batch_dim: Sequence[Any] | None = None,
        kwargs_batch_dim: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise coded(
                ValueError,
                "HP130",
                f"micro_batch: micro_batch_num must be a positive int, got {count!r}",
            )
        self.platform = platform
        self.count = count
        self.args_batch_dim = args_batch_dim
        self.kwargs_batch_dim = kwargs_batch_dim or {}

    def __call__(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> tuple[list[list[Any]], list[dict[str, Any]]]:
        kwargs = kwargs or {}
        dims = self.args_batch_dim
        if dims is not None and len(dims) != len(args):
            raise coded(
                ValueError,
                "HP130",
                f"micro_batch: args_batch_dim has {len(dims)} entries for {len(args)} positional arguments",
            )
        unknown = sorted(set(self.kwargs_batch_dim) - set(kwargs))
        if unknown:
            raise coded(
                ValueError,
                "HP130",
                f"micro_batch: kwargs_batch_dim names {unknown}, but the call has {sorted(kwargs)}",
            )
        split_args = [
            self._split(f"args[{i}]", arg, dims[i] if dims else None)
            for i, arg in enumerate(args)
        ]
        split_kwargs = {
            name: self._split(name, arg, self.kwargs_batch_dim.get(name))
            for name, arg in kwargs.items()
        }
        return (
            [[pieces[i] for pieces in split_args] for i in range(self.count)],
            [
                {name: pieces[i] for name, pieces in split_kwargs.items()}
                for i in range(self.count)
            ],
        )

    def _split(self, name: str, arg: Any, dim: Any) -> list[Any]:
        dim = getattr(dim, "batch_dim", dim)
        if dim == WHOLE or not self.platform.is_tensor(arg) or len(arg.shape) == 0:
            return [arg] * self.count
        dim = 0 if dim is None else dim
        rank = len(arg.shape)
        if not isinstance(dim, int) or not -rank <= dim < rank:
            raise coded(
                ValueError,
                "HP130",
                f"micro_batch: {name} has shape {tuple(arg.shape)}; its batch dim must be an int from {-rank} to "
                f"{rank - 1}, None or 'whole', got {dim!r}",
            )
        size = arg.shape[dim]
        if size % self.count:
            raise coded(
                ValueError,
                "HP130",
                f"micro_batch: {name} has {size} rows in its batch dim {dim}, which {self.count} does not divide "
                "evenly",
            )
        return [self.platform.chunk(arg, dim, self.count, i) for i in range(self.count)]
