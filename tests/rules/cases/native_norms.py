# SPDX-License-Identifier: Apache-2.0
"""Calls of normalizations that give their statistics too."""

import math

from rules.framework import detached, its, torch
from rules.operators import OpCase

R2 = "...[-2] ...[-1]"


def op(name, call, shapes, shards=None, carries=0, sizes=("uneven", "empty"), **more):
    return OpCase(name, call, shapes, shards, carries, sizes=sizes, **more)


def layer_norm(x, *more, count=1):
    return torch.native_layer_norm(x, x.shape[-count:], *more, 1e-5)


def group_norm(x, w, v, groups=2):
    return torch.native_group_norm(
        x, w, v, *x.shape[:2], math.prod(x.shape[2:]), groups, 1e-5
    )


def updated(norm):
    """The results and what becomes of the running statistics."""

    def call(x, w, v, mean, var):
        mean, var = its(detached(mean)).clone(), its(detached(var)).clone()
        return *norm(x, w, v, mean, var), mean, var

    return call


CASES = [
    op("native_layer_norm", layer_norm, "abc c c", R2),
    op(
        "native_layer_norm over two",
        lambda x: layer_norm(x, None, None, count=2),
        "ab3",
        "...[-1]",
        sizes=("uneven",),
    ),
    op("native_group_norm", group_norm, "ab3 b b", "b g"),
    op(
        "native_group_norm of four",
        lambda x: group_norm(x, None, None, 4),
        "a832",
        "b g",
        sizes=("uneven",),
    ),
]
COMPOSITES = [
    op(
        "native_batch_norm, trained",
        updated(lambda *tensors: torch.native_batch_norm(*tensors, True, 0.1, 1e-5)),
        "abc b b b b",
        positive=(4,),
        sizes=("uneven",),
    ),
    op(
        "native_batch_norm, evaluated",
        updated(lambda *tensors: torch.native_batch_norm(*tensors, False, 0.1, 1e-5)),
        "abc b b b b",
        positive=(4,),
        sizes=("uneven",),
    ),
    op(
        "_native_batch_norm_legit, no statistics",
        lambda x, w, v: torch._native_batch_norm_legit(x, w, v, True, 0.1, 1e-5),
        "abc b b",
        sizes=("uneven",),
    ),
    op(
        "_batch_norm_with_update",
        updated(
            lambda *tensors: torch.ops.aten._batch_norm_with_update(*tensors, 0.1, 1e-5)
        ),
        "abc b b b b",
        positive=(4,),
        sizes=("uneven",),
    ),
]
