# SPDX-License-Identifier: Apache-2.0
"""Only module boundaries attach hooks to modules, so that their order is that of one table of phases."""

import ast

import pytest
from guards.sources import PACKAGE, modules

REGISTER = {
    "register_backward_hook",
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
}
BOUNDARY = "hyper_parallel.core.modules.boundary"
# Below boundaries in the layers, so they cannot use them: what users pass to distribute_module and shard_module, and
# the ledger's names of modules. Nothing is to be added here.
BELOW = {
    "hyper_parallel.core.dtensor.dtensor",
    "hyper_parallel.core.dtensor.ledger",
    "hyper_parallel.core.shard.sharding_plan",
}


def hook_registrations(package):
    """Calls and other uses of functions that attach hooks to modules, outside the platform."""
    problems = []
    for name, tree in modules(package).items():
        if name == BOUNDARY or name.startswith(f"{package.name}.platform"):
            continue
        problems += [
            f"{name}:{node.lineno} {node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr in REGISTER
        ]
    return problems


def test_only_boundaries_attach_hooks():
    found = {problem.partition(":")[0] for problem in hook_registrations(PACKAGE)}
    assert found == BELOW


@pytest.mark.parametrize("name", sorted(REGISTER))
def test_control_a_hook_is_found(tmp_path, name):
    file = tmp_path / "hyper_parallel/core/tensor_parallel/a.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"def f(module):\n    attach = module.{name}\n    attach(print)")
    assert hook_registrations(tmp_path / "hyper_parallel") == [
        f"hyper_parallel.core.tensor_parallel.a:2 {name}"
    ]
