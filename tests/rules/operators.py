# SPDX-License-Identifier: Apache-2.0
"""Operators of the real tables, every choice of every axis, with ranks simulated in one process.

check(OpCase("linear", F.linear, "abc bc b"), {"a": 4, "b": 8, "c": 12})

The call is caught where a distributed tensor would be dispatched; its rule, its local function and its arguments are
those of the table. Operands are cut as a choice says, the local call runs for every rank, the results are put together
as the choice says and compared with the plain call; then the gradient of a randomly weighted sum.
"""

import itertools
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch
from rules.simulated import close, cut, differentiate, fits, flat, hand_down, join, sum_over

from hyper_parallel import DTensor, Replicate
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import commute
from hyper_parallel.core.shard import _op_dispatch
from hyper_parallel.core.shard.here import Here
from hyper_parallel.core.shard.ops.operator import OPERATORS
from hyper_parallel.core.shard.propagate import plan_for
from hyper_parallel.core.shard.rule import REPLICATE, SUM, Rule
from hyper_parallel.platform import get_platform

MESHES = [(2,), (4,), (2, 2)]
SIZES = {"even": {"a": 4, "b": 8, "c": 12}, "uneven": {"a": 5, "b": 6, "c": 7}, "empty": {"a": 3, "b": 2, "c": 1}}


@dataclass
class OpCase:
    """A call of a user. ``shapes``: letters are sizes, "." a scalar, [ab,cb] a list; ``call`` gets the operands.

    ``ints``: operand -> upper bound (a number or a letter) of integers instead of floats; a bound of 2 gives booleans
    where ``bools`` names the operand. ``positive``: the operands that must be above zero. ``sizes``: which of SIZES fit
    (an operator may need a divisible size). ``shards``, ``carries``: the factors that may be sharded (None: not
    compared) and the number of ways for a Partial to pass.
    """

    name: str
    call: object
    shapes: str
    shards: str | None = None
    carries: int | None = None
    ints: dict = field(default_factory=dict)
    bools: tuple = ()
    positive: tuple = ()
    sizes: tuple = ("even", "uneven", "empty")


def draw(case, sizes, rng):
    """The operands as arrays; a list for a list."""

    def one(number, text):
        shape = [] if text == "." else [sizes.get(letter) or int(letter) for letter in text]
        if number in case.ints or number in case.bools:
            bound = case.ints.get(number, 2)
            drawn = rng.integers(0, sizes.get(bound, bound), shape)
            return drawn.astype(bool) if number in case.bools else drawn
        drawn = rng.uniform(0.3, 2.0, shape)
        return drawn if number in case.positive else drawn * rng.choice([-1.0, 1.0], shape)

    return [
        [one(i, t) for t in text[1:-1].split(",")] if text[0] == "[" else one(i, text)
        for i, text in enumerate(case.shapes.split())
    ]


def leaf(array):
    made = torch.tensor(array)
    return made.requires_grad_() if made.is_floating_point() else made


def like(structure, leaves):
    leaves = iter(leaves)
    return [[next(leaves) for _ in s] if isinstance(s, list) else next(leaves) for s in structure]


class _Caught(Exception):
    pass


def caught(case, operands):
    """The function, the arguments and the operator of the call on distributed tensors."""
    found = []

    def catch(func, args, kwargs):
        found.append((func, args, kwargs or {}))
        raise _Caught

    with mock.patch.object(DTensor, "dispatch", catch):
        try:
            case.call(*operands)
        except _Caught:
            pass
    func, args, kwargs = found[0]
    called = get_platform().called(func)
    return func, args, kwargs, called, OPERATORS[called.name]


class Simulation:
    """One call, bound to one mesh."""

    def __init__(self, case, arrays, mesh_shape):
        self.case = case
        self.mesh = Layout(mesh_shape, tuple("xyz"[: len(mesh_shape)])).mesh
        whole = Layout.from_device_mesh(self.mesh)([Replicate()] * self.mesh.ndim)
        fakes = [DTensor(leaf(array), whole.bind(array.ndim), array.shape) for array in flat(arrays)]
        call = caught(case, like(arrays, fakes))
        self.func, self.args, self.kwargs, self.called, self.op = call
        keywords = get_platform().named(self.kwargs)
        arguments = self.op.arguments(self.called, self.args, keywords)
        ruled = self.op.rule if isinstance(self.op.rule, Rule) else self.op.rule(**arguments)
        self.bound, operands = _op_dispatch._bound(self.op, self.called, arguments, ruled)
        # The operands of the rule, in the order in which the arguments have them.
        self.tensors = list(_op_dispatch._tensors((self.args, self.kwargs)))
        assert len({id(t) for t in self.tensors}) == len(self.tensors), "a case uses each operand once"
        waiting = list(enumerate(_op_dispatch._flat(operands)))
        self.order = []
        for tensor in self.tensors:
            index = next(i for i, (_, operand) in enumerate(waiting) if operand is tensor)
            self.order.append(waiting.pop(index)[0])
        self.numbers = [next(i for i, fake in enumerate(fakes) if fake is t) for t in self.tensors]

    def choices(self):
        return self.bound.choices()

    def orders(self, combination):
        factors = {choice.factor for choice in combination if choice.factor is not None}
        return {name: [a for a, c in enumerate(combination) if c.factor == name] for name in factors}

    def evaluate(self, combination, place, shards):
        """The results of the local call of the rank at this place of the mesh."""
        following = iter(shards)
        args = _op_dispatch._replaced(self.args, following)
        kwargs = {name: _op_dispatch._replaced(value, following) for name, value in self.kwargs.items()}
        if self.op.local is None:
            out = self.func(*args, **kwargs)
        else:
            plan = plan_for(self.bound, combination, self.mesh, self.orders(combination))
            here = Here(self.bound, plan, self.mesh.mesh_shape, place, get_platform().operator(self.called.name))
            out = self.op.local(here, **self.op.arguments(self.called, args, get_platform().named(kwargs)))
        return flat(out if isinstance(out, (tuple, list)) else [out])


def check(case, sizes, choices=None, meshes=MESHES):
    """Compares every choice on every mesh with the plain call; the number of comparisons."""
    rng = np.random.default_rng(0)
    arrays = draw(case, sizes, rng)
    operands = [leaf(array) for array in flat(arrays)]
    expected = case.call(*like(arrays, operands))
    expected = flat(expected if isinstance(expected, (tuple, list)) else [expected])
    weights = [torch.tensor(rng.standard_normal(y.shape)) if y.is_floating_point() else None for y in expected]
    truth = differentiate(expected, weights, operands)
    done = 0
    for mesh in meshes:
        simulation = Simulation(case, arrays, mesh)
        bound = simulation.bound
        shapes = [tuple(s) for r in bound.result_shapes for s in (r if r and isinstance(r[0], tuple) else [r])]
        assert [tuple(y.shape) for y in expected] == shapes, "the rule gives another shape than the operator"
        for combination in itertools.product(choices or simulation.choices(), repeat=len(mesh)):
            if fits(bound, combination, mesh) and _commute(combination):
                try:
                    _compare(simulation, mesh, combination, operands, expected, weights, truth)
                except AssertionError as error:
                    raise AssertionError(
                        f"{case.name}: {bound.rule} on {mesh}: {' and '.join(map(str, combination))}: {error}"
                    ) from None
                done += 1
    return done


def _commute(combination):
    return all(commute(p.op for p in places) for places in zip(*(flat(c.results) for c in combination), strict=True))


def _compare(simulation, mesh, combination, operands, expected, weights, truth):
    def places(side):
        return list(zip(*[flat(getattr(choice, side)) for choice in combination], strict=True))

    tensors = [operands[i] for i in simulation.numbers]
    of_operands = places("operands")
    places_in = [of_operands[i] for i in simulation.order]
    leaving = [places("grads_out")[i] for i in simulation.order]
    places_out = places("results")
    held = [cut(x.detach(), p, mesh) for x, p in zip(tensors, places_in, strict=True)]
    ranks = list(itertools.product(*map(range, mesh)))
    inputs, outputs = [], []
    for number, place in enumerate(ranks):
        mine = [p[number].clone().requires_grad_(x.requires_grad) for p, x in zip(held, tensors, strict=True)]
        inputs.append(mine)
        outputs.append(simulation.evaluate(combination, place, mine))
    pieces = list(zip(*outputs, strict=True))
    for y, mine, p in zip(expected, pieces, places_out, strict=True):
        shares = cut(y, [REPLICATE if place.op else place for place in p], mesh)
        assert [x.shape for x in mine] == [x.shape for x in shares], "a rank's result is not the piece it should be"
        assert all(x.dtype == y.dtype for x in mine), f"the dtype is {mine[0].dtype}, not {y.dtype}"
        close(join(mine, p, mesh), y)
    arriving = [
        [None] * len(ranks) if w is None else hand_down(w, mine, p, a, mesh)
        for w, mine, p, a in zip(weights, pieces, places_out, places("grads_in"), strict=True)
    ]
    local = [differentiate(outputs[r], [g[r] for g in arriving], inputs[r]) for r in range(len(ranks))]
    wanted = [i for i, x in enumerate(tensors) if x.requires_grad]
    true_of = dict(zip([n for n, x in enumerate(operands) if x.requires_grad], truth, strict=True))
    for found, i in zip(zip(*local, strict=True), wanted, strict=True):
        parts = [REPLICATE if place == SUM else place for place in leaving[i]]
        right = hand_down(true_of[simulation.numbers[i]], held[i], places_in[i], parts, mesh)
        for mine, true in zip(sum_over(found, leaving[i], mesh), right, strict=True):
            close(mine, true)
