# SPDX-License-Identifier: Apache-2.0
"""Calls of convolutions."""

from rules.framework import F, torch
from rules.operators import OpCase

ONE_GROUP = "n i o"


def op(name, call, shapes, shards, carries=4, sizes=("uneven", "empty")):
    return OpCase(name, call, shapes, shards, carries, sizes=sizes)


def depthwise(function, **how):
    """Each channel by itself."""
    return lambda x, *more: function(x, *more, groups=x.shape[1], **how)


CASES = [
    op("conv1d", F.conv1d, "ab5 cb3 c", ONE_GROUP),
    op(
        "conv1d unbatched",
        lambda x, w, v: torch.conv1d(x, w, v, 2, 1),
        "a5 ba3 b",
        "i o",
    ),
    op(
        "conv1d, same",
        lambda x, w: F.conv1d(x, w, padding="same"),
        "ab4 cb3",
        ONE_GROUP,
    ),
    op("conv2d", F.conv2d, "ab45 cb23 c", ONE_GROUP, sizes=("even", "uneven", "empty")),
    op(
        "conv2d, options",
        lambda x, w, v: F.conv2d(x, w, v, (2, 1), (1, 0), dilation=2),
        "2a55 ba22 b",
        ONE_GROUP,
    ),
    op(
        "conv2d, valid",
        lambda x, w: F.conv2d(x, w, None, 1, "valid"),
        "ab33 cb33",
        ONE_GROUP,
    ),
    op("conv2d unbatched", F.conv2d, "a44 ba22", "i o"),
    op("conv2d depthwise", depthwise(F.conv2d, padding=1), "ab33 b133 b", "n g"),
    op("conv2d depthwise, doubled", depthwise(F.conv2d), "2433 8122 8", "n g"),
    op(
        "conv2d grouped",
        lambda x, w, v: F.conv2d(x, w, v, groups=2),
        "2633 8322 8",
        "n g",
    ),
    op(
        "conv2d of three groups",
        lambda x, w: torch.conv2d(x, w, groups=3),
        "2633 6222",
        "n g",
    ),
    op("conv3d", F.conv3d, "2a333 ba222 b", ONE_GROUP),
    op("conv3d depthwise", depthwise(F.conv3d), "2a222 a1222 a", "n g"),
    op("conv_transpose1d", F.conv_transpose1d, "ab4 bc3 c", ONE_GROUP),
    op(
        "conv_transpose1d unbatched",
        lambda x, w: F.conv_transpose1d(x, w, stride=2),
        "a4 ab3",
        "i o",
    ),
    op(
        "conv_transpose2d, options",
        lambda x, w, v: F.conv_transpose2d(x, w, v, 2, 1, output_padding=1, dilation=2),
        "2a33 ab33 b",
        ONE_GROUP,
    ),
    op(
        "conv_transpose2d depthwise",
        depthwise(F.conv_transpose2d),
        "ab33 b122 b",
        "n g",
    ),
    op(
        "conv_transpose2d grouped",
        lambda x, w, v: F.conv_transpose2d(x, w, v, groups=2),
        "2633 6422 8",
        "n g",
    ),
    op("conv_transpose3d", F.conv_transpose3d, "2a222 ab222 b", ONE_GROUP),
    op(
        "convolution",
        lambda x, w, v: torch.convolution(
            x, w, v, [1, 1], [0, 1], [1, 1], False, [0, 0], 1
        ),
        "ab33 cb22 c",
        ONE_GROUP,
    ),
    op(
        "convolution, transposed",
        lambda x, w, v: torch.convolution(x, w, v, [2], [0], [1], True, [1], 2),
        "264 635 6",
        "n g",
    ),
    op("conv_tbc", lambda x, w, v: torch.conv_tbc(x, w, v, 1), "4ab 3bc c", ONE_GROUP),
]
