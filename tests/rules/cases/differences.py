# SPDX-License-Identifier: Apache-2.0
"""Calls of differences and distances, and of views that are copied."""

from rules.framework import F, detached, its, torch
from rules.operators import OpCase

R1, R2 = "...[-1]", "...[-2] ...[-1]"
ALL = ("even", "uneven", "empty")


def op(
    name, call, shapes, shards=None, carries=None, sizes=("uneven", "empty"), **more
):
    return OpCase(name, call, shapes, shards, carries, sizes=sizes, **more)


CASES = [
    op("diff", torch.diff, "abc", R2, 2, ALL),
    op("diff, again", lambda x: its(x).diff(2, 0), "ab", R1, 2),
    op("diff of ints", lambda x: its(x).diff(dim=1), "ab", R1, 0, ints={0: 9}),
    op("diff of bools", lambda x: its(x).diff(dim=0), "ab", R1, 0, bools=(0,)),
    op("trapezoid", torch.trapezoid, "abc", R2, 2, ALL),
    op("trapezoid of a width", lambda y: torch.trapz(y, dx=0.3, dim=0), "ab", R1, 2),
    op(
        "trapezoid of places", lambda y, x: torch.trapezoid(y, x, dim=1), "abc b", R2, 4
    ),
    op("trapezoid of places in rows", torch.trapezoid, "abc bc", R2, 4),
    op(
        "trapezoid of places, one each",
        lambda y, x: torch.trapz(y, x, dim=0),
        "ab a1",
        R1,
        4,
    ),
    op("cumulative_trapezoid", torch.cumulative_trapezoid, "abc", R2, 2),
    op(
        "cumulative_trapezoid of places",
        lambda y, x: torch.cumulative_trapezoid(y, x, dim=-2),
        "ab a",
        R1,
        4,
    ),
    op("cdist", torch.cdist, "a53 ab3", R1 + " r s", 0, ALL),
    op("cdist 1", lambda x, y: torch.cdist(x, y, p=1.0), "ab cb", "r s", 0),
    op(
        "cdist inf",
        lambda x, y: torch.cdist(x, y, float("inf")),
        "1a3 ab3",
        R1 + " r s",
        0,
    ),
    op(
        "cdist by a product",
        lambda x, y: torch.cdist(x, y, compute_mode="use_mm_for_euclid_dist"),
        "b3 c3",
        "r s",
        0,
    ),
    op("pdist", F.pdist, "b3", "", 0),
    op("renorm", lambda x: x.renorm(2, 1, 0.9), "abc", "d1", 0),
    op(
        "renorm 1", lambda x: torch.renorm(x, p=1.0, dim=-1, maxnorm=1.5), "ab", "d1", 0
    ),
    op("diagonal_scatter", torch.diagonal_scatter, "bb b", "", 5),
    op(
        "diagonal_scatter in a batch",
        lambda x, y: x.diagonal_scatter(y, 0, 0, -1),
        "4a4 a4",
        "d1",
        5,
    ),
]


def changed(copy, x):
    """What is copied, and the tensor after a change of the copy."""
    x = its(detached(x)).clone()
    copies = copy(x)
    for one in copies if isinstance(copies, tuple) else [copies]:
        one.zero_()
    return x


COPIES = {
    "alias": torch.alias_copy,
    "diagonal": lambda x: torch.diagonal_copy(x, 0, 0, 2),
    "expand": lambda x: torch.expand_copy(x, (2, -1, -1, -1)),
    "narrow": lambda x: torch.narrow_copy(x, 1, 0, 1),
    "permute": lambda x: torch.permute_copy(x, (2, 0, 1)),
    "select": lambda x: torch.select_copy(x, 0, -1),
    "slice": lambda x: torch.slice_copy(x, 1, 0, 9, 2),
    "split": lambda x: torch.split_copy(x, 2, 1),
    "split_with_sizes": lambda x: torch.split_with_sizes_copy(x, [1, x.shape[0] - 1]),
    "squeeze": lambda x: torch.squeeze_copy(input=x, dim=0),
    "t": lambda x: torch.t_copy(torch.select_copy(x, 1, 0)),
    "transpose": lambda x: torch.transpose_copy(x, -1, 0),
    "unbind": lambda x: torch.unbind_copy(x, 1),
    "unfold": lambda x: torch.unfold_copy(x, 1, 2, 1),
    "unsqueeze": lambda x: torch.unsqueeze_copy(x, -1),
    "view": lambda x: torch.view_copy(x, (x.shape[0], -1)),
}

COMPOSITES = [
    *(op(f"{name}, copied", copy, "abc") for name, copy in COPIES.items()),
    *(
        op(f"{name}, copied and changed", lambda x, copy=copy: changed(copy, x), "abc")
        for name, copy in COPIES.items()
    ),
    op("slice of aten", lambda x: torch.ops.aten.slice.Tensor(x, 1, 1, None), "abc"),
    op(
        "slice of aten, from the end",
        lambda x: torch.ops.aten.slice.Tensor(x, -1, -2, 999, 2),
        "abc",
    ),
    op("diff, more before", lambda x, y: torch.diff(x, dim=0, prepend=y), "ab 1b"),
    op(
        "diff, more on both sides",
        lambda x, y, z: its(x).diff(2, -1, y, append=z),
        "ab a2 a1",
    ),
    op("diff of no step", lambda x, y: torch.diff(x, n=0, prepend=y), "ab a2"),
    op("gradient", torch.gradient, "ab", sizes=("even", "uneven")),
    op("gradient of one dim", lambda x: torch.gradient(x, dim=-1, spacing=0.5), "ab"),
    op(
        "gradient of some dims",
        lambda x: torch.gradient(x, spacing=[2.0, 3.0], dim=(0, 2), edge_order=2),
        "5b3",
    ),
    op(
        "gradient of places",
        lambda x, p: torch.gradient(x, spacing=(detached(p),), dim=1),
        "ab b",
        positive=(1,),
    ),
    op("unravel_index", lambda x: torch.unravel_index(x, (3, 4)), "ab", ints={0: 12}),
    op(
        "unravel_index of one dim",
        lambda x: torch.unravel_index(x, (7,)),
        "b",
        ints={0: 7},
    ),
    op("sum_to_size", lambda x: x.sum_to_size(1, x.shape[2]), "abc"),
    op("sum_to_size of a list", lambda x: x.sum_to_size([x.shape[0], 1, 1]), "abc"),
    op("sum_to_size of the same", lambda x: x.sum_to_size(tuple(x.shape)), "ab"),
]
