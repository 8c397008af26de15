# SPDX-License-Identifier: Apache-2.0
"""Who may import whom. Each guard is also shown a tree in which it must find something."""

import subprocess
import sys

import pytest
from guards.sources import PACKAGE, imports, is_package, modules

FRAMEWORKS = ("torch", "mindspore", "torch_npu")

# A layer may import itself and the layers below it; packages of one layer do not know each other.
LAYERS = [
    ["hyper_parallel.platform"],
    ["hyper_parallel.core.dtensor", "hyper_parallel.ranks"],
    ["hyper_parallel.core.shard"],
    ["hyper_parallel.core.modules"],
    [
        "hyper_parallel.core.activation_checkpoint",
        "hyper_parallel.core.context_parallel",
        "hyper_parallel.core.data_parallel",
        "hyper_parallel.core.distributed_checkpoint",
        "hyper_parallel.core.expert_parallel",
        "hyper_parallel.core.fully_shard",
        "hyper_parallel.core.pipeline_parallel",
        "hyper_parallel.core.tensor_parallel",
        "hyper_parallel.collectives",
    ],
    ["hyper_parallel.core.training"],
    ["hyper_parallel.testing"],
    ["hyper_parallel.planning"],
    ["hyper_parallel.recipe", "hyper_parallel.verification"],
    ["hyper_parallel.cli"],
]
# Public names that were moved between packages of one layer stay importable from where they were. Only the
# ``__init__`` of that package may do so, and by a deferred import: no code depends on its neighbour.
REEXPORTS = {
    "hyper_parallel.core.tensor_parallel": "hyper_parallel.core.data_parallel",
}
UNLAYERED = {
    "hyper_parallel",
    "hyper_parallel.core",
}  # they only name what the layers hold


def within(name, package):
    return name == package or name.startswith(package + ".")


def framework_imports(package):
    """Imports of a framework outside platform/<framework>/."""
    problems = []
    for name, tree in modules(package).items():
        if any(
            within(name, f"{package.name}.platform.{framework}")
            for framework in FRAMEWORKS
        ):
            continue
        for line, imported in imports(name, tree, package=is_package(package, name)):
            if imported.split(".")[0] in FRAMEWORKS:
                problems.append(f"{name}:{line} imports {imported}")
    return problems


def place(name, known):
    """(layer, package) of a module; None for the folders that hold layers."""
    for number, packages in enumerate(LAYERS):
        for package in packages:
            if within(name, package):
                return number, package
    # Of what is imported only a prefix may be a module: `hyper_parallel.core` or a name in it.
    if name in UNLAYERED or (
        name not in known and name.rpartition(".")[0] in UNLAYERED
    ):
        return None
    return -1, name


def upward_imports(package):
    """Imports that point to a higher layer or to a neighbour, and modules that belong to no layer."""
    problems = []
    trees = modules(package)
    for name, tree in trees.items():
        own = place(name, trees)
        if own is None:
            continue
        if own[0] < 0:
            problems.append(f"{name} belongs to no layer; place it in LAYERS")
            continue
        for line, imported in imports(name, tree, package=is_package(package, name)):
            if not within(imported, "hyper_parallel"):
                continue
            other = place(imported, trees)
            if other is not None and REEXPORTS.get(name) == other[1]:
                continue
            if other is None or (other[0] >= own[0] and other[1] != own[1]):
                problems.append(f"{name}:{line} imports {imported}")
    return problems


@pytest.fixture
def tree(tmp_path):
    """Writes a small hyper_parallel with the given files."""

    def write(files):
        package = tmp_path / "hyper_parallel"
        for path, text in files.items():
            file = package / path
            file.parent.mkdir(parents=True, exist_ok=True)
            for folder in [file.parent, *file.parent.parents]:
                if folder == tmp_path:
                    break
                (folder / "__init__.py").touch()
            file.write_text(text)
        return package

    return write


def test_only_the_platform_imports_a_framework():
    assert framework_imports(PACKAGE) == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch",
        "import torch.nn as nn",
        "from torch import nn",
        "from mindspore.common import dtype",
        "def f():\n    import torch",
        "import importlib\nimportlib.import_module('mindspore')",
        "__import__('torch')",
    ],
)
def test_control_a_framework_import_is_found(tree, text):
    package = tree(
        {
            "core/dtensor/a.py": text,
            "platform/torch/b.py": text,
            "platform/torch_like.py": text,
        }
    )
    assert [problem.split(":")[0] for problem in framework_imports(package)] == [
        "hyper_parallel.core.dtensor.a",
        "hyper_parallel.platform.torch_like",
    ]


def test_imports_point_downwards():
    assert upward_imports(PACKAGE) == []


def imports_of_testing(package):
    """Imports of the tools for tests by code that trains."""
    problems = []
    for name, tree in modules(package).items():
        if not within(name, f"{package.name}.testing"):
            problems += [
                f"{name}:{line} imports {imported}"
                for line, imported in imports(
                    name, tree, package=is_package(package, name)
                )
                if within(imported, f"{package.name}.testing")
            ]
    return problems


def test_only_the_check_of_rules_imports_testing():
    """`hyper-parallel ops --check` is a front end of check_rule; nothing else outside needs what tests need."""
    found = imports_of_testing(PACKAGE)
    assert {problem.partition(":")[0] for problem in found} <= {
        "hyper_parallel.cli.ops"
    }


def test_control_an_import_of_testing_is_found(tree):
    package = tree({"recipe/a.py": "def f():\n    import hyper_parallel.testing.pool"})
    assert imports_of_testing(package) == [
        "hyper_parallel.recipe.a:2 imports hyper_parallel.testing.pool"
    ]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("platform/a.py", "from hyper_parallel.core.dtensor import layout"),
        ("platform/a.py", "from hyper_parallel.core import dtensor"),
        ("platform/a.py", "from ..core.dtensor import layout"),
        ("platform/a.py", "import hyper_parallel"),
        (
            "core/dtensor/a.py",
            "def f():\n    from hyper_parallel.core.shard import rule",
        ),
        (
            "core/tensor_parallel/a.py",
            "from hyper_parallel.core.fully_shard import api",
        ),
        (
            "core/tensor_parallel/a.py",
            "from hyper_parallel.core.data_parallel import replicate",
        ),
        (
            "core/data_parallel/__init__.py",
            "from hyper_parallel.core.tensor_parallel import style",
        ),
        ("core/shard/a.py", "from hyper_parallel.core.modules import boundary"),
        ("core/modules/a.py", "from hyper_parallel.core.tensor_parallel import style"),
        ("core/dtensor/a.py", "from hyper_parallel.testing import run_ranks"),
        (
            "core/tensor_parallel/a.py",
            "from hyper_parallel.core.training import training_step",
        ),
        ("core/dtensor/a.py", "from hyper_parallel.ranks import run_ranks"),
        ("ranks/a.py", "from hyper_parallel.core.dtensor import layout"),
        ("ranks/a.py", "from hyper_parallel.testing import on_ranks"),
        ("helpers/a.py", "x = 1"),
        ("core/loose.py", "x = 1"),
    ],
)
def test_control_an_upward_import_is_found(tree, file, text):
    package = tree({"core/dtensor/layout.py": "", "core/shard/rule.py": "", file: text})
    assert upward_imports(package)


def test_control_downward_imports_pass(tree):
    package = tree(
        {
            "core/dtensor/a.py": "from hyper_parallel.platform import x\nfrom . import b\nfrom .b import c",
            "core/tensor_parallel/a.py": "from hyper_parallel.core.dtensor import a\nimport numpy",
            "core/tensor_parallel/__init__.py": "from hyper_parallel.core.data_parallel import replicate",
            "core/data_parallel/a.py": "from hyper_parallel.core.modules import boundary",
            "core/modules/a.py": "from hyper_parallel.core.shard import rule",
        }
    )
    assert upward_imports(package) == []


COUNT = """
import sys
import torch, torch.distributed
before = set(sys.modules)
calls = 0
def count(frame, event, argument):
    global calls
    calls += 1
sys.setprofile(count)
{imports}
sys.setprofile(None)
new = set(sys.modules) - before
print(calls, len(new), *sorted({{m for m in new if not m.startswith("hyper_parallel")}}))
"""

# Python calls and returns that importing may cost, about 40 ms at the 10 000 that were measured; 150 ms is the limit.
MOST_CALLS = 30_000
MOST_MODULES = 60
HEAVY = (
    "torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "torch.distributed.tensor", "torch.onnx", "torch.testing", "torch.utils.tensorboard", "mindspore", "pytest",
    "safetensors", "sympy",
)  # fmt: skip


def import_cost(statements):
    code = COUNT.format(imports=statements)
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    calls, count, *new = run.stdout.split()
    return int(calls), int(count), new


def heavy(names):
    return [name for name in names if any(within(name, part) for part in HEAVY)]


def test_importing_and_choosing_the_platform_is_light():
    calls, count, new = import_cost(
        "import hyper_parallel\nhyper_parallel.get_platform()"
    )
    assert heavy(new) == []
    assert count < MOST_MODULES
    assert calls < MOST_CALLS


PLANNING = """
import sys
from hyper_parallel import Layout, Replicate, Shard, ZigzagShard
from hyper_parallel.core.dtensor.redistribution import plan
grid = Layout((2, 4), ("dp", "tp"))
made = plan(grid([Shard(0), ZigzagShard(1)]), grid([Shard(1), Replicate()]), (8, 64))
assert made.nbytes and made.layouts[-1] is grid([Shard(1), Replicate()]).bind(2)
{control}
assert not {{"torch", "mindspore"}} & set(sys.modules)
"""


@pytest.mark.parametrize(
    ("control", "code"), [("", 0), ("grid.mesh.get_group('tp')", 1)]
)
def test_layouts_and_plans_need_no_framework(control, code):
    script = PLANNING.format(control=control)
    run = subprocess.run([sys.executable, "-c", script], timeout=120, check=False)
    assert run.returncode == code


def test_control_a_heavy_import_is_found():
    calls, count, new = import_cost("import torch.distributed.fsdp")
    assert heavy(new)
    assert count > MOST_MODULES
    assert calls > MOST_CALLS
