# SPDX-License-Identifier: Apache-2.0
"""Calls of views: other shapes, orders and parts."""

from rules.framework import its, torch
from rules.operators import OpCase

BOTH = ("even", "uneven")  # merged dims are cut where they divide
R1, R2 = "...[-1]", "...[-2] ...[-1]"


def op(name, call, shapes, shards=None, carries=None, sizes=("uneven",), **more):
    return OpCase(name, call, shapes, shards, carries, sizes=sizes, **more)


CASES = [
    op("view splits a dim", lambda x: x.view(4, 2, -1), "8a", "f0 d1", 5),
    op(
        "view splits the last dim", lambda x: x.view(x.shape[0], 2, 4), "a8", "d0 f1", 5
    ),
    op("view merges", lambda x: x.view(-1, x.shape[2]), "abc", "f0 d2", 5, sizes=BOTH),
    op("view merges and splits", lambda x: x.view(6, 6), "49", "f0", 5),
    op("view regroups", lambda x: x.view([6, 6, 5]), "495", "f0 d2", 5),
    op("view with nothing in common", lambda x: x.view(9, 4, 5), "495", "d2", 5),
    op("view with ones", lambda x: x.view(1, 8, 1, 3, 1), "1813", "d0 d1 d2 d3", 5),
    op("view without ones", lambda x: x.view(12), "2161", "f0", 5),
    op("view of one element", lambda x: x.view(()), "11", "", 5),
    op("view of a scalar", lambda x: x.view(1, 1), ".", "", 5),
    op("view of nothing", lambda x: x.view(5, 0, 7), "05", None, 5),
    op("view of nothing as other dims", lambda x: x.view(0, 3), "02", "d0", 5),
    op("view of nothing as more dims", lambda x: x.view(0, 2, 2), "04", "d0 f1", 5),
    op("view of nothing as less dims", lambda x: x.view(0), "305", None, 5),
    op(
        "view as another type",
        lambda x: x.view(torch.float64),
        "ab",
        R2,
        0,
        ints={0: 9},
    ),
    op(
        "view as a shorter type",
        lambda x: x.view(torch.int32),
        "ab",
        R1,
        0,
        ints={0: 9},
    ),
    op(
        "view as a longer type",
        lambda x: x.view(dtype=torch.complex128),
        "a6",
        R1,
        0,
        ints={0: 9},
    ),
    op("reshape", lambda x: x.reshape(2, 4, -1), "8a", "f0 d1", 5),
    op(
        "reshape of heads",
        lambda x: torch.reshape(x, (*x.shape[:2], 4, 2)),
        "ab8",
        "d0 d1 f2",
        5,
    ),
    op("ravel", torch.ravel, "abc", "f0", 5, sizes=BOTH),
    op("flatten", lambda x: x.flatten(1), "abc", "d0 f1", 5, sizes=BOTH),
    op("flatten a scalar", torch.flatten, ".", "", 5),
    op(
        "flatten the middle",
        lambda x: torch.flatten(x, 1, -2),
        "2abc",
        "d0 f1 d3",
        5,
        sizes=BOTH,
    ),
    op("unflatten", lambda x: its(x).unflatten(1, (4, -1)), "a8c", "d0 f1 d2", 5),
    op(
        "unflatten by keyword",
        lambda x: torch.unflatten(x, dim=-1, sizes=(2, 4)),
        "a8",
        "d0 f1",
        5,
    ),
    op("squeeze", lambda x: x.squeeze(), "1a1b", None, 5),
    op("squeeze a dim", lambda x: x.squeeze(1), "a1b", None, 5),
    op("squeeze a dim that is not one", lambda x: torch.squeeze(x, 0), "ab", None, 5),
    op("squeeze several", lambda x: x.squeeze((0, -1, 1)), "1a1", None, 5),
    op("unsqueeze", lambda x: x.unsqueeze(-1), "ab", "d0 d1", 5),
    op("unsqueeze in front", lambda x: torch.unsqueeze(x, 0), "ab", "d0 d1", 5),
    op("permute", lambda x: x.permute(2, 0, 1), "abc", "d0 d1 d2", 5),
    op(
        "permute by a tuple",
        lambda x: torch.permute(x, (-1, 0, 1)),
        "abc",
        "d0 d1 d2",
        5,
    ),
    op("transpose", lambda x: x.transpose(-1, 0), "abc", "d0 d1 d2", 5),
    op("swapaxes", lambda x: torch.swapaxes(x, axis0=0, axis1=1), "ab", "d0 d1", 5),
    op("movedim", lambda x: x.movedim((0, 1), (-1, 0)), "abc", "d0 d1 d2", 5),
    op("moveaxis", lambda x: torch.moveaxis(x, 0, 1), "abc", "d0 d1 d2", 5),
    op("t", lambda x: x.t(), "ab", "d0 d1", 5),
    op("t of a row", lambda x: x.t(), "a", "d0", 5),
    op("T", lambda x: x.T, "ab", "d0 d1", 5),
    op("H", lambda x: x.H, "ab", "d0 d1", 5),
    op("mT", lambda x: x.mT, "abc", "d0 d1 d2", 5),
    op("adjoint", lambda x: x.adjoint(), "abc", "d0 d1 d2", 5),
    op("mH", lambda x: x.mH, "abc", "d0 d1 d2", 5),
    op("expand", lambda x: x.expand(-1, 6, x.shape[2]), "a1b", "d0 n1 d2", 5),
    op(
        "expand to more dims",
        lambda x: x.expand((3, 4, *x.shape)),
        "ab",
        "n0 n1 d0 d1",
        5,
    ),
    op("expand a scalar", lambda x: x.expand(5, 4), ".", "n0 n1", 5),
    op(
        "broadcast_to",
        lambda x: torch.broadcast_to(x, (3, x.shape[0], 4)),
        "a1",
        "n0 d0 n2",
        5,
    ),
    op("narrow", lambda x: x.narrow(1, 2, 3), "a5", R1, 5),
    op("narrow to all", lambda x: torch.narrow(x, 0, 0, x.shape[0]), "ab", R2, 5),
    op("select", lambda x: its(x).select(1, -1), "abc", R2, 5),
    op("unfold", lambda x: its(x).unfold(1, 3, 2), "a9c", "d0 d2", 5),
    op("unfold a scalar", lambda x: its(x).unfold(0, 1, 1), ".", "", 5),
    op("diagonal", lambda x: x.diagonal(), "abc", "d2", 5),
    op("diagonal above", lambda x: torch.diagonal(x, 1, 0, -1), "abc", "d1", 5),
    op(
        "diagonal below",
        lambda x: its(x).diagonal(offset=-1, dim1=2, dim2=1),
        "abc",
        "d0",
        5,
    ),
    op("diagonal of matrices", torch.linalg.diagonal, "abc", "d0", 5),
    op(
        "clone",
        lambda x: its(x).clone(memory_format=torch.contiguous_format),
        "ab",
        R2,
        5,
    ),
]

COMPOSITES = [
    op("view_as", lambda x, y: x.view_as(y), "8a 24a"),
    op("reshape_as", lambda x, y: x.t().reshape_as(y), "8a a42"),
    op("expand_as", lambda x, y: x.expand_as(y), "a1 bac"),
    op("atleast_1d", torch.atleast_1d, "."),
    op("atleast_2d", torch.atleast_2d, "a"),
    op("atleast_3d", torch.atleast_3d, "a"),
    op("atleast_3d of several", torch.atleast_3d, ". ab abc"),
    op("broadcast_tensors", torch.broadcast_tensors, "a1 b"),
    op("meshgrid", lambda x, y, z: torch.meshgrid(x, y, z, indexing="ij"), "a b c"),
    op("meshgrid xy", lambda x, y: torch.meshgrid([x, y], indexing="xy"), "a b"),
    op("contiguous", lambda x: x.t().contiguous(), "ab"),
    op("contiguous already", lambda x: x.contiguous(), "ab"),
    op(
        "heads and back",
        lambda x: x.view(*x.shape[:2], 4, 2).transpose(1, 2).mT.reshape(x.shape),
        "ab8",
    ),
    op(
        "narrow from a tensor", lambda x, i: its(x).narrow(1, i, 2), "a5 .", ints={1: 3}
    ),
]
