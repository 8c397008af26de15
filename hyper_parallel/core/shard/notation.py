# SPDX-License-Identifier: Apache-2.0
"""The text of an operator rule as a value: ``parse`` reads it, ``str`` prints it back.

str(parse("... k,n k,+n->... n")) == "... k, n k, +n -> ... n"

rule   := tensor ("," tensor)* "->" tensor ("," tensor)*
tensor := "+"? dim*  |  "+"? "[" dim* "]"      no dims: a scalar; "+": added, not multiplied; [ ]: a list of tensors
dim    := "..."                                the other dims, right-aligned between the tensors
        | name mark?                           a factor
        | "(" (name "!"?)+ ")"                 merged dims, outermost first
        | "{" attr ("=" (name | "1"))? "}" mark?     at the position that an attribute of the call gives
mark   := "!" (whole)  |  "@" (looked up)      belongs to the factor: written once, it holds wherever the factor is
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

from hyper_parallel.platform.error_codes import hint

WHOLE = "!"
LOOKED_UP = "@"
REST = "..."
ADDED = "+"

_TOKEN = re.compile(
    r"\s*(?:(\.\.\.|->|[A-Za-z_]\w*|\d+|[,+!@(){}\[\]=])|$|(\S))", re.ASCII
)
_END = ""


class NotationError(ValueError):
    """A rule's text that cannot be read; ``position`` is the place in ``text``."""

    def __init__(self, text: str, position: int, problem: str) -> None:
        headline = f"rule {text!r}, column {position + 1}: {problem}{hint('HP301')}"
        super().__init__(f"{headline}\n    {text}\n    {' ' * position}^")
        self.code = "HP301"
        self.text = text
        self.position = position


@dataclass(frozen=True, slots=True)
class Rest:
    """``...``"""

    factors: ClassVar[tuple[str, ...]] = (REST,)
    mark: ClassVar[str] = ""

    def __str__(self) -> str:
        return REST


@dataclass(frozen=True, slots=True)
class Named:
    """``k`` or ``k!`` or ``v@``"""

    name: str
    mark: str = ""

    @property
    def factors(self) -> tuple[str, ...]:
        return (self.name,)

    def __str__(self) -> str:
        return self.name + self.mark


@dataclass(frozen=True, slots=True)
class Merged:
    """``(h g)``: one dim of h * g, in which h is the outer factor."""

    factors: tuple[str, ...]
    whole: tuple[
        str, ...
    ] = ()  # those marked "!": where the outer ones have size one, they could be cut
    mark: ClassVar[str] = ""

    def __str__(self) -> str:
        return f"({' '.join(name + WHOLE * (name in self.whole) for name in self.factors)})"


@dataclass(frozen=True, slots=True)
class At:
    """``{dim}``, ``{dim=v}@`` or ``{dim=1}``: where the attribute ``dim`` points to."""

    attr: str
    name: str = ""
    mark: str = ""

    @property
    def factors(self) -> tuple[str, ...]:
        """The factor; none for a dim of size one. A factor without a name of its own is called ``{dim}``."""
        if self.name == "1":
            return ()
        return (self.name or f"{{{self.attr}}}",)

    def __str__(self) -> str:
        return f"{{{self.attr}{'=' if self.name else ''}{self.name}}}{self.mark}"


Dim = Rest | Named | Merged | At


@dataclass(frozen=True, slots=True)
class Tensor:
    """The pattern of one operand or result, or of every tensor of a list."""

    dims: tuple[Dim, ...]
    added: bool = False
    listed: bool = False

    @property
    def factors(self) -> tuple[str, ...]:
        return tuple(name for dim in self.dims for name in dim.factors)

    def __str__(self) -> str:
        inner = " ".join(map(str, self.dims))
        return (ADDED if self.added else "") + (f"[{inner}]" if self.listed else inner)


@dataclass(frozen=True, slots=True)
class Notation:
    """A rule's text, read."""

    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    marks: dict[str, str] = field(init=False, compare=False)  # of every marked factor

    def __post_init__(self) -> None:
        dims = [
            dim for tensor in (*self.operands, *self.results) for dim in tensor.dims
        ]
        object.__setattr__(
            self,
            "marks",
            {name: dim.mark for dim in dims for name in dim.factors if dim.mark},
        )
        self.marks.update(
            {
                name: WHOLE
                for dim in dims
                if isinstance(dim, Merged)
                for name in dim.whole
            }
        )

    def __str__(self) -> str:
        left, right = (
            ", ".join(map(str, side)).rstrip() for side in (self.operands, self.results)
        )
        return f"{left} -> {right}".strip()


@cache
def parse(text: str) -> Notation:
    """Reads a rule's text; a text that breaks the grammar is a NotationError that points to the place."""
    return _Reader(text).read()


class _Reader:
    """Reads one text from left to right, one token ahead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._marks: dict[str, str] = {}
        self._position = self._next = 0
        self._token = _END
        self._advance()

    def read(self) -> Notation:
        operands = self._tensors(in_results=False)
        self._expect("->", "a dim, ',' or '->'")
        results = self._tensors(in_results=True)
        if self._token != _END:
            raise self._error("expected a dim, ',' or the end")
        return Notation(operands, results)

    def _tensors(self, *, in_results: bool) -> tuple[Tensor, ...]:
        found = [self._tensor(in_results)]
        while self._accept(","):
            found.append(self._tensor(in_results))
        return tuple(found)

    def _tensor(self, in_results: bool) -> Tensor:
        if in_results and self._token == ADDED:
            raise self._error(
                "'+' marks an operand that is added; a result cannot have it"
            )
        added, listed = self._accept(ADDED), self._accept("[")
        dims = self._dims()
        if listed:
            self._expect(
                "]", "a dim or ']' (one pattern stands for all tensors of a list)"
            )
        return Tensor(dims, added, listed)

    def _dims(self) -> tuple[Dim, ...]:
        dims: list[Dim] = []
        while self._token in (REST, "(", "{") or self._token.isidentifier():
            if self._token == REST and Rest() in dims:
                raise self._error("a tensor can have '...' only once")
            dims.append(self._dim())
        return tuple(dims)

    def _dim(self) -> Dim:
        if self._accept(REST):
            return Rest()
        if self._accept("("):
            return self._merged()
        if self._accept("{"):
            return self._at()
        name = self._name("a factor")
        return Named(name, self._mark(name))

    def _merged(self) -> Merged:
        names: list[str] = []
        whole: list[str] = []
        while self._token.isidentifier() or not names:
            names.append(self._name("a factor"))
            if self._token == WHOLE:
                self._mark(names[-1])
                whole.append(names[-1])
        self._expect(")", "a factor or ')'")
        return Merged(tuple(names), tuple(dict.fromkeys(whole)))

    def _at(self) -> At:
        attr, name = self._name("the name of an attribute"), ""
        if self._accept("="):
            name = "1" if self._accept("1") else self._name("a factor or 1")
        self._expect("}", "'}'" if name else "'=' or '}'")
        at = At(attr, name)
        return At(attr, name, self._mark(*at.factors))

    def _mark(self, name: str = "") -> str:
        mark = self._token
        if mark not in (WHOLE, LOOKED_UP):
            return ""
        if name and self._marks.setdefault(name, mark) != mark:
            raise self._error(
                f"factor {name} is marked {self._marks[name]!r} before; a factor has one mark"
            )
        self._advance()
        return mark

    def _name(self, what: str) -> str:
        if not self._token.isidentifier():
            raise self._error(f"expected {what}")
        name = self._token
        self._advance()
        return name

    def _accept(self, token: str) -> bool:
        if self._token != token:
            return False
        self._advance()
        return True

    def _expect(self, token: str, what: str) -> None:
        if not self._accept(token):
            raise self._error(f"expected {what}")

    def _advance(self) -> None:
        match = _TOKEN.match(self._text, self._next)
        assert (
            match is not None
        )  # the last alternatives take any character, and the end
        self._token = match[1] or match[2] or _END
        self._position = match.end() - len(self._token)
        self._next = match.end()

    def _error(self, problem: str) -> NotationError:
        if problem.startswith("expected"):
            problem += f", got {self._token!r}" if self._token else ", got the end"
        return NotationError(self._text, self._position, problem)


def from_equation(equation: str) -> str:
    """The text of an einsum equation, in which every letter is a factor: ``"ij,jk->ik"`` is ``"i j, j k -> i k"``.

    Without ``->`` the result has ``...`` and then, in alphabetical order, the letters that occur once.
    """
    for match in re.finditer(r"\.\.\.|->(?!.*->)|[A-Za-z,\s]|(->|.)", equation):
        if match[1]:
            expected = "a letter, '...', ',' or one '->'"
            raise NotationError(
                equation, match.start(), f"expected {expected}, got {match[1]!r}"
            )
    left, arrow, right = equation.partition("->")
    if not arrow:
        letters = [c for c in left if c.isalpha()]
        right = (REST if REST in left else "") + "".join(
            sorted(c for c in letters if letters.count(c) == 1)
        )
    spaced = [re.sub(r"(\.\.\.|[A-Za-z])\s*", r"\1 ", side) for side in (left, right)]
    return str(parse("->".join(spaced)))
