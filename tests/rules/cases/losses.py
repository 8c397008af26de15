# SPDX-License-Identifier: Apache-2.0
"""Calls of softmax and of losses."""

import warnings
from functools import partial

from rules.framework import F, detached, torch
from rules.operators import OpCase

R1, R2 = "...[-1]", "...[-2] ...[-1]"
ALL = ("even", "uneven", "empty")


def op(name, call, shapes, shards=None, carries=0, sizes=("uneven",), **more):
    return OpCase(name, call, shapes, shards, carries, sizes=sizes, **more)


def each(name, function, shapes, shards, **more):
    """The loss of every element, their sum and their mean."""
    kinds = ("none", "sum", "mean")
    return [
        op(f"{name}, {kind}", partial(function, reduction=kind), shapes, shards, **more)
        for kind in kinds
    ]


def kl_div(x, y, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that mean is not batchmean
        return F.kl_div(x, y, **more)


def bce(x, y, w=None, **more):
    """Of operands above zero, probabilities must be below one."""
    return F.binary_cross_entropy(x / 3, y / 3, w if w is None else detached(w), **more)


def logits(x, y, w, p):
    return F.binary_cross_entropy_with_logits(x, y, detached(w), pos_weight=detached(p))


def classes(x, y, w=None, **more):
    return F.cross_entropy(x, y, w, **more)


def old(x, y, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the booleans are said to go
        return F.mse_loss(x, y, **more)


CASES = [
    op("softmax", lambda x: x.softmax(1), "abc", R2, sizes=ALL),
    op(
        "softmax by function", lambda x: F.softmax(x, -1, dtype=torch.float64), "ab", R1
    ),
    op("softmax of a scalar", lambda x: torch.softmax(x, 0), ".", ""),
    op("log_softmax", lambda x: F.log_softmax(x, dim=0), "abc", R2),
    op("softmin", lambda x: F.softmin(x, 1), "ab", R1),
    *each("mse_loss", F.mse_loss, "ab ab", R2),
    op(
        "mse_loss weighted, sum",
        lambda x, y, w: F.mse_loss(x, y, reduction="sum", weight=w),
        "ab ab ab",
        R2,
    ),
    op(
        "mse_loss, not averaged",
        lambda x, y: old(x, y, size_average=False),
        "ab ab",
        R2,
    ),
    op("mse_loss, not reduced", lambda x, y: old(x, y, reduce=False), "ab ab", R2),
    op("l1_loss, none", partial(F.l1_loss, reduction="none"), "ab ab", R2),
    op("l1_loss", F.l1_loss, "ab ab", R2),
    op("smooth_l1_loss", lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), "ab ab", R2),
    op("huber_loss", lambda x, y: F.huber_loss(x, y, delta=0.5), "ab ab", R2),
    op(
        "huber_loss weighted",
        lambda x, y, w: F.huber_loss(x, y, weight=w),
        "ab ab ab",
        R2,
    ),
    op("logits", F.binary_cross_entropy_with_logits, "ab ab", R2, sizes=ALL),
    op(
        "logits, none",
        partial(F.binary_cross_entropy_with_logits, reduction="none"),
        "ab ab",
        R2,
    ),
    op("kl_div", partial(kl_div, reduction="none"), "ab ab", R2, positive=(1,)),
    op(
        "kl_div of logarithms",
        lambda x, y: kl_div(x, y, reduction="sum", log_target=True),
        "ab ab",
        R2,
    ),
    op(
        "poisson_nll_loss",
        lambda x, y: F.poisson_nll_loss(x, y, full=True),
        "ab ab",
        R2,
        positive=(0, 1),
    ),
    op("gaussian_nll_loss", F.gaussian_nll_loss, "ab ab ab", R2, positive=(2,)),
    op(
        "gaussian_nll_loss, one for all",
        F.gaussian_nll_loss,
        "abc abc ab",
        R2 + " d",
        positive=(2,),
    ),
    op(
        "gaussian_nll_loss, none",
        partial(F.gaussian_nll_loss, reduction="none"),
        "ab ab a1",
        R2,
        positive=(2,),
    ),
    op("hinge_embedding_loss", F.hinge_embedding_loss, "ab ab", R2),
    op(
        "margin_ranking_loss",
        lambda x, y, z: F.margin_ranking_loss(x, y, z, 0.3),
        "ab ab ab",
        R2,
    ),
    op(
        "cosine_embedding_loss",
        F.cosine_embedding_loss,
        "ab ab a",
        R1,
        ints={2: 2},
        sizes=("even", "empty"),
    ),
    op(
        "triplet_margin_loss, none",
        partial(F.triplet_margin_loss, reduction="none"),
        "ab ab ab",
        R1,
    ),
    op("triplet_margin_loss", F.triplet_margin_loss, "ab ab ab", R1),
    *each("multi_margin_loss", F.multi_margin_loss, "ab a", R1, ints={1: "b"}),
    op("multilabel_margin_loss", F.multilabel_margin_loss, "ab ab", R1, ints={1: "b"}),
    op("multilabel_soft_margin_loss", F.multilabel_soft_margin_loss, "ab ab b", R1),
    op(
        "cross_entropy, none",
        partial(classes, reduction="none"),
        "bc b",
        "d0",
        ints={1: "c"},
        sizes=ALL,
    ),
    op(
        "cross_entropy, sum",
        partial(classes, reduction="sum"),
        "bc b",
        "d0",
        ints={1: "c"},
    ),
    op(
        "cross_entropy of pixels",
        partial(classes, reduction="sum"),
        "bca ba",
        "d0 d2",
        ints={1: "c"},
    ),
    op("cross_entropy of shares", F.cross_entropy, "bca bca", "d0 d2"),
    op(
        "cross_entropy of shares, none",
        partial(classes, reduction="none", label_smoothing=0.1),
        "bc bc c",
        "d0",
        positive=(2,),
    ),
    op(
        "nll_loss, none",
        lambda x, y: F.nll_loss(x, y, reduction="none"),
        "bc b",
        "d0 c",
        2,
        ints={1: "c"},
        sizes=ALL,
    ),
    op(
        "nll_loss of one",
        lambda x, y: F.nll_loss(x, y, reduction="sum"),
        "c .",
        "c",
        2,
        ints={1: "c"},
    ),
]

IGNORED = {"ignore_index": 1}
COMPOSITES = [
    op(
        "mse_loss weighted",
        lambda x, y, w: F.mse_loss(x, y, weight=w),
        "ab ab ab",
        positive=(2,),
    ),
    op("binary_cross_entropy", bce, "ab ab", positive=(0, 1)),
    op(
        "binary_cross_entropy, weights",
        partial(bce, reduction="none"),
        "ab ab b",
        positive=(0, 1),
    ),
    op("logits, weights", logits, "ab ab a1 b", positive=(2, 3)),
    op("kl_div, mean", kl_div, "ab ab", positive=(1,)),
    op(
        "kl_div, batchmean",
        lambda x, y: kl_div(x, y, reduction="batchmean"),
        "ab ab",
        positive=(1,),
    ),
    op("soft_margin_loss", lambda x, y: F.soft_margin_loss(x, detached(y)), "ab ab"),
    op(
        "multi_margin_loss, weights",
        lambda x, y, w: F.multi_margin_loss(x, y, weight=detached(w)),
        "ab a b",
        ints={1: "b"},
    ),
    op("cross_entropy", F.cross_entropy, "bc b", ints={1: "c"}, sizes=ALL),
    op("cross_entropy of one", F.cross_entropy, "c .", ints={1: "c"}),
    op("cross_entropy of many pixels", F.cross_entropy, "bcaa baa", ints={1: "c"}),
    op(
        "cross_entropy, ignored",
        lambda x, y: classes(x, y, **IGNORED),
        "bc b",
        ints={1: "c"},
    ),
    op(
        "cross_entropy, all ignored",
        lambda x, y: classes(x, y, ignore_index=0),
        "bc b",
        ints={1: 1},
    ),
    op(
        "cross_entropy, weights",
        lambda x, y, w: classes(x, y, detached(w), **IGNORED),
        "bca ba c",
        ints={1: "c"},
        positive=(2,),
    ),
    *[
        op(
            f"cross_entropy, smooth, {kind}",
            lambda x, y, w, kind=kind: classes(
                x, y, detached(w), reduction=kind, label_smoothing=0.2, **IGNORED
            ),
            "bca ba c",
            ints={1: "c"},
            positive=(2,),
        )
        for kind in ("none", "sum", "mean")
    ],
    op(
        "cross_entropy of shares, smooth",
        lambda x, y, w: classes(x, y, detached(w), label_smoothing=0.2),
        "bca bca c",
        positive=(2,),
    ),
    op("nll_loss", F.nll_loss, "bc b", ints={1: "c"}),
    op(
        "nll_loss, ignored",
        lambda x, y: F.nll_loss(x, y, **IGNORED),
        "bca ba",
        ints={1: "c"},
    ),
    op(
        "nll_loss, weights",
        lambda x, y, w: F.nll_loss(x, y, detached(w)),
        "bc b c",
        ints={1: "c"},
        positive=(2,),
    ),
    op(
        "nll_loss, weights, sum",
        lambda x, y, w: F.nll_loss(x, y, detached(w), reduction="sum", **IGNORED),
        "bca ba c",
        ints={1: "c"},
        positive=(2,),
    ),
]
