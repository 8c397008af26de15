# SPDX-License-Identifier: Apache-2.0
"""``hyper-parallel ops``: the table, one operator, and a check of rules of one's own."""

import pytest
from typer.testing import CliRunner

from hyper_parallel.cli import ops as command
from hyper_parallel.cli.checkpoints import application
from hyper_parallel.core.shard.ops import OPERATORS
from hyper_parallel.core.shard.ops.operator import ON_CHANGE

OWN = '''
import torch

from hyper_parallel.core.shard import DFunction, DistributedOp, pointwise


class Halved(DFunction):
    _op_name = "halved"

    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


class HalvedRule(DistributedOp):
    rule = pointwise(1, linear=0)


class Summed(DFunction):
    _op_name = "summed"

    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim = dim
        return x.cumsum(dim)

    @staticmethod
    def backward(ctx, grad):
        return grad.flip(ctx.dim).cumsum(ctx.dim).flip(ctx.dim), None


class SummedRule(DistributedOp):
    """Wrong: the running sum of a shard lacks what comes before it."""

    rule = "... -> ..."
    parameters = "input, dim"


class RightRule(DistributedOp):
    rule = "... {dim}! -> ... {dim}!"
    parameters = "input, dim"


class ByMethods(DistributedOp):
    def infer_layout(self, layouts, extra_args=None):
        return layouts[0]


class Forgotten(DistributedOp):
    rule = "a b! -> a b!"


class Nowhere(DistributedOp):
    rule = "a b! c! -> a b! c!"


class Twice(DistributedOp):
    rule = "a! b! c! -> a! b! c!"


HalvedRule("halved")
SummedRule("summed")
by_methods = ByMethods("by_methods")
Nowhere("nowhere::to_be_found")
Twice("one"), Twice("other")
number = 5


def doubled(x):
    return x + x


def product(x, y):
    return torch.matmul(x, y)
'''


@pytest.fixture
def own(tmp_path):
    """A file with operators of a user's own, which leave the table again."""
    usual = dict(OPERATORS)
    file = tmp_path / "own.py"
    file.write_text(OWN)
    yield file
    OPERATORS.clear()
    OPERATORS.update(usual)
    for told in ON_CHANGE:
        told()


def run(*arguments):
    return CliRunner().invoke(application, ["ops", *map(str, arguments)])


def test_every_operator_is_listed_once_in_its_family():
    result = run()
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"{len(OPERATORS)} operators of torch:"
    assert sum(int(line.split()[0]) for line in lines[1:5]) == len(OPERATORS)
    listed = [
        name for line in lines[5:] if line.startswith("  ") for name in line.split()
    ]
    assert sorted(listed) == sorted(OPERATORS)
    families = {
        line.rpartition(" ")[0]
        for line in lines
        if line.endswith(")") and not line.startswith(" ")
    }
    assert {"pointwise", "linear algebra", "views", "random"} <= families
    assert OPERATORS["relu"].family.endswith("ops.pointwise")


def test_a_rule_is_told_in_notation_and_in_words():
    text = run("linear").stdout
    assert "linear(input, weight, bias=None)" in text
    assert "... k, n k, +n -> ... n" in text
    assert "k           may be cut, and the result is a pending sum" in text
    assert "n           may be cut, and the result is cut there" in text
    assert "a pending sum or avg passes in operand 0; or in operand 1" in text
    assert "{dim}       must be whole" in run("softmax").stdout
    assert (
        "v           may be cut: what a rank does not have counts as zero"
        in run("embedding").stdout
    )
    assert "done by a function of its own" in run("uniform_").stdout


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("torch.Tensor.add_", "add"),
        ("concat", "cat"),
        ("__matmul__", "matmul"),
        ("torch.nn.functional.relu", "relu"),
    ],
)
def test_other_names_lead_to_the_operator(spelled, name):
    result = run(spelled)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{name}(")


def test_methods_that_are_the_operator_are_told():
    assert (
        "Tensor.__add__, Tensor.__iadd__, Tensor.__radd__, Tensor.add, Tensor.add_"
        in run("add").stdout
    )


def test_near_names_are_suggested():
    result = run("softmaxx")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "error: softmaxx is no operator that is known here; did you mean softmax, "
    )
    result = run("torch.nn.functional.threshold_backward_of_nothing")
    assert result.exit_code == 2
    assert (
        "softmax" in run("ftmax").stderr
    )  # longer names come before those that look alike
    assert "did you mean" not in run("grouped_frobnication").stderr
    for name in ("_grouped_mm", "torch._grouped_mm", "aten._grouped_mm.default"):
        result = run(name)  # as a warning names it
        assert result.stderr.startswith(
            f"error: {name} has no rule, so it runs on whole tensors, with a warning; "
        )
        assert "did you mean" not in result.stderr
    assert (
        "(of torch; --framework mindspore asks for those of mindspore)"
        in run("softmaxx").stderr
    )
    result = run("get_device")  # torch has it, the tables do not
    assert "has no rule, so it runs on whole tensors" in result.stderr


def test_rules_of_ones_own_are_checked(own):
    result = run("--check", f"{own}:HalvedRule")
    assert result.exit_code == 0
    assert result.stdout.startswith("right: halved: ... -> ...\n")
    assert (
        "comparisons held on meshes (2,), (4,), (2, 2), operands of shapes (4, 5)"
        in result.stdout
    )
    assert (
        run("--check", f"{own}:Halved", "--shapes", "7").exit_code == 0
    )  # the function that has the rule


def test_a_wrong_rule_is_found(own):
    result = run("--check", f"{own}:SummedRule", "--with", "dim=1")
    assert result.exit_code == 1
    assert result.stdout.startswith("wrong: summed: ... -> ... on (2,): shard ...[-1]")
    own.write_text(OWN.replace('SummedRule("summed")', 'RightRule("summed")'))
    result = run("--check", f"{own}:RightRule", "--with", "dim=1", "--shapes", "4,5")
    assert result.exit_code == 0, result.output


def test_a_function_is_checked_by_the_operator_that_it_calls(own):
    result = run("--check", f"{own}:product", "--shapes", "4,5 5,3")
    assert result.exit_code == 0
    assert f"right: {own}:product" in result.stdout


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("ByMethods", "says what happens to layouts by methods"),
        ("by_methods", "says what happens to layouts by methods"),
        ("Forgotten", "the file registers it under no name"),
        ("Nowhere", "is no operator of the framework, and no DFunction in the file"),
        ("Twice", "one, other have this same rule"),
        ("number", "is no DistributedOp, no DFunction and no function"),
        ("Halvd", "has no Halvd; did you mean Halved"),
        ("product", "give --shapes"),
        ("doubled", "give --shapes"),
    ],
)
def test_what_cannot_be_checked_is_told(own, name, problem):
    result = run("--check", f"{own}:{name}")
    assert (result.exit_code, problem in result.stderr) == (2, True), result.stderr


def test_bad_arguments_are_told(own):
    assert "expected FILE.py:NAME" in run("--check", "nothing").stderr
    assert (
        "expected shapes like"
        in run("--check", f"{own}:product", "--shapes", "a").stderr
    )
    assert (
        "expected NAME=VALUE"
        in run("--check", f"{own}:SummedRule", "--with", "dim").stderr
    )
    assert "not both" in run("add", "--check", f"{own}:product").stderr
    result = run("--check", f"{own}:doubled", "--shapes", "3")
    assert (result.exit_code, "must use each operand once" in result.stderr) == (
        2,
        True,
    )


def test_tracebacks_are_for_debug(monkeypatch):
    def fail(asked):
        raise KeyError("a fault of ours")

    monkeypatch.setattr(command, "_described", fail)
    result = run("add")
    assert (result.exit_code, "Traceback" in result.stderr) == (1, False)
    assert "KeyError: 'a fault of ours'" in result.stderr
    result = run("add", "--debug")
    assert (result.exit_code, "Traceback" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            ["matmul", "--operands", "8,16:S(1) 16,4:R"],
            [
                "matmul: '... m k, ... k n -> ... m n'",
                "  operand 0: (8, 16) [S(1)]",
                "  operand 1: (16, 4) [R] -> [S(0)], 0 bytes",
                "  result 0:  (8, 4) [P]",
            ],
        ),
        (
            ["linear", "--operands", "8,16:S(0),R 32,16:R,Z(0)", "--mesh", "dp=2,tp=2"],
            [
                "linear: '... k, n k, +n -> ... n'",
                "  operand 0: (8, 16) [S(0), R], gradient summed over tp",
                "  operand 1: (32, 16) [R, Z(0)], gradient summed over dp",
                "  result 0:  (8, 32) [S(0), Z(1)]",
            ],
        ),
        (
            ["cumsum", "--operands", "8,16:S(1)", "--with", "dim=1"],
            [
                "cumsum: '... {dim}! -> ... {dim}!'",
                "  operand 0: (8, 16) [S(1)] -> [S(0)], 128 bytes",
                "  result 0:  (8, 16) [S(0)]",
            ],
        ),
    ],
)
def test_a_call_is_decided_without_being_run(arguments, lines):
    run = CliRunner().invoke(application, ["ops", *arguments])
    assert run.exit_code == 0, run.output
    assert run.stdout.splitlines() == lines


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--operands", "8:R"], "--operands needs the name"),
        (["relu", "--operands", "8:S(1)"], "the tensor has 1 dims"),
        (["relu", "--operands", "8:Q"], "'Q' is not an irregular placement"),
        (["relu", "--operands", "8:R", "--mesh", "tp"], "expected sizes by name"),
        (["matmul", "--operands", "8,3:R 4,8:R"], "factor k"),
    ],
)
def test_what_cannot_be_decided_is_said(arguments, problem):
    run = CliRunner().invoke(application, ["ops", *arguments])
    assert run.exit_code == 2
    assert problem in run.stderr
    assert run.stderr.count("hyper-parallel explain") == 1
