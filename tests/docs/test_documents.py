# SPDX-License-Identifier: Apache-2.0
"""The README, the examples and the generated tables say what is true; test_site has the pages' code and links."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import run_script

from tools import platform_table

ROOT = Path(__file__).resolve().parents[2]
FIRST = ROOT / "examples/first.py"
EXAMPLES = sorted(
    {*(ROOT / "examples").glob("*.py")} - {FIRST, ROOT / "examples/demo.py"}
)  # test_demo has the latter


def test_the_first_example_runs_by_the_readmes_command():
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
    ]
    run = subprocess.run(
        [*command, FIRST], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for rank in range(4):
        assert f"rank {rank}" in run.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run_on_four_processes(example, tmp_path):
    codes, told = run_script(example, 4, tmp_path)
    assert codes == [0] * 4, "\n".join(told)
    for rank in range(4):
        assert f"rank {rank}" in "".join(told)


def test_the_first_example_stands_in_the_readme():
    [block] = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert block == (ROOT / "examples/first.py").read_text()


def test_the_readmes_commands_are_targets():
    commands = set(
        re.findall(
            r"(?:^|`)make ([a-z]+)", (ROOT / "README.md").read_text(), re.MULTILINE
        )
    )
    targets = set(
        re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    )
    assert {"demo", "test"} <= commands <= targets


def test_python_in_the_testing_page_runs_on_ranks(tmp_path):
    [block] = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/testing.md").read_text(), re.DOTALL
    )
    (tmp_path / "test_page.py").write_text(block)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert "2 passed" in run.stdout, run.stdout + run.stderr


def test_python_in_the_page_on_operators_runs(tmp_path):
    blocks = re.findall(
        r"```python\n(.*?)```",
        (ROOT / "docs/add-an-operator.md").read_text(),
        re.DOTALL,
    )
    (tmp_path / "page.py").write_text("\n".join(blocks))
    codes, [told] = run_script(tmp_path / "page.py", 1, tmp_path)
    assert codes == [0], told
    assert re.match(r"softmax: \.\.\. -> \.\.\. on \(2,\): shard", told), told


@pytest.fixture(scope="module")
def rows():
    return platform_table.rows()


def test_the_table_of_the_contract_is_current(rows):
    assert platform_table.PAGE.read_text() == platform_table.page(*rows), (
        "run make docs"
    )


def test_every_method_of_the_contract_is_tested_and_described(rows):
    methods, _ = rows
    assert [method.name for method in methods.values() if not method.tests] == []
    assert [
        method.name for method in methods.values() if len(method.summary) < 10
    ] == []


def test_control_an_untested_method_is_found(tmp_path):
    (tmp_path / "test_little.py").write_text(
        "def test_a():\n    platform.get_rank()\n    other.all_reduce()\n"
    )
    methods, functions = platform_table.rows(tests=tmp_path)
    assert functions == 1
    assert [name for name, method in methods.items() if method.tests] == ["get_rank"]
    assert "**nowhere**" in platform_table.page(methods, functions)


def test_what_no_hardware_has_seen_is_named(rows):
    methods, _ = rows
    for name in (
        "new_stream",
        "async_save_on_cpu",
        "get_symmetric_memory_handler",
        "empty_like",
    ):
        assert methods[name].untested, name


def test_signatures_of_the_contract_are_whole():
    """Every method of the abstract class exists, with that signature, on the torch platform."""
    import inspect

    from hyper_parallel.platform import Platform
    from hyper_parallel.platform.torch import TorchPlatform

    assert not TorchPlatform.__abstractmethods__
    for name in platform_table.contract_methods(platform_table.CONTRACT):
        promised, real = (
            inspect.getattr_static(owner, name) for owner in (Platform, TorchPlatform)
        )
        if isinstance(promised, property):
            assert isinstance(real, property), name
            continue
        assert list(inspect.signature(promised).parameters) == list(
            inspect.signature(real).parameters
        ), name
        assert "NotImplementedError" not in inspect.getsource(real), name


def test_the_plan_in_the_architecture_page_is_what_is_printed():
    from hyper_parallel import Layout
    from hyper_parallel.core.dtensor.redistribution import plan

    layout = Layout((2, 4), ("dp", "tp"))
    text = plan(
        layout("tp", "None"), layout(("dp", "tp"), "None"), (1024, 1024)
    ).explain()
    assert text in (ROOT / "docs/architecture.md").read_text()
