# SPDX-License-Identifier: Apache-2.0
"""Looks into Python files without running them: which classes and functions there are, and what they take."""

from __future__ import annotations

import ast
from pathlib import Path


class Source:
    """A file's top level. What it imports from elsewhere is not known."""

    def __init__(self, path: Path) -> None:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        self.classes = {
            node.name: node for node in tree.body if isinstance(node, ast.ClassDef)
        }
        self.functions = {
            node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)
        }
        self.imports = any(isinstance(node, ast.ImportFrom) for node in tree.body)

    def arguments_of_class(self, name: str) -> list[str] | None:
        """What a class takes by keyword, or the fields of the one dataclass that it takes; None if nobody can tell."""
        made = {
            node.name: node
            for node in self.classes[name].body
            if isinstance(node, ast.FunctionDef)
        }
        init = made.get("__init__")
        if init is None or init.args.kwarg is not None:
            return None
        taken = _parameters(init)[1:]
        if len(taken) == 1 and taken[0].annotation is not None:  # it may be a dataclass
            kind = self.classes.get(ast.unparse(taken[0].annotation).strip("'\""))
            is_plain = kind is not None and "dataclass" in "".join(
                map(ast.unparse, kind.decorator_list)
            )
            return (
                _fields(kind)
                if kind is not None and is_plain and not kind.bases
                else None
            )
        return [one.arg for one in taken]

    def arguments_of_function(self, name: str) -> list[str] | None:
        """The parameters of a function in order; None if it takes any keyword."""
        function = self.functions[name]
        return (
            None
            if function.args.kwarg is not None
            else [one.arg for one in _parameters(function)]
        )


def _parameters(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _fields(kind: ast.ClassDef) -> list[str]:
    return [
        node.target.id
        for node in kind.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
