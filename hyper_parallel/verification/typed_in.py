# SPDX-License-Identifier: Apache-2.0
"""Functions and classes that are in no file, such as those of a notebook's cells, for another process.

They travel as their source, which ``linecache`` has, with that of all else which was typed in and to which they refer;
modules travel as their names and other values as pickles.
"""

from __future__ import annotations

import ast
import dis
import importlib
import inspect
import linecache
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from hyper_parallel.platform.error_codes import coded

_HOME = "__ranks_typed_in__"


class Definition(NamedTuple):
    """A def or class statement, with the place of its first line in what was typed in together."""

    file: str
    line: int
    text: str

    @property
    def code(self) -> CodeType:
        """The statement, with the lines that it has there."""
        return compile("\n" * (self.line - 1) + self.text, self.file, "exec")


@dataclass(frozen=True)
class TypedIn:
    """A function or class that is in no file."""

    name: str
    definitions: dict[str, Definition] = field(
        default_factory=dict
    )  # in the order in which they are needed
    modules: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, thing: Any) -> TypedIn:
        """A function or class with all that it refers to; a ValueError that says what cannot be sent."""
        made = cls(thing.__qualname__)
        made._take(thing)
        return made

    def load(self) -> Any:
        """The function or class, made again in this process."""
        home = sys.modules[_HOME] = ModuleType(_HOME)
        vars(home).update(self.values)
        for name, module in self.modules.items():
            setattr(home, name, importlib.import_module(module))
        for definition in self.definitions.values():
            lines = ("\n" * (definition.line - 1) + definition.text).splitlines(
                keepends=True
            )
            linecache.cache[definition.file] = (
                len(lines),
                None,
                lines,
                definition.file,
            )
            exec(definition.code, vars(home))  # noqa: S102 - from our own parent process
        return getattr(home, self.name)

    def _take(self, thing: Any) -> None:
        function = _function_of(thing)
        definition = _definition_of(thing, function)
        known = {thing.__qualname__, "__name__"}
        for name in _globals_in(definition.code):
            known.update(self.definitions, self.modules, self.values)
            if name in function.__globals__ and name not in known:
                self._take_named(name, function.__globals__[name], thing)
        self.definitions[thing.__qualname__] = definition

    def _take_named(self, name: str, value: Any, user: Any) -> None:
        if isinstance(value, ModuleType):
            self.modules[name] = value.__name__
        elif is_typed_in(value) and value.__qualname__ == name:
            self._take(value)
        else:
            try:
                pickle.dumps(value)
            except Exception as error:  # user values may fail to pickle in any way
                raise coded(
                    ValueError,
                    "HP711",
                    f"{user.__qualname__} refers to {name}, which cannot be sent to the ranks: {error}; make it "
                    "inside the function",
                ) from error
            self.values[name] = value


def is_typed_in(thing: Any) -> bool:
    """Whether it is a function or class whose source is known, but in no file."""
    try:
        file = _function_of(thing).__code__.co_filename
    except ValueError:
        return False
    return not Path(file).is_file() and bool(linecache.getlines(file))


def _function_of(thing: Any) -> FunctionType:
    """The function itself, or one that a class defines: it knows where it was typed in."""
    candidates = vars(thing).values() if inspect.isclass(thing) else [thing]
    for candidate in candidates:
        found = inspect.unwrap(candidate) if callable(candidate) else candidate
        if isinstance(found, FunctionType):
            return found
    raise coded(
        ValueError,
        "HP711",
        f"{thing!r} defines no function by which its source could be found",
    )


def _definition_of(thing: Any, function: FunctionType) -> Definition:
    file, line = function.__code__.co_filename, function.__code__.co_firstlineno
    lines = linecache.getlines(file)
    for node in ast.parse("".join(lines)).body:
        if (
            not isinstance(node, (ast.FunctionDef, ast.ClassDef))
            or node.name != thing.__qualname__
        ):
            continue
        first = min(
            [node.lineno, *(decorator.lineno for decorator in node.decorator_list)]
        )
        last = node.end_lineno or node.lineno
        if first <= line <= last:
            return Definition(file, first, "".join(lines[first - 1 : last]))
    raise coded(
        ValueError,
        "HP711",
        f"{thing.__qualname__} must be defined by a statement at the level of its cell",
    )


def _globals_in(code: CodeType) -> Iterator[str]:
    """The global names that code reads, also in the functions and classes in it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_in(constant)
