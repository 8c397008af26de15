# SPDX-License-Identifier: Apache-2.0
"""Calls of normalizations."""

from functools import partial

from rules.framework import F, detached, its, torch
from rules.operators import OpCase

R1, R2 = "...[-1]", "...[-2] ...[-1]"


def op(name, call, shapes, shards=None, carries=0, sizes=("uneven",), **more):
    return OpCase(name, call, shapes, shards, carries, sizes=sizes, **more)


def last(function, count=1):
    return lambda x, *more: function(x, x.shape[-count:], *more)


def evaluated(x, mean, var, *more, norm=F.batch_norm, **how):
    return norm(x, detached(mean), detached(var), *more, **how)


def trained(x, *more, norm=F.batch_norm, **how):
    """The result and what becomes of the running statistics."""
    mean, var = (its(detached(running)).clone() for running in more[:2])
    return norm(x, mean, var, *more[2:], **how), mean, var


CASES = [
    op("layer_norm", last(F.layer_norm), "abc c c", R2),
    op("layer_norm over two", last(F.layer_norm, 2), "abc bc", R1),
    op("layer_norm alone", last(F.layer_norm), "ab", R1),
    op("rms_norm", last(F.rms_norm), "abc c", R2),
    op("rms_norm over two", last(partial(F.rms_norm, eps=0.1), 2), "abc", R1),
    op(
        "group_norm",
        lambda x, w, v: F.group_norm(x, 2, w, v),
        "ab23 b b",
        "b g",
        sizes=("even", "uneven", "empty"),
    ),
    op("group_norm of rows", lambda x: F.group_norm(x, 4), "a8", "b g"),
    op(
        "group_norm, one group",
        lambda x, w, v: F.group_norm(x, 1, w, v),
        "abc b b",
        "b",
        sizes=("even", "uneven"),
    ),
    op("group_norm, one a group", lambda x, w: F.group_norm(x, 4, w), "a4 4", "g"),
    op("local_response_norm", lambda x: F.local_response_norm(x, 2), "abc", "b " + R1),
    op(
        "batch_norm",
        lambda x, w, v: F.batch_norm(x, None, None, w, v, training=True),
        "abc b b",
        "c",
    ),
    op(
        "instance_norm",
        lambda x, w, v: F.instance_norm(x, weight=w, bias=v),
        "abc b b",
        "b c",
    ),
    op("instance_norm alone", F.instance_norm, "ab33", "b c"),
    op("normalize", F.normalize, "abc", R2),
    op("normalize over two", lambda x: F.normalize(x, 3.0, (0, 2)), "abc", R1),
    op("cosine_similarity", F.cosine_similarity, "abc abc", R2),
    op(
        "cosine_similarity broadcast",
        lambda x, y: torch.cosine_similarity(x, y, dim=1),
        "abc b1",
        R2,
    ),
    op("pairwise_distance", F.pairwise_distance, "abc abc", R2),
    op(
        "pairwise_distance, kept",
        lambda x, y: F.pairwise_distance(x, y, 1.0, keepdim=True),
        "ab b",
        R1,
    ),
]

COMPOSITES = [
    op("batch_norm, evaluated", evaluated, "abc b b b b", positive=(2,)),
    op("batch_norm of rows, evaluated", evaluated, "ab b b b", positive=(2,)),
    op(
        "batch_norm of rows, trained",
        partial(trained, training=True),
        "ab b b",
        positive=(2,),
    ),
    op(
        "batch_norm, trained",
        partial(trained, training=True, momentum=0.3),
        "abc b b b b",
        positive=(2,),
    ),
    op(
        "instance_norm, trained",
        partial(trained, norm=F.instance_norm),
        "ab33 b b b b",
        positive=(2,),
    ),
    op(
        "instance_norm, evaluated",
        partial(evaluated, norm=F.instance_norm, use_input_stats=False),
        "abc b b b",
        positive=(2,),
    ),
    op("normalize by the largest", lambda x: F.normalize(x, float("inf"), -1), "ab"),
]
