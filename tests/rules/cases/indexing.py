# SPDX-License-Identifier: Apache-2.0
"""x[...] and x[...] = value."""

from rules.operators import OpCase


def op(name, call, shapes, shards=None, carries=None, sizes=("uneven",), **more):
    return OpCase(name, call, shapes, shards, carries, sizes=sizes, **more)


CASES = [
    op("x[i]", lambda x: x[1], "abc", "d1 d2", 5),
    op("x[i, j]", lambda x: x[-1, 2], "abc", "d2", 5),
    op("x[:]", lambda x: x[:], "ab", "d0 d1", 5),
    op("x[()]", lambda x: x[()], "ab", "d0 d1", 5),
    op("x[a:b]", lambda x: x[1:3], "ab", "d1", 5),
    op("x[..., a:b:s]", lambda x: x[..., 1:6:2], "ab7", "d0 d1", 5),
    op("x[:, -1]", lambda x: x[:, -1], "abc", "d0 d2", 5),
    op("x[a:a]", lambda x: x[:, 3:3], "ab", "d0", 5),
    op("x[None, ..., None]", lambda x: x[None, :, ..., None], "ab", "d0 d1", 5),
    op("x[i, None, a:]", lambda x: x[0, None, 1:, ...], "abc", "d2", 5),
    op(
        "x[all by numbers]",
        lambda x: x[0 : x.shape[0], -x.shape[1] :],
        "ab",
        "d0 d1",
        5,
    ),
    op("a scalar[None]", lambda x: x[None, ...], ".", "", 5),
]


def assigned(assign):
    """An assignment to a part of a tensor that is not a leaf, so that gradients are seen too."""

    def call(x, *others):
        target = x * 2
        assign(target, *others)
        return target * 3

    return call


def put(*index):
    """An assignment at a constant index."""

    def assign(x, value):
        x[index if len(index) != 1 else index[0]] = value

    return assigned(assign)


def item(x, i, v):
    x[i] = v


def column(x, i, v):
    x[:, i] = v


def corner(x, i, v):
    x[1:, i, 0] = v


def apart(x, i, j, v):
    x[i, :, j] = v


def pair(x, i, j, v):
    x[i, j] = v


ALL = slice(None)
COMPOSITES = [
    op("x[tensor]", lambda x, i: x[i], "abc 4", ints={1: "a"}),
    op("x[tensor of two dims]", lambda x, i: x[i], "ab 34", ints={1: "a"}),
    op("x[from the end]", lambda x, i: x[i - 3], "abc 4", ints={1: 3}),
    op("x[:, tensor]", lambda x, i: x[:, i], "abc 4", ints={1: "b"}),
    op("x[0, :, tensor]", lambda x, i: x[0, :, i], "abc 4", ints={1: "c"}),
    op("x[..., tensor, None]", lambda x, i: x[..., i, None], "ab 4", ints={1: "b"}),
    op("x[tensor, tensor]", lambda x, i, j: x[i, j], "abc 4 4", ints={1: "a", 2: "b"}),
    op(
        "x[tensor, 1:, tensor]",
        lambda x, i, j: x[i, 1:, j],
        "abc 31 2",
        ints={1: "a", 2: "c"},
    ),
    op(
        "x[:, tensor, tensor]",
        lambda x, i, j: x[:, i, j],
        "abc 4 .",
        ints={1: "b", 2: "c"},
    ),
    op("x[scalar]", lambda x, i: x[i], "ab .", ints={1: "a"}),
    op("x[:scalar]", lambda x, i: x[: i + 1], "ab .", ints={1: 3}),
    op("x[list]", lambda x: x[[0, 2, -1, 0]], "ab"),
    op("x[:, list, None]", lambda x: x[:, [1, 0], None], "ab"),
    op("x[i] = number", assigned(lambda x: x.__setitem__(1, 2.5)), "ab"),
    op("x[...] = number", assigned(lambda x: x.__setitem__(..., 2.5)), "ab"),
    op(
        "x[a:b, i] = number",
        assigned(lambda x: x.__setitem__((slice(1, 4), -2), 2.5)),
        "ab",
    ),
    op("x[i] = row", put(1), "ab b"),
    op("x[:, j] = column", put(ALL, 2), "ab a"),
    op("x[i, j] = scalar", put(-1, 2), "ab ."),
    op("x[i, j] = one", put(-1, 2), "ab 1"),
    op("x[a:b] = tensor", put(slice(1, 4)), "abc 3bc"),
    op("x[a:b] = row", put(slice(1, 4)), "ab b"),
    op("x[a:] = leading ones", put(slice(1, 4)), "ab 113b"),
    op("x[:, a:b:s] = tensor", put(ALL, slice(1, None, 2)), "a7c a3c"),
    op("x[a:a] = nothing", put(slice(2, 2)), "ab 0b"),
    op("x[:] = tensor", put(ALL), "ab ab"),
    op("x[None, i] = tensor", put(None, 1), "ab 1b"),
    op("x[i] = integers", put(1), "ab b", ints={1: 9}),
    op("x[tensor] = tensor", assigned(item), "abc 1 1bc", ints={1: "a"}),
    op(
        "x[tensor] = number",
        assigned(lambda x, i: item(x, i, 2.5)),
        "ab 3",
        ints={1: "a"},
    ),
    op("x[:, tensor] = row", assigned(column), "ab 1 a1", ints={1: "b"}),
    op(
        "x[tensor, :, tensor] = matrix",
        assigned(apart),
        "abc 1 1 1b",
        ints={1: "a", 2: "c"},
    ),
    op("x[1:, tensor, 0] = tensor", assigned(corner), "5bc 1 41", ints={1: "b"}),
    op("x[tensor, tensor] = scalar", assigned(pair), "ab 3 3 .", ints={1: "a", 2: "b"}),
    op("x[mask] = number", assigned(lambda x, m: item(x, m, 2.5)), "ab ab", bools=(1,)),
    op("x[mask of rows] = scalar", assigned(item), "ab a .", bools=(1,)),
    op(
        "x[:, mask] = number",
        assigned(lambda x, m: column(x, m, 0)),
        "ab b",
        bools=(1,),
    ),
    op("x[scalar] = row", assigned(item), "ab . b", ints={1: "a"}),
]
