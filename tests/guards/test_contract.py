# SPDX-License-Identifier: Apache-2.0
"""The parts of the platform's contract are apart: no method is in two, and ``external`` is not used by the package."""

import ast
import inspect

from guards.sources import PACKAGE, modules

from hyper_parallel.platform.contract import (
    activations,
    attention,
    autograd,
    collectives,
    devices,
    differentiable,
    external,
    memory,
    native,
    ranks,
    tensors,
)
from hyper_parallel.platform.contract import modules as module_part
from hyper_parallel.platform.platform import Platform

PARTS = [
    ranks.Ranks,
    collectives.Collectives,
    differentiable.DifferentiableCollectives,
    tensors.Tensors,
    autograd.Autograd,
    module_part.Modules,
    devices.Devices,
    memory.Memory,
    native.Native,
    activations.Activations,
    attention.Attention,
    external.External,
]


def declared(part):
    """The public methods and properties that a part itself declares."""
    return {
        name
        for name, value in vars(part).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or isinstance(value, property))
    }


def used_of(names, package=PACKAGE):
    """(module, name) for every use of a platform's attribute of these names above the platform."""
    uses = []
    for module, tree in modules(package).items():
        if module.startswith(f"{package.name}.platform"):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or node.attr not in names:
                continue
            if ast.unparse(node.value).endswith(("platform", "get_platform()")):
                uses.append((module, node.attr))
    return uses


def test_platform_is_its_parts():
    assert set(PARTS) <= set(Platform.__mro__)
    assert not declared(Platform)


def test_no_method_is_declared_twice():
    names = [name for part in PARTS for name in declared(part)]
    assert sorted(names) == sorted(set(names))


def test_the_package_does_not_use_the_external_part():
    """Move a method that the package begins to use to the part that it belongs to."""
    assert used_of(declared(external.External)) == []


def test_control_a_use_is_found(tmp_path):
    package = tmp_path / "hyper_parallel"
    (package / "core").mkdir(parents=True)
    for folder in (package, package / "core"):
        (folder / "__init__.py").touch()
    (package / "core/a.py").write_text("get_platform().new_stream()\n")
    assert used_of(declared(external.External), package) == [
        ("hyper_parallel.core.a", "new_stream")
    ]
