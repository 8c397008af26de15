# SPDX-License-Identifier: Apache-2.0
"""Reads the package's sources: what a module imports, what a package exports."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hyper_parallel"


def modules(package):
    """Dotted module name -> syntax tree, for every file below a package folder."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = _parsed(file.read_text(), str(file))
    return found


@functools.cache  # many tests look at the same trees, and none changes them
def _parsed(text, file):
    return ast.parse(text, file)


def is_package(package, name):
    return (package.parent / Path(*name.split(".")) / "__init__.py").exists()


def imports(name, tree, *, package=False):
    """(line, dotted name) of everything that a module imports, wherever it stands and however it is written."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = name.split(".")[: len(name.split(".")) - node.level + package]
                base = ".".join([*above, base] if base else above)
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        elif (
            isinstance(node, ast.Call)
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            called = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            if called in ("import_module", "__import__"):
                found.append((node.lineno, str(node.args[0].value)))
    return found
