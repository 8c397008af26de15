# SPDX-License-Identifier: Apache-2.0
"""Meets a rule's notation with the shapes of a call: the factors of every dim, their sizes, the results' shapes.

operands, results, factors = bind(parse("... {dim} -> ..."), [(4, 6, 8)], {"dim": -2}, broadcast="rest")
operands[0].dims == (("...[-2]",), ("{dim}",), ("...[-1]",))       results[0].shape == (4, 8)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

from hyper_parallel.core.shard.notation import (
    LOOKED_UP,
    REST,
    WHOLE,
    At,
    Notation,
    Rest,
    Tensor,
)
from hyper_parallel.platform.error_codes import coded

Dim = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BoundTensor:
    """The factors of every dim, outermost first; a dim without factors has size one and only stretches."""

    place: str  # such as "operand 0"
    pattern: Tensor
    dims: tuple[Dim, ...]
    shape: tuple[int, ...]

    @property
    def added(self) -> bool:
        """Whether it is added to the sum."""
        return self.pattern.added

    @property
    def label(self) -> str:
        """What it is called in errors."""
        return _label(self.place, self.pattern)

    def find(self, factor: str) -> int | None:
        """The dim in which the factor is."""
        for i, dim in enumerate(self.dims):
            if factor in dim:
                return i
        return None


def _expand_rest(dims: Sequence[Any], rest: int) -> list[Dim]:
    """The factors of each dim, where "..." stands for so many."""
    line: list[Dim] = []
    for dim in dims:
        if isinstance(dim, Rest):
            line += [(f"{REST}[{i}]",) for i in range(-rest, 0)]
        else:
            line.append(dim.factors)
    return line


def _joined_factors(patterns: Iterable[Tensor]) -> set[str]:
    """The factors of the dim along which a list of operands is joined."""
    joined: set[str] = set()
    for pattern in patterns:
        for dim in pattern.dims if pattern.listed else ():
            if isinstance(dim, At) and dim.mark == WHOLE:
                joined.update(dim.factors)
    return joined


def _label(place: str, pattern: Tensor) -> str:
    return f"{place} '{pattern}'"


@dataclass(frozen=True, slots=True)
class BoundFactor:
    """A factor and its size in this call.

    ``kept``: the results have it, else it vanishes. ``whole``: it may not be sharded. ``inner``: the sizes by which it
    is multiplied where it is the outermost of merged dims.
    """

    name: str
    size: int
    kept: bool
    whole: bool
    looked_up: bool = False
    inner: tuple[int, ...] = ()


Bound = tuple[
    BoundTensor | tuple[BoundTensor, ...] | None, ...
]  # a tuple for a list, None for an absent operand


def each(function: Callable[[BoundTensor], Any], tensors: Bound) -> Any:
    """The function of every tensor, in the same structure."""
    return tuple(
        tuple(map(function, item))
        if isinstance(item, tuple)
        else None
        if item is None
        else function(item)
        for item in tensors
    )


def bind(
    notation: Notation, shapes: Sequence[Any], attrs: Mapping[str, Any], broadcast: str
) -> tuple[Bound, Bound, tuple[BoundFactor, ...]]:
    """The operands, the results and the factors of one call."""
    binder = _Binder(notation, attrs, broadcast)
    operands = binder.operands(shapes)
    binder.measure(operands)
    results = binder.results(operands)
    operands, results = each(binder.settle, operands), each(binder.settle, results)
    return operands, results, binder.factors(operands, results)


class _Binder:
    """What is known while one call is bound."""

    def __init__(
        self, notation: Notation, attrs: Mapping[str, Any], broadcast: str
    ) -> None:
        self._notation = notation
        self._attrs = attrs
        self._broadcast = broadcast
        self._positions: dict[
            str, tuple[int, ...]
        ] = {}  # where an attribute points, as given
        self._rest = -1  # the number of dims that "..." stands for in the results
        self._marks = notation.marks
        self._gathered_from: dict[
            str, tuple[str, int]
        ] = {}  # "a[1]" -> ("a", 1): one of several positions
        self._joined: set[str] = (
            set()
        )  # laid end to end from the tensors of a list, as cat does
        self._stretched: set[str] = (
            set()
        )  # of size one and without a place of their own in merged dims
        self._sizes: dict[str, int] = {}

    # --- the factors of a tensor's dims

    def operands(self, shapes: Sequence[Any]) -> Bound:
        patterns = self._notation.operands
        if len(shapes) != len(patterns):
            self._fail(
                f"expected {len(patterns)} operands (None for an absent one), got {len(shapes)}"
            )
        return tuple(
            self._operand(i, pattern, shapes[i]) for i, pattern in enumerate(patterns)
        )

    def _operand(
        self, number: int, pattern: Tensor, shape: Any
    ) -> BoundTensor | tuple[BoundTensor, ...] | None:
        place = f"operand {number}"
        if shape is None:
            return None
        if pattern.listed:
            if not shape or any(isinstance(size, int) for size in shape):
                self._fail(
                    f"{_label(place, pattern)}: expected the shapes of one or more tensors, got {shape!r}"
                )
            return tuple(
                self._tensor(pattern, one, f"{place}[{i}]")
                for i, one in enumerate(shape)
            )
        return self._tensor(pattern, shape, place)

    def _tensor(self, pattern: Tensor, shape: Any, place: str) -> BoundTensor:
        if not all(isinstance(size, int) for size in shape):
            self._fail(f"{_label(place, pattern)}: expected a shape, got {shape!r}")
        made = BoundTensor(
            place, pattern, self._spread(pattern, len(shape), place), tuple(shape)
        )
        rest = sum(dim[0].startswith(REST) for dim in made.dims if dim)
        if (
            self._broadcast == "none"
            and Rest() in pattern.dims
            and self._rest not in (-1, rest)
        ):
            self._fail(
                f"{made.label}: '...' must stand for {self._rest} dims as before, got shape {made.shape}"
            )
        self._rest = max(self._rest, rest)
        for dim, size in zip(made.dims, shape, strict=True):
            if not dim and size != 1:
                self._fail(
                    f"{made.label}: '=1' must point to dims of size 1, got shape {made.shape}"
                )
        return made

    def _spread(self, pattern: Tensor, ndim: int, place: str) -> tuple[Dim, ...]:
        """The factors of every dim of a tensor with so many dims: what attributes point to, and the others in order."""
        others = [dim for dim in pattern.dims if not isinstance(dim, At)]
        fixed = sum(not isinstance(dim, Rest) for dim in others)
        placed: dict[int, Dim] = {}
        for dim in pattern.dims:
            if isinstance(dim, At):
                self._place(dim, ndim, ndim - fixed, _label(place, pattern), placed)
        rest = ndim - len(placed) - fixed
        if (
            rest < 0
            and pattern.added
            and Rest() not in others
            and self._broadcast != "none"
        ):
            others, rest = (
                others[-rest:],
                0,
            )  # an added operand may have fewer dims than its sum
        if rest < 0 or (rest and Rest() not in others):
            more = " or more" * (Rest() in others)
            self._fail(
                f"{_label(place, pattern)}: expected {len(placed) + fixed} dims{more}, got {ndim}"
            )
        following = iter(_expand_rest(others, rest))
        return tuple(placed[i] if i in placed else next(following) for i in range(ndim))

    def _place(
        self, dim: At, ndim: int, free: int, label: str, placed: dict[int, Dim]
    ) -> None:
        positions = self._pointed(dim.attr, free, scalar=ndim == 0)
        for i, position in enumerate(positions):
            if not -ndim <= position < ndim:
                self._fail(
                    f"{label}: {dim.attr}={position} is not a dim of a tensor with {ndim} dims"
                )
            if position % ndim in placed:
                self._fail(
                    f"{label}: {dim.attr}={position} points to a dim that is taken already"
                )
            placed[position % ndim] = tuple(
                self._named(name, i, len(positions)) for name in dim.factors
            )

    def _named(self, base: str, index: int, count: int) -> str:
        if count == 1:
            return base
        name = f"{base}[{index}]"
        self._gathered_from[name] = (base, index)
        return name

    def _pointed(
        self, attr: str, free: int | None = None, *, scalar: bool = False
    ) -> tuple[int, ...]:
        """The positions that an attribute gives; ``free``: how many None stands for, where that is known."""
        if attr not in self._positions:
            value = self._attr(attr, "it gives a dim")
            if free is None and value is None:
                self._fail(
                    f"attribute {attr}=None: no operand says how many dims that is"
                )
            # A tensor without dims may be asked for its dim 0, as torch allows.
            everything = value is None or (scalar and value in (0, -1))
            values = (
                range(free or 0)
                if everything
                else (value,)
                if isinstance(value, int)
                else value
            )
            self._positions[attr] = tuple(values)
        return self._positions[attr]

    # --- the factors' sizes

    def measure(self, operands: Bound) -> None:
        """Finds the size of every factor that the operands tell."""
        tensors = flat(operands)
        self._joined = _joined_factors(self._notation.operands)
        uses: dict[str, list[tuple[int, BoundTensor]]] = {}
        for tensor in tensors:
            for dim, size in zip(tensor.dims, tensor.shape, strict=True):
                if len(dim) == 1:
                    uses.setdefault(dim[0], []).append((size, tensor))
        for name, found in uses.items():
            self._sizes[name] = (
                sum(size for size, _ in found)
                if name in self._joined
                else self._agree(name, found)
            )
        self._divide(
            [
                (d, s, t)
                for t in tensors
                for d, s in zip(t.dims, t.shape, strict=True)
                if len(d) > 1
            ]
        )

    def _agree(self, name: str, uses: list[tuple[int, BoundTensor]]) -> int:
        firm = [
            (size, tensor)
            for size, tensor in uses
            if size != 1 or not self._stretches(name, tensor)
        ]
        for size, tensor in firm:
            if size != firm[0][0]:
                self._fail(
                    f"factor {name} has size {firm[0][0]} in {firm[0][1].label} but {size} in {tensor.label}"
                )
        return firm[0][0] if firm else 1

    def _stretches(self, name: str, tensor: BoundTensor) -> bool:
        """Whether a dim of size one of this factor broadcasts."""
        return self._broadcast == "all" or (
            self._broadcast == "rest" and (tensor.added or name.startswith(REST))
        )

    def _divide(self, merged: list[tuple[Dim, int, BoundTensor]]) -> None:
        """Finds the sizes of merged factors: from attributes, or all but one of them known."""
        names = [name for dim, _, _ in merged for name in dim]
        for name in names:
            if name not in self._sizes and name in self._attrs:
                self._sizes[name] = self._given(name)
        for _ in names:  # one size found may tell another
            for dim, size, _ in merged:
                unknown = [name for name in dim if name not in self._sizes]
                known = self._product(dim)
                if len(unknown) == 1 and known and size % known == 0:
                    self._sizes[unknown[0]] = size // known
        for dim, size, tensor in merged:
            self._check_merged(dim, size, tensor)

    def _check_merged(self, dim: Dim, size: int, tensor: BoundTensor) -> None:
        """Refuses a merged dim unless its factors are known and make up its size."""
        text = f"({' '.join(dim)})"
        sizes = {name: self._sizes[name] for name in dim if name in self._sizes}
        lacking = [name for name in dim if name not in sizes]
        if lacking:
            self._fail(
                f"{tensor.label}: {text} of size {size} with {sizes} leaves {lacking} open; give attributes"
            )
        is_stretched = size == 1 and self._stretches(dim[0], tensor)
        if self._product(dim) != size and not is_stretched:
            self._fail(
                f"{tensor.label}: {text} has size {size}, expected {[self._sizes[name] for name in dim]}"
            )

    def _product(self, dim: Dim) -> int:
        return prod(self._sizes[name] for name in dim if name in self._sizes)

    # --- the results

    def results(self, operands: Bound) -> Bound:
        return tuple(
            self._result(i, pattern, operands)
            for i, pattern in enumerate(self._notation.results)
        )

    def _result(
        self, number: int, pattern: Tensor, operands: Bound
    ) -> BoundTensor | tuple[BoundTensor, ...]:
        counts = [
            len(self._pointed(dim.attr)) for dim in pattern.dims if isinstance(dim, At)
        ]
        others = sum(not isinstance(dim, (At, Rest)) for dim in pattern.dims)
        ndim = (
            sum(counts) + others + (max(self._rest, 0) if Rest() in pattern.dims else 0)
        )
        place = f"result {number}"
        dims = self._spread(pattern, ndim, place)
        for name in (name for dim in dims for name in dim if name not in self._sizes):
            self._sizes[name] = self._given(name, operands)
        if not pattern.listed:
            return BoundTensor(place, pattern, dims, tuple(map(self._product, dims)))
        pieces = [
            tuple(self._piece(dim, i) for dim in dims)
            for i in range(self._length(pattern))
        ]
        return tuple(
            BoundTensor(f"{place}[{i}]", pattern, dims, shape)
            for i, shape in enumerate(pieces)
        )

    def _given(self, name: str, operands: Bound = ()) -> int:
        """The size that the call gives to a factor which the operands do not have."""
        base, index = self._gathered_from.get(name, (name, -1))
        if base.startswith(
            "{"
        ):  # a new dim without a name counts the tensors of the list, as stack does
            lists = [item for item in operands if isinstance(item, tuple)]
            if len(lists) != 1:
                self._fail(
                    f"factor {name} is in no operand; name it in the rule and give its size as an attribute"
                )
            return len(lists[0])
        value = self._attr(base, "it is a factor's size")
        if index >= 0:
            value = value[index]
        return value if isinstance(value, int) else sum(value)

    def _length(self, pattern: Tensor) -> int:
        """The number of tensors in a list of results: of the sizes given (split), or a size that vanishes (unbind)."""
        for name in pattern.factors:
            if sizes := self._listed(name):
                return len(sizes)
        kept = {name for result in self._notation.results for name in result.factors}
        gone = [
            name
            for name in self._sizes
            if name not in kept and not name.startswith(REST)
        ]
        if len(gone) != 1:
            self._fail(
                f"how many tensors does '{pattern}' have? Give the sizes of one of its factors as an attribute"
            )
        return self._sizes[gone[0]]

    def _piece(self, dim: Dim, index: int) -> int:
        sizes = self._listed(dim[0]) if dim else None
        return sizes[index] if sizes else self._product(dim)

    def _listed(self, name: str) -> Sequence[int] | None:
        """The sizes of a factor in the tensors of a list of results, where the call gives them one by one."""
        value = self._attrs.get(name)
        return value if isinstance(value, (list, tuple)) else None

    # --- what the factors may do

    def settle(self, tensor: BoundTensor) -> BoundTensor:
        """Takes the factor from dims that only stretch, and factors of size one from merged dims."""
        dims = []
        for dim, size in zip(tensor.dims, tensor.shape, strict=True):
            if len(dim) > 1:
                self._stretched.update(name for name in dim if self._sizes[name] == 1)
            stretched = (
                size == 1
                and self._product(dim) != 1
                and self._stretches(dim[0], tensor)
            )
            ones = self._stretched if len(dim) > 1 else ()
            dims.append(
                () if stretched else tuple(name for name in dim if name not in ones)
            )
        return BoundTensor(tensor.place, tensor.pattern, tuple(dims), tensor.shape)

    def factors(self, operands: Bound, results: Bound) -> tuple[BoundFactor, ...]:
        tensors = [*flat(operands), *flat(results)]
        names = dict.fromkeys(
            name for tensor in tensors for dim in tensor.dims for name in dim
        )
        return tuple(self._factor(name, tensors, flat(results)) for name in names)

    def _factor(
        self, name: str, tensors: list[BoundTensor], results: list[BoundTensor]
    ) -> BoundFactor:
        mark = self._marks.get(self._gathered_from.get(name, (name, 0))[0])
        held = [result.find(name) is not None for result in results]
        spots = [[dim for dim in tensor.dims if name in dim] for tensor in tensors]
        whole = (
            mark == WHOLE
            or name in self._stretched
            or any(held)
            != all(
                held
            )  # it is not told what the results without it would be: the same, or parts
            or any(
                len(dims) > 1 or (dims and dims[0][0] != name) for dims in spots
            )  # on a diagonal; not outermost
        )
        inner = {
            self._product(dim[1:]) for dims in spots for dim in dims if dim[0] == name
        }
        return BoundFactor(
            name,
            self._sizes[name],
            any(held),
            whole,
            mark == LOOKED_UP,
            tuple(sorted(inner - {1})),
        )

    def _attr(self, name: str, why: str) -> Any:
        if name not in self._attrs:
            self._fail(
                f"attribute {name!r} is missing ({why}); got {sorted(self._attrs)}"
            )
        return self._attrs[name]

    def _fail(self, problem: str) -> NoReturn:
        raise coded(ValueError, "HP302", f"rule '{self._notation}': {problem}")


def flat(
    tensors: Iterable[BoundTensor | tuple[BoundTensor, ...] | None],
) -> list[BoundTensor]:
    """The tensors that are there, those of lists too."""
    return [
        t
        for item in tensors
        if item is not None
        for t in (item if isinstance(item, tuple) else (item,))
    ]
