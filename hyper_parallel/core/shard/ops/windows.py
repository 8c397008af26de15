# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: A002 - operands have the names that torch gives them
"""Images seen through windows: pools, other sizes, patches, samples at a grid. What a window moves along is whole.

avg_pool2d    "n c h! w! -> n c y! x!"               grid_sample     "n c h! w!, n y x two! -> n c y x"
im2col        "n c h! w! -> n (c k!) l!"             pixel_shuffle   "... (c i! j!) h w -> ... c (h i!) (w j!)"

The framework itself is asked how large the results are, and it is given something where a rank has nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.random import as_one_device
from hyper_parallel.core.shard.arguments import replicated, tensors_in
from hyper_parallel.core.shard.ops.operator import RuleForCall, operator
from hyper_parallel.core.shard.ops.views import ints
from hyper_parallel.core.shard.rule import Rule, move
from hyper_parallel.core.shard.shard_context import ShardContext
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import REDUCE_OPS

platform = get_platform()
call = platform.operator

SUMS = ("sum", "avg")  # the reductions that pass an operator that is linear
NONE = ()


# --- what many operators of the framework need


def shapes_of(name: str, arguments: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """The shapes of an operator's results: those that it has for tensors without numbers."""

    def hollow(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        return platform.empty(
            tuple(value.shape), dtype=value.dtype, device=platform.meta_device
        )

    with platform.no_grad():
        found = call(name)(**platform.tree_map(hollow, dict(arguments)))
    return [
        tuple(one.shape)
        for one in (found if isinstance(found, (list, tuple)) else [found])
    ]


def some(tensor: Any, least: int = 1) -> Any:
    """The tensor, with ``least`` zeros along the dims of which there is nothing; in its graph."""
    for dim, size in enumerate(tensor.shape):
        if size == 0:
            shape = [least if i == dim else n for i, n in enumerate(tensor.shape)]
            tensor = call("expand")(
                call("sum")(tensor, dim, keepdim=True).to(tensor.dtype), shape
            )
    return tensor


def piece(here: ShardContext, found: Any) -> Any:
    """What of these results is this rank's, where more were computed."""
    if platform.is_tensor(found):
        return call("getitem")(found, tuple(map(slice, here.shape())))
    return type(found)(
        [
            call("getitem")(one, tuple(map(slice, here.shape(i))))
            for i, one in enumerate(found)
        ]
    )


def of_some(here: ShardContext, least: int = 1, **arguments: Any) -> Any:
    """The operator on a shard; many do not take an empty one, so they get zeros, and nothing of the result is kept."""
    if all(
        0 not in value.shape
        for value in arguments.values()
        if platform.is_tensor(value)
    ):
        return here.function(**arguments)
    given = {
        name: some(value, least) if platform.is_tensor(value) else value
        for name, value in arguments.items()
    }
    return piece(here, here.function(**given))


def changed(
    shape: Sequence[int], dims: Sequence[int]
) -> tuple[str, str, dict[str, int]]:
    """A tensor before and after an operator that changes these dims; ``shape``: that after it."""
    before = " ".join(f"d{i}{'!' if i in dims else ''}" for i in range(len(shape)))
    after = " ".join(f"o{i}!" if i in dims else f"d{i}" for i in range(len(shape)))
    return before, after, {f"o{i}": shape[i] for i in dims}


def windowed(
    name: str, along: int | None, carries: Sequence[str] = NONE, operands: str = "input"
) -> Callable[..., Any]:
    """The rule of an operator that changes the last dims, so many of them or all after the first two.

    ``carries``: the reductions that may wait until after it. ``operands``: tensors of one shape.
    """
    tensors = operands.split()

    def rule(**arguments: Any) -> RuleForCall:
        shapes = shapes_of(name, arguments)
        ndim = len(shapes[0])
        before, after, sizes = changed(
            shapes[0], range(2 if along is None else ndim - along, ndim)
        )
        text = f"{', '.join([before] * len(tensors))} -> {', '.join([after] * len(shapes))}"
        made = Rule(
            text,
            linear=((0,),) if carries else (),
            carries=tuple(carries),
            broadcast="none",
        )
        return RuleForCall(made, sizes, [arguments[tensor] for tensor in tensors])

    return rule


class Exact(float):
    """A number that decides about shapes, so that a plan is for this one only."""


def inexact(value: Any) -> bool:
    """Whether a plan would not remember which numbers these are."""
    return any(
        type(one) is float
        for one in (value if isinstance(value, (list, tuple)) else [value])
    )


def exact(value: Any) -> Any:
    """Numbers that a plan remembers."""
    if isinstance(value, (list, tuple)):
        return tuple(map(exact, value))
    return Exact(value) if type(value) is float else value


# --- pools

POOL = "input, kernel_size, stride=(), padding=0"
POOLS = [  # for one, two and three dims: the name, the parameters, which reductions pass
    ("avg_pool{}d", f"{POOL}, ceil_mode=False, count_include_pad=True", SUMS),
    ("adaptive_avg_pool{}d", "input, output_size", SUMS),
    ("adaptive_max_pool{}d", "input, output_size, return_indices=False", NONE),
    (
        "adaptive_max_pool{}d_with_indices",
        "input, output_size, return_indices=True",
        NONE,
    ),
    ("max_pool{}d", f"{POOL}, dilation=1, ceil_mode=False, return_indices=False", NONE),
    (
        "max_pool{}d_with_indices",
        f"{POOL}, dilation=1, ceil_mode=False, return_indices=True",
        NONE,
    ),
    ("lp_pool{}d", "input, norm_type, kernel_size, stride=None, ceil_mode=False", NONE),
]
for _count in (1, 2, 3):
    for _pattern, _parameters, _carries in POOLS:
        _name = _pattern.format(_count)
        if _pattern == "avg_pool{}d" and _count > 1:
            _parameters += ", divisor_override=None"
        operator(_name, _parameters, windowed(_name, _count, _carries), local=of_some)
    operator(
        _name := f"max_unpool{_count}d",
        "input, indices, kernel_size, stride=None, padding=0, output_size=None",
        windowed(_name, _count, SUMS, operands="input indices"),
        local=of_some,
    )


def _fractional(name: str, along: int) -> Callable[..., Any]:
    """Where the windows are is random: drawn as on one device, for every channel of every image."""

    def rule(input: Any, output_ratio: Any, _random_samples: Any, **more: Any) -> Any:
        if _random_samples is None or inexact(output_ratio):
            return handler
        given = {
            "input": input,
            "output_ratio": output_ratio,
            "_random_samples": _random_samples,
        }
        shapes = shapes_of(name, {**given, **more})
        free = len(input.shape) - along
        before, after, sizes = changed(shapes[0], range(free, free + along))
        channels = " ".join(["n!"] * (2 - free) + before.split()[:free])
        text = f"{before}, {channels} at! -> {', '.join([after] * len(shapes))}"
        return RuleForCall(
            Rule(text, broadcast="none"), sizes, [input, _random_samples]
        )

    def handler(
        input: Any, output_ratio: Any, _random_samples: Any, **more: Any
    ) -> Any:
        if _random_samples is None:
            free = len(input.shape) - along
            images = [1] * (2 - free) + list(input.shape[:free])
            how = {"dtype": input.dtype, "device": input.device}
            drawn = as_one_device(
                input.device_mesh, lambda: platform.rand((*images, along), **how)
            )
            _random_samples = replicated(drawn, input)
        return call(name)(
            input,
            output_ratio=exact(output_ratio),
            _random_samples=_random_samples,
            **more,
        )

    return rule


for _count in (2, 3):
    for _returns, _name in enumerate(
        (f"fractional_max_pool{_count}d", f"fractional_max_pool{_count}d_with_indices")
    ):
        _parameters = "input, kernel_size, output_size=None, output_ratio=None, return_indices={}, _random_samples=None"
        operator(
            _name,
            _parameters.format(bool(_returns)),
            _fractional(_name, _count),
            local=of_some,
        )

# --- other sizes


def _interpolate(mode: str, size: Any, scale_factor: Any, **more: Any) -> Any:
    if next(tensors_in(size), None) is not None:
        return _interpolate_to_numbers
    if inexact(scale_factor):
        return _interpolate_exactly
    carries = REDUCE_OPS if mode.startswith("nearest") else SUMS
    return windowed("interpolate", None, carries)(
        mode=mode, size=size, scale_factor=scale_factor, **more
    )


def _interpolate_to_numbers(size: Any, **more: Any) -> Any:
    """With sizes that are read from tensors."""
    numbers = platform.tree_map(int, size)
    return call("interpolate")(size=numbers, **more)


def _interpolate_exactly(scale_factor: Any, **more: Any) -> Any:
    return call("interpolate")(scale_factor=exact(scale_factor), **more)


operator(
    "interpolate",
    "input, size=None, scale_factor=None, mode='nearest', align_corners=None, recompute_scale_factor=None, "
    "antialias=False",
    _interpolate,
    local=of_some,
)
for _name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
    _parameters = "input, output_size, align_corners, scales_h=None, scales_w=None"
    operator(_name, _parameters, windowed(_name, 2, SUMS), local=of_some)


def _constant_pad(input: Any, pad: Any, value: Any) -> Any:
    return call("pad")(input, pad, value=value)


operator("constant_pad_nd", "input, pad, value=0", handler=_constant_pad)

# --- patches and channels


def _area(kernel_size: Any) -> int:
    return math.prod(ints(kernel_size) * (2 if isinstance(kernel_size, int) else 1))


def _im2col(input: Any, kernel_size: Any, **more: Any) -> RuleForCall:
    ((*_, columns),) = shapes_of(
        "im2col", {"input": input, "kernel_size": kernel_size, **more}
    )
    batch = "n " * (len(input.shape) == 4)
    text = f"{batch}c h! w! -> {batch}(c k!) l!"
    return RuleForCall(
        Rule(text, linear=((0,),), broadcast="none"),
        {"k": _area(kernel_size), "l": columns},
    )


def _col2im(input: Any, kernel_size: Any, **more: Any) -> RuleForCall:
    ((*_, height, width),) = shapes_of(
        "col2im", {"input": input, "kernel_size": kernel_size, **more}
    )
    batch = "n " * (len(input.shape) == 3)
    text = f"{batch}(c k!) l! -> {batch}c h! w!"
    sizes = {"k": _area(kernel_size), "h": height, "w": width}
    return RuleForCall(Rule(text, linear=((0,),), broadcast="none"), sizes)


def _col2im_of_shard(here: ShardContext, kernel_size: Any, **more: Any) -> Any:
    return of_some(here, least=_area(kernel_size), kernel_size=kernel_size, **more)


operator(
    "im2col",
    "input, kernel_size, dilation=1, padding=0, stride=1",
    _im2col,
    local=of_some,
)
operator(
    "col2im",
    "input, output_size, kernel_size, dilation=1, padding=0, stride=1",
    _col2im,
    local=_col2im_of_shard,
)


def _pixels(text: str, name: str, factor: str) -> None:
    """Channels into pixels, or back: blocks of i rows and j columns."""

    def rule(**arguments: Any) -> RuleForCall:
        shapes_of(name, arguments)  # says what is wrong with the sizes
        return RuleForCall(move(text), {"i": arguments[factor], "j": arguments[factor]})

    def of_shard(here: ShardContext, **arguments: Any) -> Any:
        return of_some(here, least=arguments[factor] ** 2, **arguments)

    operator(name, f"input, {factor}", rule, local=of_shard)


_pixels("... (c i! j!) h w -> ... c (h i!) (w j!)", "pixel_shuffle", "upscale_factor")
_pixels(
    "... c (h i!) (w j!) -> ... (c i! j!) h w", "pixel_unshuffle", "downscale_factor"
)


def _channel_shuffle(input: Any, groups: int) -> Any:
    shapes_of("channel_shuffle", {"input": input, "groups": groups})
    return call("flatten")(
        call("transpose")(call("unflatten")(input, 1, (groups, -1)), 1, 2), 1, 2
    )


operator(
    "channel_shuffle native_channel_shuffle", "input, groups", handler=_channel_shuffle
)

# --- samples at a grid


def _grid_sample(input: Any, grid: Any, **_: Any) -> RuleForCall:
    spatial = " ".join(f"s{i}!" for i in range(len(input.shape) - 2))
    points = " ".join(f"o{i}" for i in range(len(grid.shape) - 2))
    text = f"n c {spatial}, n {points} at! -> n c {points}"
    return RuleForCall(
        Rule(text, linear=((0,),), broadcast="none"), operands=[input, grid]
    )


operator(
    "grid_sample",
    "input, grid, mode='bilinear', padding_mode='zeros', align_corners=None",
    _grid_sample,
    local=of_some,
)
operator(
    "grid_sampler grid_sampler_2d grid_sampler_3d",
    "input, grid, interpolation_mode, padding_mode, align_corners",
    _grid_sample,
    local=of_some,
)


def _affine_grid(size: Any, **_: Any) -> RuleForCall:
    names = [f"o{i}!" for i in range(len(size) - 2)]
    sizes = dict(zip((name[:-1] for name in names), size[2:], strict=True))
    return RuleForCall(
        Rule(f"n r! k! -> n {' '.join(names)} r!", linear=((0,),), broadcast="none"),
        sizes,
    )


def _affine_grid_of_shard(
    here: ShardContext, theta: Any, size: Any, **more: Any
) -> Any:
    theta = some(theta)
    return piece(here, here.function(theta, [theta.shape[0], *size[1:]], **more))


operator(
    "affine_grid",
    "theta, size, align_corners=None",
    _affine_grid,
    local=_affine_grid_of_shard,
)
operator(
    "affine_grid_generator",
    "theta, size, align_corners",
    _affine_grid,
    local=_affine_grid_of_shard,
)
