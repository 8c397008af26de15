# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A001, A002, A006, PLW0108 - operands have the names that the rules give them
"""Operators that move elements: joins, splits, copies, rolls, frames."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor

from hyper_parallel.platform.mindspore.cpu.functions.shared import (
    dims_of,
    mint,
    ops,
    rows,
    shaped,
)


def _cat(input: Sequence[Any], dim: int = 0) -> Any:
    whole = [one for one in input if tuple(one.shape) != (0,)] or list(
        input[:1]
    )  # empty rows are no part of it
    return mint.cat(whole, dim)


def _split_with_sizes(input: Any, split_size: Sequence[int], dim: int = 0) -> Any:
    starts = itertools.accumulate(split_size, initial=0)
    return tuple(
        mint.narrow(input, dim, start, size)
        for start, size in zip(starts, split_size, strict=False)
    )


def _select(input: Any, dim: int, index: int) -> Any:
    return mint.squeeze(mint.narrow(input, dim, index % input.shape[dim], 1), dim)


def _tensor_split(input: Any, indices_or_sections: Any, dim: int = 0) -> Any:
    size = input.shape[dim]
    if isinstance(indices_or_sections, int):
        each, more = divmod(size, indices_or_sections)
        sizes = [each + 1] * more + [each] * (indices_or_sections - more)
    else:
        ends = [
            *(
                min(i if i >= 0 else max(i + size, 0), size)
                for i in indices_or_sections
            ),
            size,
        ]
        sizes = [max(end - start, 0) for start, end in itertools.pairwise([0, *ends])]
        starts = [0, *ends[:-1]]
        return tuple(
            mint.narrow(input, dim, start, n)
            for start, n in zip(starts, sizes, strict=True)
        )
    return _split_with_sizes(input, sizes, dim)


def _split_evenly(find: Callable[[int], int]) -> Callable[..., Any]:
    """tensor_split along a dim that depends on the number of dims, into equal parts or at places."""

    def run(input: Any, indices: Any) -> Any:
        dim = find(len(input.shape))
        if isinstance(indices, int) and (indices <= 0 or input.shape[dim] % indices):
            raise ValueError(
                f"a dim of size {input.shape[dim]} cannot be split into {indices} equal parts"
            )
        return _tensor_split(input, indices, dim)

    return run


def _cartesian_prod(*input: Any) -> Any:
    if len(input) == 1:
        return input[0]
    shape = tuple(len(one) for one in input)
    grids = (
        shaped(one, [-1 if d == i else 1 for d in range(len(shape))])
        for i, one in enumerate(input)
    )
    return ops.stack(
        [shaped(mint.broadcast_to(grid, shape), (-1,)) for grid in grids], 1
    )


def _unflatten(input: Any, dim: int, sizes: Sequence[int]) -> Any:
    shape = tuple(input.shape)
    dim %= len(shape)
    known = int(np.prod([size for size in sizes if size != -1]))
    full = [shape[dim] // max(known, 1) if size == -1 else size for size in sizes]
    return shaped(input, (*shape[:dim], *full, *shape[dim + 1 :]))


def _repeat(input: Any, *repeats: Any) -> Any:
    counts = (
        tuple(repeats[0])
        if len(repeats) == 1 and isinstance(repeats[0], (list, tuple))
        else repeats
    )
    wide = shaped(input, (*(1,) * (len(counts) - len(input.shape)), *input.shape))
    for dim, count in enumerate(counts):
        if count != 1:
            wide = rows(wide, np.tile(np.arange(wide.shape[dim]), count), dim)
    return wide


def _repeat_interleave(
    input: Any,
    repeats: Any = None,
    dim: int | None = None,
    *,
    output_size: int | None = None,
) -> Any:
    if repeats is None:  # the number of each of what is counted
        return Tensor(np.repeat(np.arange(len(input)), input.asnumpy()))
    if dim is None:
        input, dim = shaped(input, (-1,)), 0
    counts = repeats.asnumpy() if isinstance(repeats, Tensor) else repeats
    places = np.repeat(np.arange(input.shape[dim]), counts)
    if output_size is not None and output_size != len(places):
        raise ValueError(
            f"repeat_interleave: expected {len(places)} as output_size, got {output_size}"
        )
    return rows(input, places, dim)


def _roll(input: Any, shifts: Any, dims: Any = None) -> Any:
    if dims is None or dims == ():
        return shaped(_roll(shaped(input, (-1,)), shifts, 0), input.shape)
    pairs = zip(
        *((one,) if isinstance(one, int) else one for one in (shifts, dims)),
        strict=True,
    )
    for shift, dim in pairs:
        input = rows(input, np.roll(np.arange(input.shape[dim]), shift), dim)
    return input


def _flip(input: Any, *dims: Any) -> Any:
    named = dims[0] if len(dims) == 1 and isinstance(dims[0], (list, tuple)) else dims
    return mint.flip(input, dims_of(input, tuple(named)))


def _rot90(input: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    one, two = dims_of(input, tuple(dims))
    if k % 4 == 0:
        return input
    if k % 4 == 2:
        return mint.flip(input, (one, two))
    return mint.transpose(mint.flip(input, (two if k % 4 == 1 else one,)), one, two)


_BEYOND: dict[str, Any] = {
    "reflect": "reflect",
    "replicate": "edge",
    "circular": "wrap",
}


def pad(
    input: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Any:
    pairs = list(zip(pad[::2], pad[1::2], strict=True))
    for dim, (before, after) in zip(
        range(len(input.shape) - 1, -1, -1), pairs, strict=False
    ):
        if mode == "constant":
            input = _framed(input, dim, before, after, value or 0)
        elif before or after:
            places = np.pad(
                np.arange(input.shape[dim]),
                (max(before, 0), max(after, 0)),
                _BEYOND[mode],
            )
            end = len(places) + min(after, 0)
            input = rows(input, places[max(-before, 0) : end], dim)
    return input


def _padded(input: Any, sides: Sequence[int], value: Any) -> Any:
    return pad(input, sides, value=value)


def _broadcast_tensors(tensors: Sequence[Any]) -> Any:
    shape = np.broadcast_shapes(*(tuple(one.shape) for one in tensors))
    return tuple(mint.broadcast_to(one, shape) for one in tensors)


def _framed(input: Any, dim: int, before: int, after: int, value: Any) -> Any:
    if before < 0 or after < 0:
        start = max(-before, 0)
        input = mint.narrow(
            input, dim, start, input.shape[dim] + min(before, 0) + min(after, 0)
        )

    def margin(size: int) -> list[Any]:
        shape = [
            size if d == dim % len(input.shape) else n
            for d, n in enumerate(input.shape)
        ]
        return [ops.full(tuple(shape), value, dtype=input.dtype)] if size > 0 else []

    parts = [*margin(before), input, *margin(after)]
    return mint.cat(parts, dim) if len(parts) > 1 else input


def _diag(input: Any, diagonal: int = 0) -> Any:
    return (
        _diag_embed(input, diagonal)
        if len(input.shape) == 1
        else ops.diagonal(input, diagonal, 0, 1)
    )


def _diag_embed(input: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    size, ndim = input.shape[-1] + abs(offset), len(input.shape) + 1
    across = Tensor(np.eye(size, k=offset, dtype=bool))
    lines = _framed(input, -1, max(-offset, 0), max(offset, 0), 0) if offset else input
    found = mint.where(across, mint.unsqueeze(lines, -1), ops.zeros((), input.dtype))
    order = list(range(ndim - 2))
    for dim, at in sorted(((dim1 % ndim, ndim - 2), (dim2 % ndim, ndim - 1))):
        order.insert(dim, at)
    return mint.permute(found, tuple(order))


def _narrow(input: Any, dim: int, start: Any, length: int) -> Any:
    if length:
        return mint.narrow(input, dim, int(start), length)
    return input[(slice(None),) * (dim % len(input.shape)) + (slice(0, 0),)]


def unfold(input: Any, dimension: int, size: int, step: int) -> Any:
    """Windows along a dim, of which each is the last dim of the result."""
    if not input.shape:
        return shaped(input, (1,))
    starts = np.arange(0, input.shape[dimension] - size + 1, step)
    found = rows(input, (starts[:, None] + np.arange(size)).reshape(-1), dimension)
    dim = dimension % len(input.shape)
    apart = shaped(
        found, (*input.shape[:dim], len(starts), size, *input.shape[dim + 1 :])
    )
    others = [d for d in range(len(apart.shape)) if d != dim + 1]
    return mint.permute(apart, (*others, dim + 1))


def _channel_shuffle(input: Any, groups: int) -> Any:
    batch, channels, *others = input.shape
    grouped = shaped(input, (batch, groups, channels // groups, *others))
    return shaped(mint.transpose(grouped, 1, 2), input.shape)


def _shifted(input: Any, dim: Any, half: Callable[[int], int]) -> Any:
    dims = dims_of(input, dim)
    return (
        _roll(input, tuple(half(input.shape[d]) for d in dims), dims) if dims else input
    )


def _trace(input: Any) -> Any:
    return mint.sum(ops.diagonal(input, 0, 0, 1))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "cat": _cat,
    "narrow": _narrow,
    "stack": lambda input, dim=0: ops.stack(input, dim),
    "split_with_sizes": _split_with_sizes,
    "unbind": lambda input, dim=0: tuple(
        _select(input, dim, i) for i in range(input.shape[dim])
    ),
    "select": _select,
    "tensor_split": _tensor_split,
    "hsplit": _split_evenly(lambda ndim: min(1, ndim - 1)),
    "vsplit": _split_evenly(lambda _: 0),
    "dsplit": _split_evenly(lambda _: 2),
    "cartesian_prod": _cartesian_prod,
    "unflatten": _unflatten,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "roll": _roll,
    "flip": _flip,
    "rot90": _rot90,
    "pad": pad,
    "transpose": lambda input, dim0, dim1: mint.transpose(input, dim0, dim1),
    "linalg_diagonal": lambda input, *, offset=0, dim1=-2, dim2=-1: ops.diagonal(
        input, offset, dim1, dim2
    ),
    "diag": _diag,
    "diag_embed": _diag_embed,
    "trace": _trace,
    "tril": ops.tril,
    "unfold": unfold,
    "channel_shuffle": _channel_shuffle,
    "native_channel_shuffle": _channel_shuffle,
    "fft_fftshift": lambda input, dim=None: _shifted(
        input, dim, lambda size: size // 2
    ),
    "fft_ifftshift": lambda input, dim=None: _shifted(
        input, dim, lambda size: -(size // 2)
    ),
    "broadcast_tensors": lambda *tensors: _broadcast_tensors(tensors),
    "constant_pad_nd": lambda input, pad, value=0: _padded(input, pad, value),
    "expand": lambda input, *size: input.expand(*size),
    "broadcast_to": lambda input, size: mint.broadcast_to(input, size),
}
