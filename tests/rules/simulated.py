# SPDX-License-Identifier: Apache-2.0
"""Ranks simulated in one process: every choice of every axis of a rule against the undistributed operator.

    check(Case("mm", einsum("m k, k n -> m n"), torch.mm, "ab bc", "m k n"), sizes={"a": 4, "b": 8, "c": 12})

Operands are cut as a choice says, the function runs on every rank's pieces, the results are put together as the
choice says and compared; then the gradient of a randomly weighted sum.
"""

import itertools
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from hyper_parallel.core.shard.rule import REPLICATE, SUM, Rule

MESHES = [(2,), (4,), (2, 2)]


@dataclass
class Case:
    """``shapes``: letters are sizes, "." a scalar, "-" an absent operand, [ab,cb] a list. ``ints``: operand -> bound.

    ``run`` gets the operands; with ``local`` it first gets the place of this rank, which has offsets and sizes.
    ``shards`` and ``carries``: the factors that may be sharded and the number of ways for a Partial to pass.
    """

    name: str
    rule: Rule
    run: Any
    shapes: str
    shards: str
    carries: int = 0
    attrs: dict = field(default_factory=dict)
    ints: dict = field(default_factory=dict)
    local: bool = False


# --- what a rank holds


def chunk(x, dim, n):
    pieces = list(x.chunk(n, dim))
    return pieces + [x.narrow(dim, x.shape[dim], 0)] * (n - len(pieces))


def parts(x, op, n):
    """Parts of both signs that give x when reduced."""
    drawn = [torch.randn_like(x) for _ in range(n - 1)]
    if op in ("sum", "avg"):
        return [*drawn, (n if op == "avg" else 1) * x - sum(drawn)]
    if op == "prod":
        drawn = [d.sign() * (0.5 + d.abs()) for d in drawn]
        return [*drawn, x / prod(drawn)]
    winner, below = torch.randint(n, x.shape), torch.rand(n, *x.shape, dtype=x.dtype) + 0.1
    return [torch.where(winner == i, x, x - below[i] * (1 if op == "max" else -1)) for i in range(n)]


REDUCE = {"sum": sum, "avg": lambda p: sum(p) / len(p), "prod": prod}
REDUCE |= {"max": lambda p: torch.stack(p).amax(0), "min": lambda p: torch.stack(p).amin(0)}


def cut(x, places, mesh):
    """Every rank's piece of a tensor; the first axis is the outer one."""
    if not mesh:
        return [x]
    n, place = mesh[0], places[0]
    if place == REPLICATE:
        return cut(x, places[1:], mesh[1:]) * n
    pieces = parts(x, place.op, n) if place.op else chunk(x, place.dim, n)
    return [held for piece in pieces for held in cut(piece, places[1:], mesh[1:])]


def blocks(pieces, mesh):
    width = len(pieces) // mesh[0]
    return [pieces[i * width : (i + 1) * width] for i in range(mesh[0])]


def join(pieces, places, mesh):
    """The tensor of which these are the ranks' pieces."""
    if not mesh:
        return pieces[0]
    held = [join(block, places[1:], mesh[1:]) for block in blocks(pieces, mesh)]
    if places[0] == REPLICATE:
        for other in held[1:]:
            close(other, held[0])
        return held[0]
    return REDUCE[places[0].op](held) if places[0].op else torch.cat(held, places[0].dim)


def hand_down(gradient, pieces, places, arriving, mesh):
    """Every rank's gradient of its piece: as it arrives, and through the reduction where a piece is a part."""
    if not mesh:
        return [gradient]
    place, held = places[0], blocks(pieces, mesh)
    shares = cut(gradient, arriving[:1], mesh[:1])
    if place.op not in (None, "sum"):  # the backward of a sum gives every part what arrives
        assert arriving[0] == REPLICATE
        values = [join(block, places[1:], mesh[1:]).detach().requires_grad_() for block in held]
        shares = torch.autograd.grad(REDUCE[place.op](values), values, gradient)
    shared = zip(shares, held, strict=True)
    return [g for share, block in shared for g in hand_down(share, block, places[1:], arriving[1:], mesh[1:])]


def sum_over(gradients, leaving, mesh):
    """The ranks' gradients after the sums that the choices ask for."""
    ranks = list(itertools.product(*map(range, mesh)))
    for axis, place in enumerate(leaving):
        if place == SUM:
            lines = [
                [s for s, other in enumerate(ranks) if other[:axis] + other[axis + 1 :] == r[:axis] + r[axis + 1 :]]
                for r in ranks
            ]
            gradients = [sum(gradients[s] for s in line) for line in lines]
    return gradients


class Here:
    """Where this rank's pieces lie in the factors."""

    def __init__(self, bound, choices=(), mesh=(), coordinates=()):
        self.bound, self.axes = bound, list(zip(choices, mesh, coordinates, strict=True))

    def whole(self, name):
        return self.bound.factor(name).size

    def span(self, name):
        start, size = 0, self.whole(name)
        for choice, n, i in self.axes:
            if choice.factor == name:
                step = -(-size // n)
                low, high = min(i * step, size), min((i + 1) * step, size)
                start, size = start + low, high - low
        return start, size

    def offset(self, name):
        return self.span(name)[0]

    def size(self, name):
        return self.span(name)[1]


# --- the check


def close(actual, expected):
    if actual.shape == expected.shape and torch.allclose(actual, expected, rtol=1e-9, atol=1e-9):
        return  # assert_close is slow, but says what differs
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=1e-9, atol=1e-9)


def flat(items):
    found = [x for item in items for x in (item if isinstance(item, (tuple, list)) else [item])]
    return [x for x in found if x is not None]


def like(structure, leaves):
    leaves = iter(leaves)
    return [
        None if s is None else [next(leaves) for _ in s] if isinstance(s, list) else next(leaves) for s in structure
    ]


def evaluate(case, here, operands):
    out = case.run(*([here] if case.local else []), *operands)
    return flat(out if isinstance(out, (tuple, list)) else [out])


def differentiate(results, gradients, leaves):
    wanted = [x for x in leaves if x.requires_grad]
    pairs = [(y, g) for y, g in zip(results, gradients, strict=True) if y.requires_grad]
    if not pairs or not wanted:
        return [torch.zeros_like(x) for x in wanted]
    outputs, arriving = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, wanted, arriving, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


def draw(case, sizes):
    def one(number, text):
        shape = [] if text == "." else [sizes.get(c) or int(c) for c in text]
        if number not in case.ints:
            return torch.randn(shape, dtype=torch.float64, requires_grad=True)
        bound = case.ints[number]
        return torch.randint(sizes.get(bound, bound), shape)

    texts = enumerate(case.shapes.split())
    return [
        [one(i, t) for t in text[1:-1].split(",")] if text[0] == "[" else None if text == "-" else one(i, text)
        for i, text in texts
    ]


def settle(value, sizes):
    return [settle(v, sizes) for v in value] if isinstance(value, (tuple, list)) else sizes.get(value, value)


def bind(case, sizes, operands):
    shapes = [
        [tuple(y.shape) for y in x] if isinstance(x, list) else x if x is None else tuple(x.shape) for x in operands
    ]
    return case.rule.bind(shapes, {name: settle(value, sizes) for name, value in case.attrs.items()})


def fits(bound, combination, mesh):
    """Whether every sharded factor can be cut so, the same factor over several axes included."""
    axes = {}
    for choice, n in zip(combination, mesh, strict=True):
        if choice.factor:
            axes.setdefault(choice.factor, []).append(n)
    return all(bound.fits(factor, *ranks) for factor, ranks in axes.items())


def check(case, sizes, choices=None, allowed=fits):
    """Compares every choice on every mesh with the undistributed operator; the number of comparisons."""
    torch.manual_seed(0)
    operands = draw(case, sizes)
    bound = bind(case, sizes, operands)
    expected = evaluate(case, Here(bound), operands)
    assert [tuple(y.shape) for y in expected] == [s for r in bound.result_shapes for s in as_shapes(r)]
    gradients = [torch.randn_like(y) if y.is_floating_point() else None for y in expected]
    truth = differentiate(expected, gradients, flat(operands))
    done = 0
    for mesh in MESHES:
        for combination in itertools.product(choices or bound.choices(), repeat=len(mesh)):
            if allowed(bound, combination, mesh):
                try:
                    compare(case, bound, mesh, combination, operands, expected, gradients, truth)
                except AssertionError as error:
                    raise AssertionError(
                        f"{case.rule} on {mesh}: {' and '.join(map(str, combination))}: {error}"
                    ) from None
                done += 1
    return done


def as_shapes(shape):
    return shape if shape and isinstance(shape[0], tuple) else [shape]


def compare(case, bound, mesh, combination, operands, expected, gradients, truth):
    def places(side):
        return list(zip(*[flat(getattr(choice, side)) for choice in combination], strict=True))

    leaves, places_in, places_out = flat(operands), places("operands"), places("results")
    held = [cut(x.detach(), p, mesh) for x, p in zip(leaves, places_in, strict=True)]
    ranks = list(itertools.product(*map(range, mesh)))
    inputs, outputs = [], []
    for number, coordinates in enumerate(ranks):
        mine = [p[number].clone().requires_grad_(x.requires_grad) for p, x in zip(held, leaves, strict=True)]
        inputs.append(mine)
        outputs.append(evaluate(case, Here(bound, combination, mesh, coordinates), like(operands, mine)))
    pieces = list(zip(*outputs, strict=True))
    for y, mine, p in zip(expected, pieces, places_out, strict=True):
        shares = cut(y, [REPLICATE if place.op else place for place in p], mesh)
        assert [x.shape for x in mine] == [x.shape for x in shares], "a rank's result is not the piece it should be"
        close(join(mine, p, mesh), y)
    # Backward: what arrives at each rank, what leaves it, and what that is in the operand's placement.
    arriving = [
        [None] * len(ranks) if g is None else hand_down(g, mine, p, a, mesh)
        for g, mine, p, a in zip(gradients, pieces, places_out, places("grads_in"), strict=True)
    ]
    local = [differentiate(outputs[r], [g[r] for g in arriving], inputs[r]) for r in range(len(ranks))]
    wanted = [i for i, x in enumerate(leaves) if x.requires_grad]
    for found, true, i in zip(zip(*local, strict=True), truth, wanted, strict=True):
        leaving = places("grads_out")[i]
        summed = [REPLICATE if place == SUM else place for place in leaving]
        for mine, right in zip(
            sum_over(found, leaving, mesh), hand_down(true, held[i], places_in[i], summed, mesh), strict=True
        ):
            close(mine, right)
