# SPDX-License-Identifier: Apache-2.0
"""Divides what a step is given into micro batches, and joins what they return.

divide = Divider(4)
args, kwargs = divide((x,), {"mask": mask}, None, {"mask": 0})      args[i], kwargs[i]
join(outputs, 0)                                                    one tensor again
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.core.pipeline_parallel.utils import WHOLE, find_batch_dim
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.error_codes import coded

platform = get_platform()


class Divider:
    """Divides arguments into ``count`` micro batches; pieces of other sizes only if ``allows_uneven``."""

    def __init__(self, count: int, *, allows_uneven: bool = False) -> None:
        self._count, self._allows_uneven = count, allows_uneven

    def __call__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        args_dims: Sequence[Any] | None = None,
        kwargs_dims: Mapping[str, Any] | None = None,
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """The positional and keyword arguments of every micro batch."""
        if args_dims is not None and len(args_dims) != len(args):
            raise coded(
                ValueError,
                "HP480",
                f"pipeline: args_batch_dim has {len(args_dims)} entries for {len(args)} positional arguments",
            )
        dims = [0] * len(args) if args_dims is None else list(args_dims)
        pieces = [
            self.divide(value, dim, f"argument {position}")
            for position, (value, dim) in enumerate(zip(args, dims, strict=True))
        ]
        named = {
            name: self.divide(value, (kwargs_dims or {}).get(name), name)
            for name, value in kwargs.items()
        }
        micros = range(self._count)
        return (
            [tuple(piece[micro] for piece in pieces) for micro in micros],
            [{name: piece[micro] for name, piece in named.items()} for micro in micros],
        )

    def divide(self, value: Any, spec: Any, name: str) -> list[Any]:
        """The pieces of a value, which may be a container of tensors; what is no tensor goes to all."""
        dim = find_batch_dim(spec)
        if dim == WHOLE:
            return [value] * self._count
        pieces: list[list[Any]] = [[] for _ in range(self._count)]

        def cut(tensor: Any) -> Any:
            for piece, part in zip(pieces, self._cut(tensor, dim, name), strict=True):
                piece.append(part)
            return tensor

        platform.apply_to_tensors(cut, value)
        if not pieces[0]:
            return [value] * self._count
        return [_refill(value, piece) for piece in pieces]

    def _cut(self, tensor: Any, dim: int, name: str) -> list[Any]:
        shape = tuple(int(size) for size in tensor.shape)
        if not shape:
            return [tensor] * self._count
        if not -len(shape) <= dim < len(shape):
            raise coded(
                ValueError,
                "HP480",
                f"pipeline: {name} of shape {list(shape)} has no dim {dim} to divide",
            )
        size = shape[dim]
        step = -(-size // self._count)
        has_pieces = size > step * (self._count - 1)
        if size % self._count == 0 or (self._allows_uneven and has_pieces):
            pieces: list[Any] = platform.chunks(tensor, dim, self._count)
            return pieces
        raise coded(
            ValueError,
            "HP480",
            f"pipeline: {name} has size {size} at batch dim {dim}, which {self._count} micro batches do not divide; "
            "pass a batch that they divide, or dyn_shape=True to stages, which allows the pieces of torch.chunk",
        )


def _refill(tree: Any, tensors: Sequence[Any]) -> Any:
    """The same structure with other tensors."""
    if platform.is_tensor(tree):
        return tensors[0]
    following = iter(tensors)
    return platform.apply_to_tensors(lambda _: next(following), tree)


def join(outputs: Sequence[Any], spec: Any) -> Any:
    """The outputs of all micro batches as one structure; tensors without dims are averaged.

    ``spec``: a dim in any form, a function of the list, torch's reducer, or a tuple or dict of them like the outputs.
    """
    if isinstance(spec, (tuple, list)):
        columns = zip(*outputs, strict=True)
        pairs = zip(columns, spec, strict=True)
        return type(outputs[0])(join(column, one) for column, one in pairs)
    if isinstance(spec, Mapping):
        return {
            name: join([output[name] for output in outputs], spec.get(name))
            for name in outputs[0]
        }
    if hasattr(spec, "reduce_fn"):  # torch's, which begins with a value
        return functools.reduce(spec.reduce_fn, outputs, spec.init_value)
    if callable(spec):
        return spec(list(outputs))
    return _join_at(outputs, find_batch_dim(spec))


def _join_at(outputs: Sequence[Any], dim: int) -> Any:
    if dim == WHOLE:
        return list(outputs)
    columns = zip(*(tensors_of(output) for output in outputs), strict=True)
    joined = [
        platform.cat(column, dim) if len(column[0].shape) else _average(column)
        for column in columns
    ]
    return _refill(outputs[0], joined)


def _average(numbers: Sequence[Any]) -> Any:
    total = numbers[0]
    for number in numbers[1:]:
        total = total + number
    return total / len(numbers)


def tensors_of(tree: Any) -> list[Any]:
    """All tensors of nested containers."""
    if platform.is_tensor(tree):
        return [tree]
    if type(tree) in (tuple, list) and all(map(platform.is_tensor, tree)):
        return list(tree)
    tensors: list[Any] = []

    def note(tensor: Any) -> Any:
        tensors.append(tensor)
        return tensor

    platform.apply_to_tensors(note, tree)
    return tensors
