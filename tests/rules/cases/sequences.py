# SPDX-License-Identifier: Apache-2.0
"""Calls on sequences of different lengths, and those that are made of other operators."""

from functools import partial

from rules.framework import F, detached, torch
from rules.operators import OpCase

from hyper_parallel import Replicate

ALL = ("even", "uneven", "empty")
R1, R2 = "...[-1]", "...[-2] ...[-1]"


def op(name, call, shapes, shards=None, carries=None, sizes=("uneven",), **more):
    return OpCase(name, call, shapes, shards, carries, sizes=sizes, **more)


def ctc(reduction):
    """Lengths that are drawn may not fit, and what is infinite has no gradient to compare."""
    return lambda x, y, n, m: F.ctc_loss(
        x, y, n, m, blank=5, reduction=reduction, zero_infinity=True
    )


def of_numbers(x, y, reduction="mean"):
    """With the lengths as numbers, and the targets of all one after the other where they have one dim."""
    batch = x.shape[1]
    return F.ctc_loss(
        x, y, [4] * batch, [1 + i % 2 for i in range(batch)], 5, reduction
    )


def bag(mode, **more):
    return lambda i, w: F.embedding_bag(i, w, mode=mode, **more)


def weighted(i, w, s, **more):
    return F.embedding_bag(i, w, mode="sum", per_sample_weights=s, **more)


def seeded(call):
    """The same numbers wherever it is called."""

    def run(*operands):
        torch.manual_seed(3)
        return call(*operands)

    return run


def distance(x, y):
    return (x - y).abs().sum(-1)


def of_three(**more):
    return lambda x, y, z: F.triplet_margin_with_distance_loss(x, y, z, **more)


LENGTHS = {1: 5, 2: 4, 3: 3}
CASES = [
    *[
        op(f"ctc_loss, {kind}", ctc(kind), "4b6 b3 b b", "b", 0, ALL, ints=LENGTHS)
        for kind in ("none", "sum", "mean")
    ],
    op("ctc_loss by numbers", of_numbers, "4b6 b3", "b", 0, ALL, ints={1: 5}),
    op(
        "ctc_loss in a row",
        partial(of_numbers, reduction="none"),
        "4b6 9",
        "b",
        0,
        ints={1: 5},
    ),
    op("embedding_bag", F.embedding_bag, "ab cb", "b v d", 2, ALL, ints={0: "c"}),
    op("embedding_bag, sum", bag("sum"), "ab cb", "b v d", 2, ALL, ints={0: "c"}),
    op("embedding_bag, max", bag("max"), "ab cb", "b d", 0, ALL, ints={0: "c"}),
    op(
        "embedding_bag, mean, padding",
        bag("mean", padding_idx=-1),
        "b4 5b",
        "b v d",
        2,
        ints={0: 5},
    ),
    op(
        "embedding_bag, max, padding",
        bag("max", padding_idx=1),
        "b4 5b",
        "b d",
        0,
        ints={0: 5},
    ),
    op("embedding_bag, weights", weighted, "ab cb ab", "b v d", 2, ALL, ints={0: "c"}),
    op(
        "embedding_bag, weights, padding",
        partial(weighted, padding_idx=0),
        "b4 5b b4",
        "b v d",
        2,
        ints={0: 5},
    ),
    op(
        "multinomial",
        lambda x: torch.multinomial(x, 3, replacement=True),
        "ab",
        "b",
        0,
        (),
        positive=(0,),
    ),
    op(
        "multinomial of one",
        lambda x: torch.multinomial(x, 2),
        "b",
        "",
        0,
        (),
        positive=(0,),
    ),
    op(
        "_safe_softmax", lambda x: torch.ops.aten._safe_softmax(x, 1), "abc", R2, 0, ALL
    ),
]


def segments(kind, **more):
    return lambda x: torch.segment_reduce(
        x, kind, lengths=like(x, [2, 0, 3, 1]), initial=0, **more
    )


def bags_of(i, w, **more):
    return F.embedding_bag(i, w, like(i, [0, 1, 3]), **more)


def like(x, numbers):
    """Integers on the mesh of a tensor, if it has one."""
    made = torch.tensor(numbers)
    return (
        made
        if type(x) is torch.Tensor
        else x.from_local(made, x.device_mesh, [Replicate()] * x.device_mesh.ndim)
    )


COMPOSITES = [
    *[
        op(f"segment_reduce, {kind}", segments(kind), "6b", sizes=ALL)
        for kind in ("sum", "mean", "max", "min")
    ],
    op(
        "ctc_loss by tensors",
        lambda x, y, n: F.ctc_loss(x, y, n * 0 + 4, n, 5),
        "4b6 b3 b",
        ints={1: 5, 2: 3},
        sizes=ALL,
    ),
    op(
        "ctc_loss of tensors in a row",
        lambda x, y, n: torch.ctc_loss(x, y, n * 0 + 4, n * 0 + 1, 5, 2),
        "4b6 b b",
        ints={1: 5, 2: 3},
        sizes=ALL,
    ),
    op(
        "ctc_loss of one",
        lambda x, y: F.ctc_loss(x, y, [4], [2], 5),
        "416 2",
        ints={1: 5},
    ),
    op("embedding_bag in a row", bags_of, "6 cb", ints={0: "c"}, sizes=ALL),
    op(
        "embedding_bag in a row, sum",
        partial(bags_of, mode="sum", padding_idx=0),
        "6 cb",
        ints={0: "c"},
    ),
    op(
        "embedding_bag in a row, last",
        partial(bags_of, mode="sum", include_last_offset=True),
        "3 cb",
        ints={0: "c"},
    ),
    op("one_hot of as many as there are", F.one_hot, "ab", ints={0: 5}, sizes=ALL),
    op("one_hot of a scalar", F.one_hot, ".", ints={0: 5}),
    op("triplet_margin_with_distance_loss", of_three(), "ab ab ab", sizes=ALL),
    op(
        "triplet loss, swapped",
        of_three(swap=True, reduction="sum", margin=0.3),
        "ab ab ab",
    ),
    op(
        "triplet loss by a function",
        of_three(distance_function=distance, reduction="none"),
        "ab ab ab",
    ),
    op(
        "linear_cross_entropy",
        F.linear_cross_entropy,
        "ab cb a",
        ints={2: "c"},
        sizes=ALL,
    ),
    op(
        "linear_cross_entropy, more",
        lambda x, w, y, b: F.linear_cross_entropy(
            x, w, y, linear_bias=b, ignore_index=1, label_smoothing=0.1
        ),
        "ab cb a c",
        ints={2: "c"},
    ),
    op(
        "linear_cross_entropy of pixels",
        lambda x, w, y: F.linear_cross_entropy(x, w, y, reduction="none"),
        "ab c3b a3",
        ints={2: "c"},
    ),
    op(
        "linear_cross_entropy by parts",
        lambda x, w, y: F.linear_cross_entropy(
            x, w, y, options=torch.nn.LinearCrossEntropyOptions()
        ),
        "ab cb a",
        ints={2: "c"},
    ),
    op("gumbel_softmax", seeded(F.gumbel_softmax), "ab", sizes=ALL),
    op(
        "gumbel_softmax, hard",
        seeded(partial(F.gumbel_softmax, tau=0.5, hard=True, dim=0)),
        "ab",
    ),
    op("normal", seeded(torch.normal), "ab ab", positive=(1,), sizes=ALL),
    op(
        "normal of a number",
        seeded(lambda s: torch.normal(2.0, s)),
        "ab",
        positive=(0,),
    ),
    op("normal, stretched", seeded(lambda m: torch.normal(m, 0.5)), "ab"),
    op(
        "repeat_interleave by a tensor",
        lambda x, n: x.repeat_interleave(n, 0),
        "ab a",
        ints={1: 4},
        sizes=ALL,
    ),
    op(
        "repeat_interleave of all, by a tensor",
        torch.repeat_interleave,
        "ab 1",
        ints={1: 4},
    ),
    op(
        "_softmax_backward_data",
        lambda g, x: torch._softmax_backward_data(
            g, detached(x).softmax(1), 1, x.dtype
        ),
        "abc abc",
        sizes=ALL,
    ),
    op(
        "native_dropout_backward",
        lambda g, m: torch.ops.aten.native_dropout_backward(g, m, 2.0),
        "ab ab",
        bools=(1,),
    ),
    op(
        "_unsafe_masked_index",
        lambda x, m, i: torch._unsafe_masked_index(x, m, [i], 2.5),
        "b 4 4",
        bools=(1,),
        ints={2: 9},
    ),
]
