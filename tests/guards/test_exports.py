# SPDX-License-Identifier: Apache-2.0
"""Every package that exports names has an ``__all__`` that is sorted and complete."""

import ast
import importlib
import sys
from importlib.util import find_spec

import pytest
from guards.sources import PACKAGE, is_package, modules


def public_names(tree, package):
    """Names that a module's top level binds and that do not start with an underscore."""
    names = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            package.split(".")[0]
        ):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def declared(tree):
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            getattr(t, "id", "") == "__all__" for t in node.targets
        ):
            return [element.value for element in node.value.elts]
    return None


def export_problems(package, name, tree):
    names, public = declared(tree), public_names(tree, name)
    if names is None:
        return [f"{name} exports {sorted(public)} without an __all__"] if public else []
    problems = []
    if names != sorted(set(names)):
        problems.append(f"{name}.__all__ is not sorted")
    if missing := public - set(names):
        problems.append(f"{name}.__all__ lacks {sorted(missing)}")
    if unknown := [n for n in names if not hasattr(package, n)]:
        problems.append(f"{name}.__all__ names {unknown}, which do not exist")
    return problems


# A framework that is not installed here has its own run of the tests.
ABSENT = tuple(
    f"{PACKAGE.name}.platform.{name}."
    for name in ("mindspore", "torch")
    if find_spec(name) is None
)
PACKAGES = [
    name
    for name in modules(PACKAGE)
    if is_package(PACKAGE, name) and not f"{name}.".startswith(ABSENT)
]


@pytest.mark.parametrize("name", PACKAGES)
def test_all_is_sorted_and_complete(name):
    assert (
        export_problems(importlib.import_module(name), name, modules(PACKAGE)[name])
        == []
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a = 1\nb = 2\n__all__ = ['b', 'a']", "not sorted"),
        ("a = 1\ndef b(): pass\n__all__ = ['a']", r"lacks \['b'\]"),
        (
            "from made_up.part import thing\na = 1\n__all__ = ['a']",
            r"lacks \['thing'\]",
        ),
        ("a = 1\n__all__ = ['a', 'c']", r"names \['c'\]"),
        ("a = 1", "without an __all__"),
    ],
)
def test_control_each_fault_is_found(text, problem, monkeypatch):
    import re
    from types import ModuleType

    module, part = ModuleType("made_up"), ModuleType("made_up.part")
    part.thing = 1
    monkeypatch.setitem(sys.modules, "made_up", module)
    monkeypatch.setitem(sys.modules, "made_up.part", part)
    exec(text, module.__dict__)
    problems = export_problems(module, "made_up", ast.parse(text))
    assert any(re.search(problem, found) for found in problems), problems
