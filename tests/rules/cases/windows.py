# SPDX-License-Identifier: Apache-2.0
"""Calls of pools, resizings, patches and samples."""

from rules.framework import F, detached, torch
from rules.operators import OpCase

NC = "d0 d1"


def op(name, call, shapes, shards=NC, carries=0, sizes=("uneven", "empty"), **more):
    return OpCase(name, call, shapes, shards, carries, sizes=sizes, **more)


def linear(name, call, shapes, shards=NC, carries=2, **more):
    return op(name, call, shapes, shards, carries, **more)


def resized(mode, **how):
    return lambda x: F.interpolate(x, mode=mode, **how)


POOLS = [
    linear(
        "avg_pool1d",
        lambda x: F.avg_pool1d(x, 2),
        "ab5",
        sizes=("even", "uneven", "empty"),
    ),
    linear(
        "avg_pool1d unbatched",
        lambda x: torch.avg_pool1d(x, (2,), stride=1, padding=1),
        "a5",
        "d0",
    ),
    linear(
        "avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, padding=1, ceil_mode=True), "ab54"
    ),
    linear(
        "avg_pool2d, divided",
        lambda x: F.avg_pool2d(x, 2, divisor_override=3),
        "a44",
        "d0",
    ),
    linear(
        "avg_pool3d",
        lambda x: F.avg_pool3d(x, (1, 2, 2), count_include_pad=False),
        "ab333",
    ),
    linear("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 3), "ab5"),
    linear(
        "adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, (None, 2)), "ab43"
    ),
    linear("adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x, 1), "a333", "d0"),
    op("max_pool1d", lambda x: F.max_pool1d(x, 2), "ab5"),
    op("max_pool1d, indices", lambda x: F.max_pool1d(x, 2, return_indices=True), "ab5"),
    op("max_pool1d of torch", lambda x: torch.max_pool1d(x, 3, 1, 1), "a5", "d0"),
    op("max_pool2d", lambda x: F.max_pool2d(x, 3, stride=2, padding=1), "ab45"),
    op(
        "max_pool2d of torch",
        lambda x: torch.max_pool2d(x, [2, 2], dilation=2, ceil_mode=True),
        "ab44",
    ),
    op(
        "max_pool2d, indices",
        lambda x: F.max_pool2d(x, 2, 1, return_indices=True),
        "a44",
        "d0",
    ),
    op("max_pool3d", lambda x: F.max_pool3d(x, 2), "ab333"),
    op(
        "max_pool3d, indices",
        lambda x: F.max_pool3d(x, 2, return_indices=True),
        "ab333",
    ),
    op("adaptive_max_pool1d", lambda x: F.adaptive_max_pool1d(x, 3), "ab5"),
    op(
        "adaptive_max_pool1d of torch", lambda x: torch.adaptive_max_pool1d(x, 3), "ab5"
    ),
    op("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, (2, 3)), "a44", "d0"),
    op(
        "adaptive_max_pool2d, indices",
        lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True),
        "ab44",
    ),
    op("adaptive_max_pool3d", lambda x: F.adaptive_max_pool3d(x, 2), "ab333"),
    op("lp_pool1d", lambda x: F.lp_pool1d(x, 2, 2), "ab4", positive=(0,)),
    op("lp_pool2d", lambda x: F.lp_pool2d(x, 3.0, 2, 1), "ab44", positive=(0,)),
    op("lp_pool3d", lambda x: F.lp_pool3d(x, 2, 2), "ab222", positive=(0,)),
    linear(
        "max_unpool1d", lambda x, at: F.max_unpool1d(x, at, 2), "ab1 ab1", ints={1: 2}
    ),
    linear(
        "max_unpool2d",
        lambda x, at: F.max_unpool2d(x, at, 2, output_size=(3, 3)),
        "a11 a11",
        "d0",
        ints={1: 9},
    ),
]
SIZES = [
    linear(
        "interpolate",
        lambda x: F.interpolate(x, 7),
        "ab4",
        carries=5,
        sizes=("even", "uneven", "empty"),
    ),
    linear(
        "interpolate nearest-exact",
        resized("nearest-exact", scale_factor=2),
        "ab33",
        carries=5,
    ),
    linear(
        "interpolate linear", resized("linear", size=(3,), align_corners=True), "ab5"
    ),
    linear("interpolate bilinear", resized("bilinear", scale_factor=(2, 3)), "ab33"),
    linear(
        "interpolate bilinear, smooth",
        resized("bilinear", size=2, antialias=True),
        "ab55",
    ),
    linear("interpolate bicubic", resized("bicubic", size=(4, 5)), "ab33"),
    linear("interpolate trilinear", resized("trilinear", size=3), "ab222"),
    linear("interpolate area", resized("area", size=3), "ab54"),
    linear(
        "_upsample_bilinear2d_aa",
        lambda x: torch._C._nn._upsample_bilinear2d_aa(x, [3, 2], False),
        "ab44",
    ),
]
PATCHES = [
    linear(
        "im2col",
        lambda x: F.unfold(x, 2),
        "ab33",
        "n c",
        sizes=("even", "uneven", "empty"),
    ),
    linear(
        "im2col unbatched",
        lambda x: F.unfold(x, (2, 1), padding=1, stride=2),
        "a33",
        "c",
    ),
    linear("col2im", lambda x: F.fold(x, (3, 4), (1, 2), stride=1), "a69", "n c"),
    linear("col2im unbatched", lambda x: F.fold(x, 3, kernel_size=2), "84", "c"),
    linear(
        "pixel_shuffle",
        lambda x: F.pixel_shuffle(x, 2),
        "ac23",
        "...[-1] c h w",
        5,
        sizes=("even",),
    ),
    linear(
        "pixel_shuffle of three", lambda x: torch.pixel_shuffle(x, 3), "92a", "h w", 5
    ),
    linear(
        "pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), "ab46", "...[-1] c h w", 5
    ),
]
GRIDS = [
    linear(
        "grid_sample",
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        "ab44 a232",
        "n c o0 o1",
    ),
    linear(
        "grid_sample, border",
        lambda x, g: F.grid_sample(x, g, "bicubic", "border", True),
        "2b44 2ab2",
        "n c o0 o1",
    ),
    linear(
        "grid_sample of volumes",
        lambda x, g: F.grid_sample(x, g, align_corners=True),
        "2b333 2a223",
        "n c o0 o1 o2",
    ),
    linear(
        "grid_sampler_2d",
        lambda x, g: torch.grid_sampler_2d(x, g, 0, 1, False),
        "2b44 2a32",
        "n c o0 o1",
    ),
    linear(
        "affine_grid",
        lambda t: F.affine_grid(t, (t.shape[0], 5, 2, 3), align_corners=False),
        "a23",
        "n",
    ),
    linear(
        "affine_grid of volumes",
        lambda t: F.affine_grid(t, [t.shape[0], 1, 2, 2, 3], True),
        "a34",
        "n",
    ),
]
CASES = [*POOLS, *SIZES, *PATCHES, *GRIDS]


def unpooled(pool, unpool, size):
    """Back to the places where the largest were."""

    def call(x):
        found, at = pool(x, size, return_indices=True)
        return unpool(found, at, size)

    return call


def fractional(pool, **how):
    """With windows drawn as on one device."""

    def call(x):
        torch.manual_seed(0)
        return pool(x, 2, **how)

    return call


COMPOSITES = [
    OpCase(
        "fold into one channel",
        lambda x: F.fold(x, (4, 4), 2, stride=2),
        "a44",
        sizes=("uneven",),
    ),
    OpCase(
        "unfold of one channel", lambda x: F.unfold(x, 2), "a144", sizes=("uneven",)
    ),
    OpCase(
        "pixel_unshuffle of one channel",
        lambda x: F.pixel_unshuffle(x, 2),
        "a122",
        sizes=("uneven",),
    ),
    op("max_unpool1d back", unpooled(F.max_pool1d, F.max_unpool1d, 2), "ab4"),
    op("max_unpool2d back", unpooled(F.max_pool2d, F.max_unpool2d, 2), "ab44"),
    op("max_unpool3d back", unpooled(F.max_pool3d, F.max_unpool3d, 2), "a444"),
    op(
        "fractional_max_pool2d",
        fractional(F.fractional_max_pool2d, output_size=3),
        "ab55",
    ),
    op(
        "fractional_max_pool2d unbatched",
        fractional(F.fractional_max_pool2d, output_ratio=(0.7, 0.5)),
        "a55",
    ),
    op(
        "fractional_max_pool3d",
        fractional(F.fractional_max_pool3d, output_size=(2, 2, 3), return_indices=True),
        "ab555",
        sizes=("uneven",),
    ),
    op(
        "fractional_max_pool2d at samples",
        lambda x, at: F.fractional_max_pool2d(
            x, 2, output_ratio=(0.5, 0.7), _random_samples=detached(at) * 0.4
        ),
        "ab55 ab2",
        positive=(1,),
    ),
    op(
        "interpolate by floats",
        lambda x: resized("bilinear", scale_factor=1.5)(
            resized("nearest", scale_factor=2.0)(x)
        ),
        "ab33",
    ),
    op(
        "interpolate by pairs",
        resized("bilinear", scale_factor=(1.5, 0.5), recompute_scale_factor=True),
        "ab44",
    ),
    op("constant_pad_nd", lambda x: torch.constant_pad_nd(x, (1, 2), 3.0), "ab"),
    op("channel_shuffle", lambda x: F.channel_shuffle(x, 2), "ab33"),
]
