# SPDX-License-Identifier: Apache-2.0
"""A rule bound to shapes, and the law that says what one mesh axis may do under it, forward and backward.

    for choice in einsum("m k, k n -> m n").bind([(4, 8), (8, 6)]).choices():
        print(choice)       # shard k: S(1), S(0) -> P(sum); gradient R -> S(1), S(0)       and five more

The law is one sentence: what a tensor lacks, its gradient must sum. Axes are independent: what a mesh may do is the
product of what its axes may do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from hyper_parallel.core.shard.binding import (
    Bound,
    BoundFactor,
    BoundTensor,
    bind,
    each,
)
from hyper_parallel.core.shard.notation import LOOKED_UP, REST, WHOLE, Notation, parse
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.platform.platform import REDUCE_OPS
from hyper_parallel.platform.transform import chunk_sizes

BROADCASTS = ("none", "rest", "all")


@dataclass(frozen=True, slots=True)
class AxisUse:
    """What one axis does to a tensor: ``S(dim)``, ``P(op)``, or ``R`` where neither is given."""

    dim: int | None = None
    op: str | None = None

    def __str__(self) -> str:
        return (
            "R"
            if self == REPLICATE
            else f"P({self.op})"
            if self.dim is None
            else f"S({self.dim})"
        )


REPLICATE = AxisUse()
SUM = AxisUse(op="sum")
Places = tuple[
    AxisUse | tuple[AxisUse, ...] | None, ...
]  # one a tensor; a tuple for a list, None for an absent operand


@dataclass(frozen=True, slots=True)
class Choice:
    """What one axis does: ``kind`` is "unused", "shard" (the factor), "carry" (a Partial through the operator) or
    "order" (a maximum or minimum through an operator that keeps or reverses the order, where nothing is recorded).

    ``grads_in``: how each result's gradient arrives; ``grads_out``: how each operand's gradient leaves. The gradient
    R of a tensor that is P(op) is that of the reduced value; the reduction's backward makes of it each part's own:
    the same for sum, divided by the ranks for avg, for the part that won for max and min, times the others for prod.
    """

    kind: str
    factor: str | None
    operands: Places
    results: Places
    grads_in: Places
    grads_out: Places

    def __str__(self) -> str:
        sides = [
            _print(side)
            for side in (self.operands, self.results, self.grads_in, self.grads_out)
        ]
        return "{} {}: {} -> {}; gradient {} -> {}".format(
            self.kind, self.factor or "", *sides
        ).replace(" :", ":")


def _print(places: Places) -> str:
    return ", ".join(
        f"[{_print(place)}]" if isinstance(place, tuple) else str(place)
        for place in places
    )


@dataclass(frozen=True, slots=True)
class Order:
    """Where a maximum or minimum that is pending passes: these operands have it, and the result has another or it."""

    operands: tuple[int, ...]
    op: str
    result: str


def rising(*operands: int) -> tuple[Order, ...]:
    """No larger value of any of these operands, each alone, gives a smaller result."""
    return tuple(
        Order((operand,), op, op) for operand in operands for op in ("max", "min")
    )


def falling(*operands: int) -> tuple[Order, ...]:
    """No larger value of any of these operands, each alone, gives a larger result."""
    pairs = ("max", "min"), ("min", "max")
    return tuple(Order((operand,), *pair) for operand in operands for pair in pairs)


@dataclass(frozen=True)
class Rule:
    """A rule's text, how a vanishing factor's parts are put together, and where a Partial may pass.

    ``linear``: groups of operands; a Partial passes when every operand of a group is Partial and the others are
    Replicate. Added operands ("+") join every group. ``carries``: the kinds of Partial that pass. ``broadcast``:
    which dims of size one stretch: those of "..." and of added operands ("rest"), "all" or "none". ``orders``: where a
    maximum or minimum passes while no gradient is recorded; ``finite``: and the other operands hold no infinity.
    """

    text: str
    reduce: str = "sum"
    linear: tuple[tuple[int, ...], ...] = ()
    carries: tuple[str, ...] = ("sum", "avg")
    broadcast: str = "rest"
    orders: tuple[Order, ...] = ()
    finite: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "text", str(parse(self.text))
        )  # one rule, one spelling
        for name, value, known in self._settings():
            self.require(
                value in known,
                f"{name} must be one of {', '.join(map(str, known))}, got {value!r}",
            )
        self._check_lookups()
        self._check_added()

    @property
    def notation(self) -> Notation:
        return parse(self.text)

    def bind(
        self,
        shapes: Sequence[Any],
        attrs: Mapping[str, Any] | None = None,
        numbers: Iterable[int] = (),
    ) -> BoundRule:
        """Gives every dim its factors, for operands of these shapes in a call with these attributes.

        A shape is a sequence of ints, None for an absent operand, a sequence of shapes for a list. An attribute that
        gives positions (``{dim}``) is an int, a sequence of ints, or None for all dims. The size of a factor that
        operands alone do not tell is an attribute of its name; for the results of a list, a sequence of sizes.
        ``numbers``: the absent operands that are numbers, which are the same on all ranks and never in parts.
        """
        return BoundRule(
            self,
            *bind(self.notation, shapes, attrs or {}, self.broadcast),
            frozenset(numbers),
        )

    def require(self, condition: bool, problem: str) -> None:
        """Raises a ValueError that names the rule unless the condition holds."""
        if not condition:
            raise coded(ValueError, "HP302", f"rule {self.text!r}: {problem}")

    def _settings(self) -> Iterator[tuple[str, object, Sequence[object]]]:
        yield "reduce", self.reduce, REDUCE_OPS
        yield "broadcast", self.broadcast, BROADCASTS
        yield from (("carries", op, REDUCE_OPS) for op in self.carries)
        operands = range(len(self.notation.operands))
        yield from (
            ("linear", operand, operands) for group in self.linear for operand in group
        )
        yield from (
            ("orders", operand, operands)
            for order in self.orders
            for operand in order.operands
        )

    def _check_lookups(self) -> None:
        for name, mark in self.notation.marks.items():
            if mark == LOOKED_UP:
                holders = sum(
                    name in t.factors
                    for t in (*self.notation.operands, *self.notation.results)
                )
                held = holders == 1 and any(
                    name in t.factors for t in self.notation.operands
                )
                self.require(
                    held,
                    f"factor {name} is looked up ('@'), so it must be in one operand and in no result",
                )
                self.require(
                    self.reduce == "sum",
                    f"factor {name} is looked up ('@'), so reduce must be sum",
                )

    def _check_added(self) -> None:
        kept = {name for result in self.notation.results for name in result.factors}
        for number, operand in enumerate(self.notation.operands):
            if operand.added:
                what = f"operand {number} '{operand}' is added"
                lost = [name for name in operand.factors if name not in kept]
                self.require(
                    not lost,
                    f"{what}, so its factors must be in a result; {', '.join(lost)} is not",
                )
                self.require(
                    self.reduce == "sum",
                    f"{what}, so reduce must be sum, got {self.reduce!r}",
                )

    def __str__(self) -> str:
        return self.text


Groups = int | Iterable[int | tuple[int, ...]]


def pointwise(
    text: str | int,
    linear: Groups = (),
    *,
    orders: tuple[Order, ...] = (),
    finite: bool = False,
) -> Rule:
    """Element by element; an int n is n operands that broadcast. Nothing vanishes.

    ``linear``: ``0``, ``[0, 1]`` (in 0 or in 1) or ``[(0, 1)]`` (in 0 and 1 together). ``orders``: such as
    ``rising(0)``; a nan must stay one.
    """
    if isinstance(text, int):
        text = f"{', '.join([REST] * text)} -> {REST}"
    groups = (linear,) if isinstance(linear, int) else linear
    linear = tuple((group,) if isinstance(group, int) else group for group in groups)
    rule = Rule(text, linear=linear, orders=orders, finite=finite)
    _require_kept("pointwise", rule)
    return rule


def einsum(text: str, broadcast: str = "rest") -> Rule:
    """A sum of products: linear in each factor of the product alone."""
    operands = parse(text).operands
    return Rule(
        text,
        linear=tuple((i,) for i, t in enumerate(operands) if not t.added),
        broadcast=broadcast,
    )


def reduction(kind: str, text: str) -> Rule:
    """A reduction by sum, mean, max, min, prod or avg; the same kind of Partial passes.

    mean: the local call gives the local sum over the global count, so parts of any size add up. avg: the local call
    gives the local mean, which is right for equal parts only (see ``BoundRule.fits``). The local call of max or min
    gives the identity where its piece is empty.
    """
    op = "sum" if kind == "mean" else kind
    return Rule(text, op, ((0,),), ("sum", "avg") if op in ("sum", "avg") else (op,))


def move(text: str) -> Rule:
    """Elements move and none is computed, so that a Partial of any kind passes. Nothing broadcasts."""
    rule = Rule(
        text,
        linear=(tuple(range(len(parse(text).operands))),),
        carries=REDUCE_OPS,
        broadcast="none",
    )
    _require_kept("move", rule)
    return rule


def lookup(text: str) -> Rule:
    """Reads the operand with the "@" factor by indices, and is linear in it. Nothing broadcasts.

    Where that factor is sharded the local call masks the indices that are not its own and gives zeros for them.
    """
    notation = parse(text)
    tables = {
        i
        for i, t in enumerate(notation.operands)
        if any(dim.mark == LOOKED_UP for dim in t.dims)
    }
    rule = Rule(text, linear=tuple((i,) for i in sorted(tables)), broadcast="none")
    rule.require(bool(tables), "lookup: no factor is marked '@'")
    return rule


def _require_kept(constructor: str, rule: Rule) -> None:
    kept = {name for result in rule.notation.results for name in result.factors}
    found = {name for operand in rule.notation.operands for name in operand.factors}
    lost = sorted(
        name for name in found - kept if rule.notation.marks.get(name) != WHOLE
    )
    rule.require(
        not lost,
        f"{constructor}: {', '.join(lost)} is in no result; say how it is reduced, or mark it '!'",
    )


_CHOICES: dict[Any, tuple[Choice, ...]] = {}  # for calls that differ in sizes only
_MOST_PATTERNS = 1 << 14


def _dims(tensor: BoundTensor) -> Any:
    return tensor.dims


@dataclass(frozen=True, slots=True)
class BoundRule:
    """A rule for one call: which factors its tensors have, and what one axis may do with them."""

    rule: Rule
    operands: Bound
    results: Bound
    factors: tuple[BoundFactor, ...]
    numbers: frozenset[int] = frozenset()

    def factor(self, name: str) -> BoundFactor:
        found = {factor.name: factor for factor in self.factors}
        self.rule.require(
            name in found, f"no factor {name!r}; there are {', '.join(found)}"
        )
        return found[name]

    @property
    def result_shapes(self) -> tuple[Any, ...]:
        """The global shape of every result; a tuple of shapes for a list."""
        shapes: tuple[Any, ...] = each(lambda tensor: tensor.shape, self.results)
        return shapes

    def choices(self) -> tuple[Choice, ...]:
        """All that one axis may do; ``fits`` says whether a factor's cut over so many ranks is possible."""
        pattern = self._pattern()
        if pattern not in _CHOICES:
            if len(_CHOICES) >= _MOST_PATTERNS:
                _CHOICES.clear()
            _CHOICES[pattern] = self._all_choices()
        return _CHOICES[pattern]

    def _pattern(self) -> Any:
        """What the choices depend on: everything but sizes."""
        operands, results = each(_dims, self.operands), each(_dims, self.results)
        factors = tuple(
            (factor.name, factor.kept, factor.whole) for factor in self.factors
        )
        return self.rule, operands, results, factors, self.numbers

    def _all_choices(self) -> tuple[Choice, ...]:
        sharded = (self._shard(factor) for factor in self.factors if not factor.whole)
        groups = [group for group in map(self._present, self.rule.linear) if group]
        carried = (
            self._carry(group, AxisUse(op=op))
            for op in self.rule.carries
            for group in groups
        )
        pairs = ((self._present(order.operands), order) for order in self.rule.orders)
        ordered = (
            self._carry(group, AxisUse(op=order.op), AxisUse(op=order.result))
            for group, order in pairs
            if group
        )
        return (self._unused(), *sharded, *carried, *ordered)

    def fits(self, name: str, *ranks: int) -> bool:
        """Whether cutting the factor over axes of so many ranks, outer first, is the same cut in every tensor.

        Every tensor is cut as torch.chunk does it, so merged dims are cut between outermost factors only where the
        pieces happen to be multiples; and an avg of parts needs equal parts.
        """
        factor = self.factor(name)
        pieces = _cut(factor.size, ranks)
        equal = len(set(pieces)) == 1 or factor.kept or self.rule.reduce != "avg"
        return equal and all(
            _cut(factor.size * n, ranks) == [piece * n for piece in pieces]
            for n in factor.inner
        )

    def _unused(self) -> Choice:
        operands, results = (
            each(lambda _: REPLICATE, side) for side in (self.operands, self.results)
        )
        return Choice("unused", None, operands, results, results, operands)

    def _shard(self, factor: BoundFactor) -> Choice:
        def place(tensor: BoundTensor, lacking: AxisUse, added: AxisUse) -> AxisUse:
            dim = tensor.find(factor.name)
            if dim is not None:
                return AxisUse(dim)
            return added if tensor.added and not factor.kept else lacking

        reduced = AxisUse(op=self.rule.reduce)
        return Choice(
            "shard",
            factor.name,
            # An added operand joins the sum once, so it comes in parts; its gradient is then that of the whole sum.
            each(lambda t: place(t, REPLICATE, SUM), self.operands),
            each(lambda t: place(t, reduced, reduced), self.results),
            each(lambda t: place(t, REPLICATE, REPLICATE), self.results),
            each(lambda t: place(t, SUM, REPLICATE), self.operands),
        )

    def _present(self, group: tuple[int, ...]) -> set[int]:
        """The operands of a group that are there, with the added ones; empty when only added ones are."""
        if self.numbers.intersection(group):
            return set()
        here = {i for i in group if self.operands[i] is not None}
        added = {
            i
            for i, t in enumerate(self.rule.notation.operands)
            if t.added and (self.operands[i] is not None or i in self.numbers)
        }
        return here | added if here - added and not self.numbers & added else set()

    def _carry(
        self, group: set[int], partial: AxisUse, ordered: AxisUse | None = None
    ) -> Choice:
        def operands(inside: AxisUse, outside: AxisUse) -> Any:
            return tuple(
                _fill(t, inside if i in group else outside)
                for i, t in enumerate(self.operands)
            )

        results = each(lambda _: ordered or partial, self.results)
        arriving = each(lambda _: REPLICATE, self.results)
        kind = "carry" if ordered is None else "order"
        return Choice(
            kind,
            None,
            operands(partial, REPLICATE),
            results,
            arriving,
            operands(REPLICATE, SUM),
        )


def _fill(item: BoundTensor | tuple[BoundTensor, ...] | None, place: AxisUse) -> Any:
    return each(lambda _: place, (item,))[0]


def _cut(size: int, ranks: Iterable[int]) -> list[int]:
    return reduce(
        lambda pieces, n: [part for piece in pieces for part in chunk_sizes(piece, n)],
        ranks,
        [size],
    )
