# SPDX-License-Identifier: Apache-2.0
"""An operator's entry in the tables: its parameters, its rule, and what its local call must do differently.

operator("relu", "input", pointwise(1))
operator("mean", "input, dim=None, keepdim=False", mean_rule, local=mean_of_shards)
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.shard.rule import Rule
from hyper_parallel.platform.platform import OpName


@dataclass(frozen=True)
class RuleForCall:
    """What a rule that depends on the arguments comes to: the rule, what its text refers to, and its operands."""

    rule: Rule
    attrs: Mapping[str, Any] = field(default_factory=dict)
    operands: Sequence[Any] | None = None  # the first parameters, where none are given


class UnruledCall(Exception):  # noqa: N818 - a way to go on, not an error
    """The operator has no rule for these arguments."""


@dataclass(frozen=True)
class Operator:
    """One operator.

    ``rule``: a Rule whose operands are the first parameters; or a function of the arguments that gives a Rule, a
    RuleForCall, a function that does the call by other operators as a handler does, or None where no rule holds. It may
    look at the shapes, dtypes and layouts of tensors and at all other arguments, but of a float only at its kind (zero,
    finite, infinite): what it decides is remembered.
    ``local``: ``local(here, **arguments)`` instead of the operator itself, where a shard needs something else.
    ``handler``: ``handler(**arguments)`` on the distributed tensors does it all; no rule.
    ``direct``: ``direct(func, args, kwargs)`` does it all on the arguments as they came.
    ``view``: the result shares the memory of the first operand; "maybe" where that depends on how it lies in memory.
    ``ready``: ``ready(here, **arguments)`` gives, once for a plan, a function that does what ``local`` does when it is
    called in place of the operator, with the shards among the arguments as they came; or None.
    ``zeros``: plain zeros among the arguments are taken: torch's modules begin with them.
    ``lists``: it works on lists entry by entry, so they may hold plain and distributed tensors; only with ``direct``.
    ``any_layout``: ``handler``, ``direct`` or a function that ``rule`` gives is right for irregular placements too.
    ``order_free``: ``local`` asks its rank for sizes and shapes only, so a dim may have an irregular placement.
    ``overridable``: a context may do its calls in another way; see ``Override.call``.
    ``family``: the module that put it into the table.
    """

    name: str
    parameters: tuple[str, ...]
    defaults: Mapping[str, Any]
    rest: str | None  # the parameter that takes all other positional arguments
    rule: Rule | Callable[..., Any] | None = None
    local: Callable[..., Any] | None = None
    handler: Callable[..., Any] | None = None
    direct: Callable[..., Any] | None = None
    view: bool | str = False
    zeros: bool = False
    ready: Callable[..., Callable[..., Any] | None] | None = None
    lists: bool = False
    any_layout: bool = False
    order_free: bool = False
    overridable: bool = False
    family: str = ""

    def arguments(
        self, called: OpName, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The arguments by name, with the defaults of those that were not given."""
        names = called.parameters or self.parameters
        found: dict[str, Any] = dict(zip(names, args, strict=False))
        if len(args) > len(names) or (self.rest is not None and self.rest in found):
            if self.rest is None:
                raise UnruledCall(
                    f"{len(args)} positional arguments, expected {', '.join(self.parameters)}"
                )
            start = names.index(self.rest) if self.rest in names else len(names)
            found[self.rest] = _pack_rest(args[start:])
        found.update(kwargs)
        return {**self.defaults, **self._drop_unknown(found)}

    def _drop_unknown(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments that the rule knows; others must be None."""
        known = {}
        for name, value in arguments.items():
            if name in self.defaults or name in self.parameters:
                known[name] = value
            elif value is not None:
                raise UnruledCall(
                    f"the argument {name}={value!r} is not known to the rule"
                )
        return known


OPERATORS: dict[str, Operator] = {}
ON_CHANGE: list[
    Callable[[], None]
] = []  # called when an operator is put into the table


def _pack_rest(values: Sequence[Any]) -> Any:
    """Several positional arguments as a tuple; a list or tuple that is given alone as it is."""
    if len(values) == 1 and isinstance(values[0], (list, tuple)):
        return values[0]
    return tuple(values)


def operator(
    names: str,
    parameters: str,
    rule: Rule | Callable[..., Any] | None = None,
    *,
    local: Callable[..., Any] | None = None,
    handler: Callable[..., Any] | None = None,
    direct: Callable[..., Any] | None = None,
    view: bool | str = False,
    zeros: bool = False,
    ready: Callable[..., Callable[..., Any] | None] | None = None,
    lists: bool = False,
    any_layout: bool = False,
    order_free: bool = False,
    overridable: bool = False,
) -> None:
    """Puts operators of these names, separated by spaces, into the table."""
    positional, defaults, rest = _parsed(parameters)
    family = sys._getframe(1).f_globals.get("__name__", "")
    ways = rule, local, handler, direct, view, zeros, ready, lists
    facts = any_layout, order_free, overridable
    for name in names.split():
        OPERATORS[name] = Operator(
            name, positional, defaults, rest, *ways, *facts, family
        )
    for told in ON_CHANGE:
        told()


def _parsed(text: str) -> tuple[tuple[str, ...], dict[str, Any], str | None]:
    """The names of the parameters, their defaults, and the one with a star."""
    tree = ast.parse(f"lambda {text}: 0", mode="eval").body
    assert isinstance(tree, ast.Lambda)
    found = tree.args
    names = [arg.arg for arg in found.args]
    values = [ast.literal_eval(value) for value in found.defaults]
    defaults = dict(zip(names[len(names) - len(values) :], values, strict=True))
    rest = found.vararg.arg if found.vararg else None
    if rest is not None:
        names.append(rest)
    for arg, value in zip(found.kwonlyargs, found.kw_defaults, strict=True):
        defaults[arg.arg] = ast.literal_eval(value) if value is not None else None
    return tuple(names), defaults, rest
