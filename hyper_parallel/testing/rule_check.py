# SPDX-License-Identifier: Apache-2.0
"""Checks a rule against the operator itself: every choice of every mesh axis, with the ranks simulated in one process.

    count = check_rule(torch.nn.functional.silu, np.random.randn(5, 4))

The call is caught where distributed tensors would be dispatched, so that its rule, its local function and its arguments
are the real ones. Operands are cut as a choice says, in parts of different signs where a reduction is pending; the
local call runs for every rank; the results are put together and compared with the plain call, and then the gradients of
a randomly weighted sum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.modes import SkipDTensorDispatch
from hyper_parallel.core.dtensor.placement_types import Replicate, commute
from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER, bound_call
from hyper_parallel.core.shard.arguments import flat, replaced, tensors_in
from hyper_parallel.core.shard.here import Here
from hyper_parallel.core.shard.ops.operator import OPERATORS, Operator
from hyper_parallel.core.shard.propagate import plan_for
from hyper_parallel.core.shard.rule import REPLICATE, SUM, BoundRule, Choice, Place, Rule
from hyper_parallel.platform import PlatformType, get_platform
from hyper_parallel.platform.error_codes import coded, without_code
from hyper_parallel.platform.platform import Called
from hyper_parallel.platform.transform import chunk_sizes

Array = Any
Mesh = tuple[int, ...]
MESHES: tuple[Mesh, ...] = ((2,), (4,), (2, 2))
# MindSpore takes a number that a tensor is multiplied by as a float32.
_TOLERANCES = {PlatformType.PYTORCH: 1e-9, PlatformType.MINDSPORE: 1e-6}


def check_rule(
    call: Callable[..., Any],
    *operands: Any,
    meshes: Sequence[Mesh] = MESHES,
    tolerance: float | None = None,
    seed: int = 0,
    gradients: bool = True,
    second: Sequence[Mesh] = (),
) -> int:
    """How many comparisons held; an AssertionError that names the choice where one does not.

    ``operands``: arrays, or lists of arrays. ``call`` is given tensors of them, plain or distributed, and must run one
    operator that has a rule, in which each operand is used once. ``gradients=False`` is for an operator of which the
    framework has no gradient. ``second``: the meshes on which gradients of gradients are compared too, where the
    framework has them.
    """
    rng = np.random.default_rng(seed)
    tolerance = _TOLERANCES[get_platform().platform_type] if tolerance is None else tolerance
    expected, weights, true = _truth(call, operands, rng, gradients)
    of_second = _second_truth(call, operands, weights, rng) if second and gradients else None
    done = 0
    for mesh in meshes:
        caught = _Caught(call, operands, mesh)
        shapes = [tuple(shape) for shape in _flat_shapes(caught.bound.result_shapes)]
        if [y.shape for y in expected] != shapes:
            raise AssertionError(
                coded("HP604", f"the rule gives results of shapes {shapes}, the operator {[y.shape for y in expected]}")
            )
        for combination in itertools.product(caught.bound.choices(), repeat=len(mesh)):
            if _fits(caught.bound, combination, mesh) and not _is_seen_elsewhere(caught, combination, mesh, meshes):
                try:
                    comparison = _Comparison(caught, combination, mesh, rng, tolerance)
                    comparison.run(operands, expected, weights, true)
                    if of_second is not None and mesh in second:
                        comparison.run_second(operands, weights, of_second)
                except AssertionError as error:
                    done_by = f"{' and '.join(map(str, combination))}: {without_code(str(error))}"
                    raise AssertionError(
                        coded("HP604", f"{caught.called.name}: {caught.bound.rule} on {mesh}: {done_by}")
                    ) from None
                done += 1
    return done


def choices_of(call: Callable[..., Any], *operands: Any) -> tuple[Choice, ...]:
    """All that one axis may do under the rule of the operator that a call runs."""
    return _Caught(call, operands, (2,)).bound.choices()


# --- the plain call


def _truth(
    call: Callable[..., Any], operands: Sequence[Any], rng: Any, differentiate: bool
) -> tuple[list[Array], list[Any], list[Any]]:
    """The results, the weights of the sum that is differentiated, and the gradient of every operand."""
    arrays = flat(operands)

    def results(*tensors: Any) -> list[Any]:
        found = call(*_like(operands, tensors))
        return flat(found if isinstance(found, (list, tuple)) else [found])

    platform = get_platform()
    values = [platform.tensor_to_numpy(y) for y in results(*map(platform.tensor, arrays))]
    weights = [_drawn(y, rng) if differentiate and _differentiable(y) else None for y in values]
    return values, weights, _gradients(results, arrays, weights)


def _gradients(function: Callable[..., Any], arrays: Sequence[Array], weights: Sequence[Any]) -> list[Any]:
    """The gradient of the weighted sum of the results for every array; None for those that have none."""
    platform = get_platform()
    wanted = [i for i, array in enumerate(arrays) if _differentiable(array)]

    def loss(*tensors: Any) -> Any:
        given = dict(zip(wanted, tensors, strict=True))
        found = function(*(given[i] if i in given else platform.tensor(array) for i, array in enumerate(arrays)))
        pairs = [(y, w) for y, w in zip(found, weights, strict=True) if w is not None]
        terms = [term for y, w in pairs for term in _weighted(y, w)]
        return sum(terms + [term * 0 for t in tensors for term in _weighted(t, None)])

    made: list[Any] = [None] * len(arrays)
    if wanted and any(w is not None for w in weights):
        found = platform.gradients(loss, [platform.tensor(arrays[i]) for i in wanted])
        for i, gradient in zip(wanted, found, strict=True):
            made[i] = platform.tensor_to_numpy(gradient)
    return made


@dataclass
class _Second:
    """Gradients of gradients: of the products of each operand's gradient with its direction."""

    directions: list[Any]
    by_operands: list[Any]
    by_weights: list[Any]


def _second_truth(call: Callable[..., Any], operands: Sequence[Any], weights: list[Any], rng: Any) -> _Second | None:
    """Those of the plain call; None where the framework has none, or they are complex."""
    arrays = flat(operands)
    if any(np.iscomplexobj(one) for one in (*arrays, *weights)):
        return None
    directions = [_drawn(array, rng) if _differentiable(array) else None for array in arrays]

    def results(*tensors: Any) -> list[Any]:
        found = call(*_like(operands, tensors))
        return flat(found if isinstance(found, (list, tuple)) else [found])

    try:
        found = _second_gradients(results, arrays, weights, directions)
    except (RuntimeError, NotImplementedError):
        return None
    return None if found is None else _Second(directions, *found)


def _second_gradients(
    function: Callable[..., Any], arrays: Sequence[Array], weights: Sequence[Any], directions: Sequence[Any]
) -> tuple[list[Any], list[Any]] | None:
    """Gradients by the arrays and by the weights; None where the first gradients are constant."""
    platform = get_platform()
    wanted = [i for i, direction in enumerate(directions) if direction is not None]
    weighted = [i for i, weight in enumerate(weights) if weight is not None]

    def loss(*tensors: Any) -> Any:
        given = dict(zip(wanted, tensors[: len(wanted)], strict=True))
        factors = dict(zip(weighted, tensors[len(wanted) :], strict=True))
        found = function(*(given[i] if i in given else platform.tensor(array) for i, array in enumerate(arrays)))
        return sum((found[i] * factor).sum() for i, factor in factors.items())

    if not wanted or not weighted:
        return None
    inputs = [platform.tensor(arrays[i]) for i in wanted] + [platform.tensor(weights[i]) for i in weighted]
    along = [platform.tensor(directions[i]) for i in wanted] + [None] * len(weighted)
    found = platform.second_gradients(loss, inputs, along)
    if found is None:
        return None
    values = [platform.tensor_to_numpy(one) for one in found]
    by_arrays = dict(zip(wanted, values, strict=False))
    by_weights = dict(zip(weighted, values[len(wanted) :], strict=True))
    return [by_arrays.get(i) for i in range(len(arrays))], [by_weights.get(i) for i in range(len(weights))]


def _weighted(result: Any, weight: Array | None) -> list[Any]:
    """Sums whose sum is the real part of that of a result by its weights; not every framework has complex products."""
    platform = get_platform()
    if "complex" not in str(result.dtype).lower():
        return [(result if weight is None else result * platform.tensor(weight)).sum()]
    real, imaginary = platform.operator("real")(result), platform.operator("imag")(result)
    if weight is None:
        return [real.sum()]
    return [(real * platform.tensor(weight.real.copy())).sum(), (imaginary * platform.tensor(-weight.imag)).sum()]


def _differentiable(array: Array) -> bool:
    return bool(np.issubdtype(array.dtype, np.inexact))


def _drawn(like: Array, rng: Any) -> Array:
    """Random numbers, as many and of the kind of those of another array."""
    if np.issubdtype(like.dtype, np.integer):
        return np.asarray(rng.integers(-9, 10, like.shape), like.dtype)
    drawn = rng.standard_normal(like.shape)
    return drawn + 1j * rng.standard_normal(like.shape) if np.iscomplexobj(like) else drawn


def _like(structure: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    following = iter(leaves)
    return [[next(following) for _ in s] if isinstance(s, (list, tuple)) else next(following) for s in structure]


# --- the call on distributed tensors


class _CaughtError(Exception):
    """The call was dispatched."""


@contextmanager
def _catching(calls: list[Any]) -> Iterator[None]:
    def catch(func: Any, args: Any, kwargs: Any, called: Called | None = None) -> Any:
        calls.append((func, args, kwargs or {}, called or get_platform().called(func)))
        raise _CaughtError

    usual, DTensor.dispatch = DTensor.dispatch, catch  # type: ignore[method-assign]
    _OP_DISPATCHER.dispatch = catch  # type: ignore[method-assign]
    try:
        with SkipDTensorDispatch():  # so that no plan is taken without asking
            yield
    except _CaughtError:
        pass
    finally:
        DTensor.dispatch = usual  # type: ignore[method-assign]
        del _OP_DISPATCHER.dispatch


class _Caught:
    """The operator that a call runs, bound to a mesh on which everything is replicated."""

    func: Any
    args: Any
    kwargs: Any
    called: Called
    op: Operator
    bound: BoundRule

    def __init__(self, call: Callable[..., Any], operands: Sequence[Any], mesh_shape: Mesh) -> None:
        platform = get_platform()
        names = tuple(f"axis{i}" for i in range(len(mesh_shape)))
        whole = Layout(mesh_shape, names)([Replicate()] * len(mesh_shape))
        self.mesh = whole.mesh
        tensors = [DTensor(platform.tensor(a), whole.bind(a.ndim), a.shape) for a in flat(operands)]
        calls: list[Any] = []
        with _catching(calls):
            call(*_like(operands, tensors))
        if not calls:
            raise ValueError(coded("HP603", "check_rule: the call runs no operator on its operands"))
        self.func, self.args, self.kwargs, self.called = calls[0]
        if self.called.name not in OPERATORS:
            raise ValueError(coded("HP603", f"check_rule: {self.called.name} has no rule"))
        self.op = OPERATORS[self.called.name]
        arguments = self.op.arguments(self.called, self.args, platform.named(self.kwargs))
        ruled = self.op.rule if isinstance(self.op.rule, Rule) or self.op.rule is None else self.op.rule(**arguments)
        if ruled is None or callable(ruled):
            raise ValueError(coded("HP603", f"check_rule: {self.called.name} has no rule for these arguments"))
        self.bound, given = bound_call(self.op, self.called, arguments, ruled)
        found = list(tensors_in((self.args, self.kwargs)))
        if not all(any(t is one for t in tensors) for one in found):
            raise ValueError(
                coded("HP603", f"check_rule: {self.called.name} is given a tensor that is not an operand of the call")
            )
        # For each tensor among the arguments: which of our operands, and which of the rule's.
        self.ours = [next(i for i, t in enumerate(tensors) if t is one) for one in found]
        self.rules = [next(i for i, t in enumerate(flat(given)) if t is one) for one in found]
        if len(set(self.ours)) != len(self.ours):
            raise ValueError(coded("HP603", "check_rule: the call must use each operand once"))

    def evaluate(self, combination: Sequence[Choice], place: Sequence[int], shards: Sequence[Any]) -> list[Any]:
        """The results of the local call on the rank at this place of the mesh."""
        platform = get_platform()
        following = iter(shards)
        args = replaced(self.args, following)
        kwargs = {name: replaced(value, following) for name, value in self.kwargs.items()}
        func, given = self.func, args
        if self.op.local is not None:
            factors = {choice.factor for choice in combination if choice.factor is not None}
            orders = {name: [a for a, c in enumerate(combination) if c.factor == name] for name in factors}
            plan = plan_for(self.bound, combination, self.mesh, orders)
            function = platform.operator(self.called.name)
            here = Here(self.bound, plan, self.mesh.mesh_shape, place, function)
            kwargs = self.op.arguments(self.called, args, platform.named(kwargs))
            func, given = self.op.local, (here,)
        is_empty = any(0 in shard.shape for shard in shards)
        found = platform.call_where_empty(func, given, kwargs) if is_empty else func(*given, **kwargs)
        return flat(found if isinstance(found, (list, tuple)) else [found])


def _fits(bound: BoundRule, combination: Sequence[Choice], mesh: Mesh) -> bool:
    """Whether every factor can be cut so, and the pending reductions of every result can be taken in any order."""
    axes: dict[str, list[int]] = {}
    for choice, ranks in zip(combination, mesh, strict=True):
        if choice.factor:
            axes.setdefault(choice.factor, []).append(ranks)
    pending = zip(*(flat(choice.results) for choice in combination), strict=True)
    return all(bound.fits(f, *ranks) for f, ranks in axes.items()) and all(commute(p.op for p in ps) for ps in pending)


def _is_seen_elsewhere(caught: _Caught, combination: Sequence[Choice], mesh: Mesh, meshes: Sequence[Mesh]) -> bool:
    """Whether another combination makes the same local calls, on ranks in another order or on fewer of them.

    A local function may ask for its place in the mesh; without one nothing but the pieces of the operands counts.
    """
    if caught.op.local is not None:
        return False
    used = tuple(ranks for choice, ranks in zip(combination, mesh, strict=True) if choice.kind != "unused")
    if len(used) < len(mesh) and (used or mesh[:1]) in meshes and (used or mesh[:1]) != mesh:
        return True
    numbers = [caught.bound.choices().index(choice) for choice in combination]
    return len(set(mesh)) == 1 and numbers != sorted(numbers) and not _cut_one_dim(combination)


def _cut_one_dim(combination: Sequence[Choice]) -> bool:
    """Whether different choices cut the same dim of a tensor, so that it matters which is the outer one."""
    each_side = ("operands", "results", "grads_in", "grads_out")
    different = set(combination)
    for places in (zip(*(flat(getattr(choice, side)) for choice in different), strict=True) for side in each_side):
        for place in places:
            dims = [one.dim for one in place if one.dim is not None]
            if len(set(dims)) < len(dims):
                return True
    return False


def _flat_shapes(shapes: Sequence[Any]) -> Iterator[Any]:
    for shape in shapes:
        if shape and isinstance(shape[0], tuple):
            yield from shape
        else:
            yield shape


# --- one combination of choices


@dataclass
class _Comparison:
    caught: _Caught
    combination: tuple[Choice, ...]
    mesh: Mesh
    rng: Any
    tolerance: float

    def run(self, operands: Sequence[Any], expected: list[Array], weights: list[Any], gradients: list[Any]) -> None:
        """Raises an AssertionError where a result or a gradient is not that of the plain call."""
        arrays = [flat(operands)[i] for i in self.caught.ours]
        places_in = [self._places("operands")[i] for i in self.caught.rules]
        leaving = [self._places("grads_out")[i] for i in self.caught.rules]
        places_out = self._places("results")
        held = [self._cut(x, p, self.mesh) for x, p in zip(arrays, places_in, strict=True)]
        ranks = list(itertools.product(*map(range, self.mesh)))
        platform = get_platform()
        inputs = [[pieces[r] for pieces in held] for r in range(len(ranks))]
        outputs = [
            [platform.tensor_to_numpy(y) for y in self._evaluate(place, inputs[r])] for r, place in enumerate(ranks)
        ]
        pieces = list(zip(*outputs, strict=True))
        for y, mine, p in zip(expected, pieces, places_out, strict=True):
            shares = self._cut(y, [REPLICATE if place.op else place for place in p], self.mesh)
            if [x.shape for x in mine] != [x.shape for x in shares]:
                raise AssertionError(coded("HP604", "a rank's result is not the piece it should be"))
            if wrong := {str(x.dtype) for x in mine if x.dtype != y.dtype}:
                raise AssertionError(coded("HP604", f"a result's dtype is {', '.join(sorted(wrong))}, not {y.dtype}"))
            self._same("result", self._join(mine, p, self.mesh), y)
        if any(choice.kind == "order" for choice in self.combination):
            return  # only where nothing is recorded
        arriving = [
            [None] * len(ranks) if w is None else self._hand_down(w, mine, p, a, self.mesh)
            for w, mine, p, a in zip(weights, pieces, places_out, self._places("grads_in"), strict=True)
        ]
        local = self._differentiate(ranks, inputs, list(zip(*arriving, strict=True)))
        for i, found in enumerate(zip(*local, strict=True)):
            true = gradients[self.caught.ours[i]]
            if (true is None) != (found[0] is None):
                raise AssertionError(
                    coded("HP604", f"operand {self.caught.rules[i]} has a gradient in one call and none in the other")
                )
            if true is None:
                continue
            parts = [REPLICATE if place == SUM else place for place in leaving[i]]
            right = self._hand_down(true, held[i], places_in[i], parts, self.mesh)
            for mine_, one in zip(self._sum_over(found, leaving[i]), right, strict=True):
                self._same(f"gradient of operand {self.caught.rules[i]}", mine_, one)

    def run_second(self, operands: Sequence[Any], weights: list[Any], true: _Second) -> None:
        """The same for gradients of gradients. What a tensor is to its gradient, that is to the gradient of it."""
        sides = [self._places(side) for side in ("operands", "results", "grads_in", "grads_out")]
        if any(place.op not in (None, "sum") for side in sides for places in side for place in places):
            return  # a maximum or product between ranks: tests/distributed/test_second_order.py
        ours, rules = self.caught.ours, self.caught.rules
        taken, leaving = ([sides[at][i] for i in rules] for at in (0, 3))
        ranks = list(itertools.product(*map(range, self.mesh)))
        held = [self._cut(flat(operands)[i], p, self.mesh) for i, p in zip(ours, taken, strict=True)]
        along = [self._cut_or_none(true.directions[i], p) for i, p in zip(ours, taken, strict=True)]
        arriving = [self._cut_or_none(w, p) for w, p in zip(weights, sides[2], strict=True)]
        found = self._differentiate_twice(ranks, held, arriving, along)
        if not found:
            return
        for i, gradients in enumerate(zip(*(one[0] for one in found), strict=True)):
            parts = [REPLICATE if place == SUM or place.op else place for place in leaving[i]]
            self._same_second(f"operand {rules[i]}", gradients, true.by_operands[ours[i]], leaving[i], parts)
        for i, gradients in enumerate(zip(*(one[1] for one in found), strict=True)):
            # The gradient of a pending sum is a copy on every rank, of which each makes its own use.
            summed = [SUM if place.op else place for place in sides[1][i]]
            parts = [REPLICATE if place.op else place for place in sides[1][i]]
            self._same_second(f"weight {i}", gradients, true.by_weights[i], summed, parts)

    def _cut_or_none(self, array: Array | None, places: Sequence[Place]) -> list[Any]:
        return [None] * math.prod(self.mesh) if array is None else self._cut(array, places, self.mesh)

    def _differentiate_twice(
        self, ranks: Sequence[Sequence[int]], held: Sequence[Any], arriving: Sequence[Any], along: Sequence[Any]
    ) -> list[tuple[list[Any], list[Any]]]:
        """Every rank's gradients of gradients, by its operands and by what arrived; none where a kernel has none."""
        made = []
        for r, place in enumerate(ranks):

            def results(*tensors: Any, place: Sequence[int] = place) -> list[Any]:
                return self.caught.evaluate(self.combination, place, tensors)

            inputs, weights = [pieces[r] for pieces in held], [pieces[r] for pieces in arriving]
            try:
                found = _second_gradients(results, inputs, weights, [pieces[r] for pieces in along])
            except RuntimeError as error:
                if "is not implemented" in str(error):  # a kernel for such shards has no second derivative
                    return []
                raise
            if found is None:
                zeros = [[None if x is None else np.zeros_like(x) for x in side] for side in (inputs, weights)]
                found = zeros[0], zeros[1]
            made.append(found)
        return made

    def _same_second(
        self, what: str, gradients: Sequence[Any], true: Array | None, leaving: Sequence[Place], parts: Sequence[Place]
    ) -> None:
        if true is None or gradients[0] is None:
            return
        right = self._cut(true, parts, self.mesh)
        for mine, one in zip(self._sum_over(gradients, leaving), right, strict=True):
            self._same(f"gradient of gradients by {what}", mine, one)

    def _places(self, side: str) -> list[tuple[Place, ...]]:
        return list(zip(*[flat(getattr(choice, side)) for choice in self.combination], strict=True))

    def _evaluate(self, place: Sequence[int], arrays: Sequence[Array]) -> list[Any]:
        return self.caught.evaluate(self.combination, place, [get_platform().tensor(x) for x in arrays])

    def _differentiate(
        self, ranks: Sequence[Sequence[int]], inputs: Sequence[Sequence[Array]], arriving: Sequence[Sequence[Any]]
    ) -> list[list[Any]]:
        """Every rank's gradients. The ranks share no tensor, so that one backward serves them all."""
        width = len(inputs[0])
        starts = range(0, width * len(ranks), width)

        def on_all_ranks(*tensors: Any) -> list[Any]:
            held = [tensors[start : start + width] for start in starts]
            found = [self.caught.evaluate(self.combination, *one) for one in zip(ranks, held, strict=True)]
            return [y for results in found for y in results]

        everything = [array for arrays in inputs for array in arrays]
        gradients = _gradients(on_all_ranks, everything, [g for share in arriving for g in share])
        return [gradients[start : start + width] for start in starts]

    def _same(self, what: str, mine: Array, true: Array) -> None:
        if np.array_equal(mine, true):  # most are, and the comparison of rounded numbers costs ten times as much
            return
        if mine.shape != true.shape or not np.allclose(mine, true, self.tolerance, self.tolerance, equal_nan=True):
            np.testing.assert_allclose(mine, true, self.tolerance, self.tolerance, err_msg=f"the {what} is wrong")

    # --- what the ranks hold

    def _cut(self, x: Array, places: Sequence[Place], mesh: Mesh) -> list[Array]:
        """Every rank's piece of an array; the first axis is the outer one."""
        if not mesh:
            return [x]
        ranks, place = mesh[0], places[0]
        if place == REPLICATE:
            return self._cut(x, places[1:], mesh[1:]) * ranks
        pieces = self._parts(x, place.op, ranks) if place.op else _chunks(x, place.dim, ranks)
        return [held for piece in pieces for held in self._cut(piece, places[1:], mesh[1:])]

    def _parts(self, x: Array, op: str, ranks: int) -> list[Array]:
        """Parts of both signs that give x when reduced, in its dtype."""
        drawn = [_drawn(x, self.rng) for _ in range(ranks - 1)]
        if op in ("sum", "avg"):
            parts = [*drawn, (ranks if op == "avg" else 1) * x - sum(drawn)]
        elif op == "prod":
            drawn = [np.sign(d) * (0.5 + np.abs(d)) for d in drawn]
            parts = [*drawn, x / math.prod(drawn)]
        else:
            winner, away = self.rng.integers(ranks, size=x.shape), self.rng.uniform(0.1, 1.1, (ranks, *x.shape))
            parts = [np.where(winner == i, x, x - away[i] * (1 if op == "max" else -1)) for i in range(ranks)]
        return [np.asarray(part, x.dtype) for part in parts]

    def _join(self, pieces: Sequence[Array], places: Sequence[Place], mesh: Mesh) -> Array:
        """The array of which these are the ranks' pieces."""
        if not mesh:
            return pieces[0]
        held = [self._join(block, places[1:], mesh[1:]) for block in _blocks(pieces, mesh)]
        if places[0] == REPLICATE:
            for other in held[1:]:
                self._same("result of a rank that should have a copy", other, held[0])
            return held[0]
        return _reduced(held, places[0].op) if places[0].op else np.concatenate(held, places[0].dim)

    def _hand_down(
        self, gradient: Array, pieces: Sequence[Array], places: Sequence[Place], arriving: Sequence[Place], mesh: Mesh
    ) -> list[Array]:
        """Every rank's gradient of its piece: as it arrives, and through the reduction where a piece is a part."""
        if not mesh:
            return [gradient]
        held = _blocks(pieces, mesh)
        shares = self._cut(gradient, arriving[:1], mesh[:1])
        if places[0].op not in (None, "sum"):  # the backward of a sum gives every part what arrives
            values = [self._join(block, places[1:], mesh[1:]) for block in held]
            shares = [gradient * share for share in _shares(values, places[0].op)]
        following = zip(shares, held, strict=True)
        return [g for s, block in following for g in self._hand_down(s, block, places[1:], arriving[1:], mesh[1:])]

    def _sum_over(self, gradients: Sequence[Array], leaving: Sequence[Place]) -> list[Array]:
        """The ranks' gradients after the sums that the choices ask for."""
        found = list(gradients)
        ranks = list(itertools.product(*map(range, self.mesh)))
        for axis, place in enumerate(leaving):
            if place == SUM:
                rests = [rank[:axis] + rank[axis + 1 :] for rank in ranks]
                found = [sum(found[s] for s, other in enumerate(rests) if other == rest) for rest in rests]
        return found


def _blocks(pieces: Sequence[Array], mesh: Mesh) -> list[Sequence[Array]]:
    width = len(pieces) // mesh[0]
    return [pieces[i * width : (i + 1) * width] for i in range(mesh[0])]


def _chunks(x: Array, dim: int | None, ranks: int) -> list[Array]:
    assert dim is not None
    sizes = chunk_sizes(x.shape[dim], ranks)
    ends = itertools.accumulate(sizes)
    before = (slice(None),) * dim
    return [x[(*before, slice(end - size, end))] for size, end in zip(sizes, ends, strict=True)]


def _reduced(parts: Sequence[Array], op: str | None) -> Array:
    return getattr(np, {"avg": "mean"}.get(str(op), str(op)))(np.stack(parts), axis=0)


def _shares(parts: Sequence[Array], op: str | None) -> list[Array]:
    """The derivative of a reduction for each of its parts; no two parts are equal."""
    if op == "avg":
        return [np.full_like(part, 1 / len(parts)) for part in parts]
    if op == "prod":
        return [math.prod(parts[:i]) * math.prod(parts[i + 1 :]) for i in range(len(parts))]
    reduced = _reduced(parts, op)
    return [(part == reduced).astype(part.dtype) for part in parts]
