# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A001, A002 - operands have the names that the rules give them
"""Convolutions, pools, other sizes and patches.

What is linear along each dim by itself (an average, another size) is a product with a small matrix for each; all others
gather the elements of every window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor

from hyper_parallel.platform.mindspore.cpu import randomness
from hyper_parallel.platform.mindspore.cpu.functions.moves import pad
from hyper_parallel.platform.mindspore.cpu.functions.shared import (
    Array,
    along,
    as_many,
    matmul,
    mint,
    numbers,
    ops,
    rows,
    shaped,
)


def _places(out: int, kernel: int, stride: int, dilation: int) -> Array:
    """For every window of a dim, the places of its elements."""
    return np.arange(out)[:, None] * stride + np.arange(kernel) * dilation


def _patches(input: Any, places: Sequence[Array]) -> Any:
    """The windows of the last dims: (..., windows of each, elements of each)."""
    count, free = len(places), len(input.shape) - len(places)
    for dim, table in reversed(list(enumerate(places, free))):
        input = rows(input, table, dim)
    order = [
        *range(free),
        *range(free, free + 2 * count, 2),
        *range(free + 1, free + 2 * count, 2),
    ]
    return mint.permute(input, tuple(order))


# --- convolutions


def _convolution(count: int) -> Callable[..., Any]:
    def run(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        stride, padding, dilation = (
            as_many(v, count) for v in (stride, padding, dilation)
        )
        return _convolved(input, weight, bias, stride, padding, dilation, groups)

    return run


def _convolved(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> Any:
    sizes = weight.shape[2:]
    reach = [d * (k - 1) for d, k in zip(dilation, sizes, strict=True)]
    if padding[0] == "same":
        margins = [(total // 2, total - total // 2) for total in reach]
    else:
        margins = [(0, 0) if p == "valid" else (p, p) for p in padding]
    input = pad(input, [side for pair in margins[::-1] for side in pair])
    is_one = len(input.shape) == len(sizes) + 1
    batch = mint.unsqueeze(input, 0) if is_one else input
    outs = [
        (n - r - 1) // s + 1
        for n, r, s in zip(batch.shape[2:], reach, stride, strict=True)
    ]
    patches = _patches(batch, list(map(_places, outs, sizes, stride, dilation)))
    number, inside, taps = batch.shape[0], batch.shape[1] // groups, math.prod(sizes)
    columns = shaped(patches, (number, groups, inside, math.prod(outs), taps))
    columns = shaped(
        mint.permute(columns, (0, 1, 2, 4, 3)),
        (number, groups, inside * taps, math.prod(outs)),
    )
    found = matmul(
        shaped(weight, (groups, weight.shape[0] // groups, inside * taps)), columns
    )
    found = shaped(found, (number, weight.shape[0], *outs))
    found = found if bias is None else found + shaped(bias, (-1, *(1,) * len(sizes)))
    return mint.squeeze(found, 0) if is_one else found


def _transposed(count: int) -> Callable[..., Any]:
    def run(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        """The convolution of the input, its elements ``stride`` apart, with the weight turned round."""
        stride, padding, more, dilation = (
            as_many(v, count) for v in (stride, padding, output_padding, dilation)
        )
        for i, (s, p, o, d, k) in enumerate(
            zip(stride, padding, more, dilation, weight.shape[2:], strict=True)
        ):
            size, margin = input.shape[i - count], d * (k - 1) - p
            apart = (
                np.arange((size - 1) * s + 1 + 2 * margin + o)[:, None]
                == np.arange(size) * s + margin
            )
            input = along(input, i - count, apart)
        inside, outside = weight.shape[0] // groups, weight.shape[1]
        turned = mint.flip(weight, tuple(range(2, 2 + count)))
        turned = mint.transpose(
            shaped(turned, (groups, inside, *weight.shape[1:])), 1, 2
        )
        turned = shaped(turned, (groups * outside, inside, *weight.shape[2:]))
        return _convolved(
            input, turned, bias, (1,) * count, (0,) * count, dilation, groups
        )

    return run


def _either(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    count = len(weight.shape) - 2
    if transposed:
        return _transposed(count)(
            input, weight, bias, stride, padding, output_padding, groups, dilation
        )
    return _convolution(count)(input, weight, bias, stride, padding, dilation, groups)


def _over_time(input: Any, weight: Any, bias: Any, pad: int = 0) -> Any:
    found = _convolution(1)(
        mint.permute(input, (1, 2, 0)), mint.permute(weight, (2, 1, 0)), bias, 1, pad
    )
    return mint.permute(found, (2, 0, 1))


# --- pools


def _count(
    size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool
) -> int:
    """The number of windows; none begins beyond the elements and the margin before them."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (-(-room // stride) if ceil_mode else room // stride) + 1
    return count - (ceil_mode and (count - 1) * stride >= size + padding)


def _means(
    size: int,
    kernel: int,
    stride: int,
    padding: int,
    ceil_mode: bool,
    with_margin: bool,
    divisor: int | None,
) -> Array:
    """The matrix of the means of a dim's windows."""
    starts = (
        np.arange(_count(size, kernel, stride, padding, 1, ceil_mode)) * stride
        - padding
    )
    ends = np.minimum(starts + kernel, size + padding)
    inside = (np.arange(size) >= starts[:, None]) & (np.arange(size) < ends[:, None])
    counted = ends - starts if with_margin else inside.sum(1)
    return inside / (counted[:, None] if divisor is None else divisor)


def _avg_pool(count: int) -> Callable[..., Any]:
    def run(
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        kernel, margins = as_many(kernel_size, count), as_many(padding, count)
        strides = as_many(stride, count) if stride not in (None, (), []) else kernel
        for i, (k, s, p) in enumerate(zip(kernel, strides, margins, strict=True)):
            divisor = (
                None if divisor_override is None else divisor_override if i == 0 else 1
            )
            matrix = _means(
                input.shape[i - count], k, s, p, ceil_mode, count_include_pad, divisor
            )
            input = along(input, i - count, matrix)
        return input

    return run


def _shares(size: int, out: int) -> tuple[Array, Array]:
    """Where the windows of an adaptive pool begin and end."""
    steps = np.arange(out)
    return steps * size // out, -(-(steps + 1) * size // out)


def _share_means(size: int, out: int) -> Array:
    starts, ends = _shares(size, out)
    inside = (np.arange(size) >= starts[:, None]) & (np.arange(size) < ends[:, None])
    return inside / (ends - starts)[:, None]


def _adaptive(count: int, input: Any, output_size: Any) -> list[int]:
    wanted = as_many(output_size, count)
    return [
        size if out is None else out
        for size, out in zip(input.shape[-count:], wanted, strict=True)
    ]


def _adaptive_avg_pool(count: int) -> Callable[..., Any]:
    def run(input: Any, output_size: Any) -> Any:
        for i, out in enumerate(_adaptive(count, input, output_size)):
            input = along(input, i - count, _share_means(input.shape[i - count], out))
        return input

    return run


def _largest(
    input: Any, places: Sequence[Array], sizes: Sequence[int], margins: Sequence[int]
) -> Any:
    """The largest of every window, and its place among all elements; ``places`` are those with the margins."""
    count = len(places)
    outs, taps = (
        [table.shape[0] for table in places],
        math.prod(table.shape[1] for table in places),
    )
    patches = _patches(input, places)
    free = patches.shape[: len(patches.shape) - 2 * count]
    values, which = mint.max(shaped(patches, (*free, *outs, taps)), dim=-1)
    number: Any = 0
    for i, (table, size, margin) in enumerate(zip(places, sizes, margins, strict=True)):
        shape = [1] * (2 * count)
        shape[i], shape[count + i] = table.shape
        number = number * size + (table - margin).reshape(shape)
    all_places = Tensor(
        np.ascontiguousarray(
            np.broadcast_to(number, (*outs, *number.shape[count:]))
        ).reshape(-1, taps)
    )
    flat = shaped(which, (*free, math.prod(outs)))
    at = Tensor(np.arange(math.prod(outs)) * taps) + flat.astype(mindspore.int64)
    found = ops.gather(shaped(all_places, (-1,)), shaped(at, (-1,)), 0)
    return values, shaped(found, values.shape)


def _max_pool(count: int, with_indices: bool = False) -> Callable[..., Any]:
    def run(
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = with_indices,
    ) -> Any:
        kernel, margins, spaces = (
            as_many(v, count) for v in (kernel_size, padding, dilation)
        )
        strides = as_many(stride, count) if stride not in (None, (), []) else kernel
        sizes = tuple(input.shape[-count:])
        outs = [
            _count(*each, ceil_mode)
            for each in zip(sizes, kernel, strides, margins, spaces, strict=True)
        ]
        places = list(map(_places, outs, kernel, strides, spaces))
        frame = [
            (p, max(int(t.max()) + 1 - p - n, 0))
            for n, p, t in zip(sizes, margins, places, strict=True)
        ]
        wide = pad(
            input,
            [side for sides in frame[::-1] for side in sides],
            value=float("-inf"),
        )
        values, indices = _largest(wide, places, sizes, margins)
        return (values, indices) if return_indices else values

    return run


def _adaptive_max_pool(count: int, with_indices: bool = False) -> Callable[..., Any]:
    def run(input: Any, output_size: Any, return_indices: bool = with_indices) -> Any:
        sizes, places = tuple(input.shape[-count:]), []
        for size, out in zip(sizes, _adaptive(count, input, output_size), strict=True):
            starts, ends = _shares(size, out)
            widest = int((ends - starts).max())
            places.append(
                np.minimum(starts[:, None] + np.arange(widest), ends[:, None] - 1)
            )  # the last again
        values, indices = _largest(input, places, sizes, (0,) * count)
        return (values, indices) if return_indices else values

    return run


def _fractional_max_pool(count: int, with_indices: bool = False) -> Callable[..., Any]:
    """``_random_samples`` say for every channel of every image where its windows are; drawn if not given."""

    def run(
        input: Any,
        kernel_size: Any,
        output_size: Any = None,
        output_ratio: Any = None,
        return_indices: bool = with_indices,
        _random_samples: Any = None,
    ) -> Any:
        kernel, sizes, free = (
            as_many(kernel_size, count),
            tuple(input.shape[-count:]),
            tuple(input.shape[:-count]),
        )
        if output_size is None:
            output_size = [
                int(n * ratio)
                for n, ratio in zip(sizes, as_many(output_ratio, count), strict=True)
            ]
        outs = as_many(output_size, count)
        images = (*(1,) * (2 - len(free)), *free)
        if input.is_meta:
            samples = np.zeros((*images, count))
        elif _random_samples is None:
            samples = numbers(
                input, randomness.draw().random((*images, count))
            ).asnumpy()
        else:
            samples = _random_samples.asnumpy()
        samples = (
            samples[..., ::-1] if count == 2 else samples
        )  # of two dims the last one comes first
        places = np.zeros((), np.int64)
        for i, (size, out, taps) in enumerate(zip(sizes, outs, kernel, strict=True)):
            shape = [1] * (2 * count)
            shape[i], shape[count + i] = out, taps
            starts = _fractional_starts(samples[..., i], size, out, taps)
            places = places * size + (starts[..., None] + np.arange(taps)).reshape(
                (*images, *shape)
            )
        table = Tensor(places.reshape(*free, math.prod(outs) * math.prod(kernel)))
        every = (*free, *outs, math.prod(kernel))
        flat = shaped(input, (*free, math.prod(sizes)))
        values, which = mint.max(shaped(mint.gather(flat, -1, table), every), dim=-1)
        if not return_indices:
            return values
        chosen = mint.unsqueeze(which.astype(mindspore.int64), -1)
        return values, mint.squeeze(mint.gather(shaped(table, every), -1, chosen), -1)

    return run


def _fractional_starts(samples: Array, size: int, out: int, taps: int) -> Array:
    """Where the windows of a dim begin: about as far from each other as they must be to reach the end."""
    step = (size - taps) / max(out - 1, 1)
    before = np.trunc((np.arange(out - 1) + samples[..., None]) * step) - np.trunc(
        samples[..., None] * step
    )
    return np.concatenate(
        [before, np.full((*samples.shape, 1), size - taps)], -1
    ).astype(np.int64)


def _lp_pool(count: int) -> Callable[..., Any]:
    def run(
        input: Any,
        norm_type: float,
        kernel_size: Any,
        stride: Any = None,
        ceil_mode: bool = False,
    ) -> Any:
        powers = mint.pow(input, numbers(input, norm_type))
        means = _avg_pool(count)(powers, kernel_size, stride, 0, ceil_mode)
        sums = means * numbers(means, math.prod(as_many(kernel_size, count)))
        return mint.pow(mint.sign(sums) * mint.abs(sums), numbers(sums, 1 / norm_type))

    return run


def _max_unpool(count: int) -> Callable[..., Any]:
    def run(
        input: Any,
        indices: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        output_size: Any = None,
    ) -> Any:
        kernel, margins = as_many(kernel_size, count), as_many(padding, count)
        strides = as_many(stride, count) if stride not in (None, (), []) else kernel
        sizes = input.shape[-count:]
        usual = [
            (n - 1) * s - 2 * p + k
            for n, s, p, k in zip(sizes, strides, margins, kernel, strict=True)
        ]
        outs = usual if output_size is None else list(output_size)[-count:]
        free = tuple(input.shape[:-count])
        nothing = ops.zeros((*free, math.prod(outs)), input.dtype)
        put = (shaped(x, (*free, math.prod(sizes))) for x in (indices, input))
        return shaped(
            ops.tensor_scatter_elements(nothing, *put, len(free)), (*free, *outs)
        )

    return run


# --- other sizes


def _interpolate(
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    count = len(input.shape) - 2
    if (size is None) == (scale_factor is None):
        raise ValueError(
            f"interpolate: expected one of size and scale_factor, got {size} and {scale_factor}"
        )
    sizes = tuple(input.shape[2:])
    if size is None:
        factors = [float(factor) for factor in as_many(scale_factor, count)]
        outs = [
            math.floor(n * factor) for n, factor in zip(sizes, factors, strict=True)
        ]
    else:
        outs, factors = list(as_many(size, count)), []
    for i, (n, out) in enumerate(zip(sizes, outs, strict=True)):
        is_told = bool(factors) and not recompute_scale_factor
        ratio = 1 / factors[i] if is_told else n / out
        input = along(
            input,
            i - count,
            _resizing(mode, n, out, ratio, bool(align_corners), antialias),
        )
    return input


def _resizing(
    mode: str, size: int, out: int, ratio: float, align_corners: bool, antialias: bool
) -> Array:
    """The matrix that gives a dim another size; ``ratio``: the distance of the results in the input."""
    steps = np.arange(out)
    if mode == "area":
        return _share_means(size, out)
    if mode.startswith("nearest"):
        shift = np.float32(0.5 if mode == "nearest-exact" else 0)
        at = np.minimum(
            np.floor((steps.astype(np.float32) + shift) * np.float32(ratio)).astype(
                int
            ),
            size - 1,
        )
        return (np.arange(size) == at[:, None]).astype(float)
    if align_corners:
        ratio = (size - 1) / (out - 1) if out > 1 else 0.0
    is_cubic = mode == "bicubic"
    if antialias:
        return _smoothing(size, out, ratio, is_cubic)
    at = steps * ratio if align_corners else (steps + 0.5) * ratio - 0.5
    at = at if is_cubic else np.maximum(at, 0)
    first = np.floor(at).astype(int)
    matrix = np.zeros((out, size))
    for tap in range(-1, 3) if is_cubic else range(2):
        weight = (_cubic if is_cubic else _tent)(at - first - tap)
        np.add.at(matrix, (steps, np.clip(first + tap, 0, size - 1)), weight)
    return matrix


def _smoothing(size: int, out: int, ratio: float, is_cubic: bool) -> Array:
    wide = max(ratio, 1.0)
    reach = (2 if is_cubic else 1) * wide
    matrix = np.zeros((out, size))
    for step in range(out):
        center = ratio * (step + 0.5)
        start, end = (
            max(int(center - reach + 0.5), 0),
            min(int(center + reach + 0.5), size),
        )
        distances = (np.arange(start, end) - center + 0.5) / wide
        weights = _cubic(distances, -0.5) if is_cubic else _tent(distances)
        matrix[step, start:end] = weights / weights.sum()
    return matrix


def _tent(distance: Array) -> Array:
    return np.maximum(1 - np.abs(distance), 0)


def _cubic(distance: Array, a: float = -0.75) -> Array:
    x = np.abs(distance)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0))


# --- patches and channels


def _im2col(
    input: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> Any:
    kernel, spaces, margins, strides = (
        as_many(v, 2) for v in (kernel_size, dilation, padding, stride)
    )
    sizes = input.shape[-2:]
    outs = [
        _count(*each, False)
        for each in zip(sizes, kernel, strides, margins, spaces, strict=True)
    ]
    wide = pad(input, [margins[1], margins[1], margins[0], margins[0]])
    patches = _patches(wide, list(map(_places, outs, kernel, strides, spaces)))
    free = len(input.shape) - 2
    taps_first = mint.permute(
        patches, (*range(free), free + 2, free + 3, free, free + 1)
    )
    return shaped(
        taps_first,
        (*input.shape[:-3], input.shape[-3] * math.prod(kernel), math.prod(outs)),
    )


def _col2im(
    input: Any,
    output_size: Any,
    kernel_size: Any,
    dilation: Any = 1,
    padding: Any = 0,
    stride: Any = 1,
) -> Any:
    sizes, kernel, spaces, margins, strides = (
        as_many(v, 2) for v in (output_size, kernel_size, dilation, padding, stride)
    )
    outs = [
        _count(*each, False)
        for each in zip(sizes, kernel, strides, margins, spaces, strict=True)
    ]
    free = tuple(input.shape[:-2])
    split = shaped(input, (*free, input.shape[-2] // math.prod(kernel), *kernel, *outs))
    n = len(free) + 1
    paired = mint.permute(split, (*range(n), n, n + 2, n + 1, n + 3))
    found = shaped(paired, (*split.shape[:n], kernel[0] * outs[0], kernel[1] * outs[1]))
    for i, (size, k, o, s, p, d) in enumerate(
        zip(sizes, kernel, outs, strides, margins, spaces, strict=True)
    ):
        places = _places(o, k, s, d).T.reshape(-1) - p
        found = along(found, i - 2, np.arange(size)[:, None] == places)
    return found


def _pixel_shuffle(input: Any, upscale_factor: int) -> Any:
    *free, channels, high, wide = input.shape
    r, n = upscale_factor, len(free)
    split = shaped(input, (*free, channels // r**2, r, r, high, wide))
    mixed = mint.permute(split, (*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return shaped(mixed, (*free, channels // r**2, high * r, wide * r))


def _pixel_unshuffle(input: Any, downscale_factor: int) -> Any:
    *free, channels, high, wide = input.shape
    r, n = downscale_factor, len(free)
    split = shaped(input, (*free, channels, high // r, r, wide // r, r))
    mixed = mint.permute(split, (*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return shaped(mixed, (*free, channels * r**2, high // r, wide // r))


def _affine_grid(
    theta: Any, size: Sequence[int], align_corners: bool | None = None
) -> Any:
    *spatial, _ = sizes = [*size[2:], 1]
    axes = []
    for n in spatial:
        steps = np.linspace(-1, 1, n) if n > 1 else np.zeros(1)
        axes.append(steps if align_corners else steps * (n - 1) / n)
    points = np.meshgrid(*axes, indexing="ij")[::-1]  # x comes first
    base = np.stack([*points, np.ones(sizes[:-1])], -1).reshape(-1, len(sizes))
    found = matmul(numbers(theta, base), mint.transpose(theta, -1, -2))
    return shaped(found, (theta.shape[0], *spatial, len(spatial)))


def _unfold(input: Any, dimension: int, size: int, step: int) -> Any:
    if not input.shape:
        return mint.broadcast_to(input, (size,))
    dim = dimension % len(input.shape)
    found = rows(
        input, _places((input.shape[dim] - size) // step + 1, size, step, 1), dim
    )
    return mint.permute(
        found, (*(d for d in range(len(found.shape)) if d != dim + 1), dim + 1)
    )


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "convolution": _either,
    "conv_tbc": _over_time,
    "interpolate": _interpolate,
    "im2col": _im2col,
    "col2im": _col2im,
    "unfold": _unfold,
    "pixel_shuffle": _pixel_shuffle,
    "pixel_unshuffle": _pixel_unshuffle,
    "affine_grid": _affine_grid,
}
for _n in (1, 2, 3):
    FUNCTIONS[f"conv{_n}d"] = _convolution(_n)
    FUNCTIONS[f"conv_transpose{_n}d"] = _transposed(_n)
    FUNCTIONS[f"avg_pool{_n}d"] = _avg_pool(_n)
    FUNCTIONS[f"adaptive_avg_pool{_n}d"] = _adaptive_avg_pool(_n)
    FUNCTIONS[f"max_pool{_n}d"] = _max_pool(_n)
    FUNCTIONS[f"max_pool{_n}d_with_indices"] = _max_pool(_n, with_indices=True)
    FUNCTIONS[f"adaptive_max_pool{_n}d"] = _adaptive_max_pool(_n)
    FUNCTIONS[f"adaptive_max_pool{_n}d_with_indices"] = _adaptive_max_pool(
        _n, with_indices=True
    )
    FUNCTIONS[f"fractional_max_pool{_n}d"] = _fractional_max_pool(_n)
    FUNCTIONS[f"fractional_max_pool{_n}d_with_indices"] = _fractional_max_pool(
        _n, with_indices=True
    )
    FUNCTIONS[f"lp_pool{_n}d"] = _lp_pool(_n)
    FUNCTIONS[f"max_unpool{_n}d"] = _max_unpool(_n)
