# SPDX-License-Identifier: Apache-2.0
"""``verify`` on models that are right, and on models, rules and plans in which a fault was planted."""

import importlib
import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - everyone's name for it
from typer.testing import CliRunner

import hyper_parallel
from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Partial,
    Replicate,
    RowwiseParallel,
    Shard,
    init_device_mesh,
)
from hyper_parallel.cli import verify as _adds_the_command  # noqa: F401 - to the application
from hyper_parallel.cli.checkpoints import application
from hyper_parallel.core.shard.ops import OPERATORS
from hyper_parallel.core.shard.ops.operator import ON_CHANGE
from hyper_parallel.core.shard.rule import Rule, pointwise
from hyper_parallel.core.tensor_parallel import (
    FusedColwiseParallel,
    Replicated,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from hyper_parallel.testing import on_ranks
from hyper_parallel.verification import Report, verify

WHOLE = {"use_local_output": False}
TP = {"tp": 2}
BOTH = {"dp": 2, "tp": 2}


class Mlp(nn.Module):
    """With what makes a comparison hard: dropout, a buffer that changes, a tuple, a dict and None as outputs."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 30), nn.Linear(30, 8)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x, scale=None):
        y = self.down(self.drop(F.gelu(self.up(x))))
        with torch.no_grad():
            self.seen += y.mean((0, 1))
        return {"y": y, "nothing": None}, (y.sum(-1),)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.norm = nn.LayerNorm(8)
        self.blocks = nn.ModuleList([Mlp(), Mlp()])
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            out, _ = block(self.norm(x), scale=None)  # the norm is called twice
            x = x + out["y"]
        return self.head(x)


def make():
    return Model()


def batch():
    draw = torch.Generator().manual_seed(1)
    return torch.randint(20, (4, 6), generator=draw), torch.randint(
        20, (4, 6), generator=draw
    )


def loss(model, ids, targets):
    with loss_parallel():
        return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


PLAN = {
    "embed": RowwiseParallel(**WHOLE),
    "blocks.*.up": ColwiseParallel(**WHOLE),
    "blocks.*.down": RowwiseParallel(**WHOLE),
    "head": ColwiseParallel(**WHOLE),
    "": Replicated(),
}


def test_a_clean_model_is_that_of_one_process():
    report = hyper_parallel.verify(make, PLAN, BOTH, batch, loss=loss).check()
    assert report.ok
    assert report.first is None
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    truth = loss(plain, *batch())
    assert report.true_loss == pytest.approx(truth.item(), rel=1e-6)
    assert report.loss == pytest.approx(truth.item(), rel=1e-6)
    gradients = {one.name for one in report.differences if one.kind == "gradient"}
    assert gradients == {name for name, _ in plain.named_parameters()}
    assert {one.name for one in report.differences if one.kind == "buffer"} == {
        "blocks.0.seen",
        "blocks.1.seen",
    }
    # Two blocks and the embedding forward; what each column-wise layer got, and the sum along dp, backward.
    assert report.ledger.counts(backward=False)["all_reduce"] >= 3
    assert "all_reduce" in report.ledger.table()
    assert "11 compared, 0 wrong" in str(report)
    assert "WRONG" not in report.table()


@contextmanager
def planted(name, **changes):
    """A fault in an operator's rule, on this rank."""
    usual = OPERATORS[name]
    OPERATORS[name] = replace(usual, **changes)
    for told in ON_CHANGE:
        told()
    try:
        yield
    finally:
        OPERATORS[name] = usual
        for told in ON_CHANGE:
            told()


def found(plan=PLAN, make_model=make, axes=TP, **options):
    """The report of the job that runs."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    return verify(
        make_model, plan, mesh, batch, loss=options.pop("loss", loss), **options
    )


# --- faults in rules


@on_ranks(2)
def test_a_wrong_reduction_in_a_rule_is_named():
    """Without its "+" the bias joins the sum once for every rank."""
    with planted("linear", rule=Rule("... k, n k, n -> ... n", linear=((0,), (1,)))):
        report = found()
    assert not report.ok
    assert (report.first.module, report.first.place, report.first.call) == (
        "blocks.0.down",
        "output",
        1,
    )
    assert "module 'blocks.0.down': its output" in str(report)
    assert {one.name for one in report.wrong} >= {
        "loss",
        "embed.weight",
        "blocks.0.seen",
    }
    with pytest.raises(AssertionError, match=r"blocks\.0\.down"):
        report.check()
    assert found().ok  # the fault is gone


@on_ranks(2)
def test_a_fault_in_the_code_between_modules_is_named_with_the_module_whose_code_it_is():
    """A sum in which only one operand is in parts counts the other once for every rank."""
    plan = PLAN | {"blocks.*.down": RowwiseParallel(output_layouts=Partial(), **WHOLE)}
    assert found(plan).ok
    with planted("add", rule=pointwise(2, linear=[0, 1])):
        first = found(plan).first
    assert (first.module, first.place, first.callee, first.call) == (
        "",
        "input",
        "norm",
        2,
    )
    assert "what its own code hands to 'norm' (call 2)" in str(first)


def doubled_gradient(here, input, **more):  # noqa: A002 - torch's name for it
    y = here.function(input, **more)
    return y + y - y.detach()


@on_ranks(2)
def test_a_fault_in_a_gradient_alone_is_found():
    with planted("gelu", local=doubled_gradient):
        report = found()
    assert [one.kind for one in report.wrong] == ["gradient"] * len(report.wrong)
    assert report.loss == pytest.approx(report.true_loss, rel=1e-6)
    assert (report.first.module, report.first.place, report.first.parameter) == (
        "blocks.1.up",
        "gradient",
        "blocks.1.up.bias",
    )
    assert not {"blocks.1.down.weight", "blocks.1.down.bias"} & {
        one.name for one in report.wrong
    }


# --- faults in plans


class Norm(nn.Module):
    def forward(self, x):
        return x / x.pow(2).mean(-1, keepdim=True).sqrt()


def normed():
    """Modules that hand out plain shards, which do not say how they lie."""
    return nn.Sequential(nn.Linear(8, 12), Norm(), nn.Linear(12, 8), nn.Linear(8, 3))


def with_layer_norm():
    return nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 3))


def without_norm():
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.Linear(8, 3))


def numbers():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(2))


def squares(model, x):
    return model(x).pow(2).mean()


def of_numbers(make_model, plan, axes=TP, **options):
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    return verify(make_model, plan, mesh, numbers, loss=squares, **options)


@on_ranks(2)
def test_an_output_that_is_not_reduced_is_named():
    assert of_numbers(without_norm, {"0": ColwiseParallel(), "2": RowwiseParallel()}).ok
    report = of_numbers(
        without_norm,
        {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=Partial())},
    )
    assert (report.first_module, report.first.place) == ("2", "output")


@on_ranks(2)
def test_a_norm_of_a_shard_is_named():
    assert of_numbers(
        normed, {"0": ColwiseParallel(output_layouts=Replicate()), "2": GATHERED}
    ).ok
    report = of_numbers(normed, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert (report.first_module, report.first.place) == ("1", "output")


GATHERED = RowwiseParallel(input_layouts=Replicate())


@on_ranks(2)
def test_an_error_is_told_with_the_module_in_which_it_was_raised():
    report = of_numbers(
        with_layer_norm, {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    assert not report.ok
    assert (report.first_module, report.first.place) == ("1", "error")
    assert "normalized_shape" in report.error
    assert "is NOT that of one process" in str(report)


def raising_on_one_rank(model, mesh):
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if mesh.rank == 1:
        model[1].register_forward_hook(refuse)


def refuse(*_):
    raise ArithmeticError("not on this rank")


def test_an_error_of_one_rank_is_told_and_the_others_do_not_hang():
    report = verify(without_norm, raising_on_one_rank, TP, numbers, loss=squares)
    assert report.error == "rank 1: ArithmeticError: not on this rank"
    assert (report.first_module, report.first.place) == ("1", "error")


def changed_on_one_rank(model, mesh):
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if mesh.rank == 1:
        with torch.no_grad():
            model[2].bias.to_local().add_(1)


@on_ranks(2)
def test_copies_that_differ_are_found():
    report = of_numbers(without_norm, changed_on_one_rank)
    [wrong] = [one for one in report.wrong if one.kind == "parameter"]
    assert (wrong.name, wrong.rank, wrong.largest) == ("2.bias", 1, pytest.approx(1))
    assert (report.first_module, report.first.place) == ("2", "parameter")


def fused():
    return nn.Sequential(nn.Linear(8, 24), Glu(), nn.Linear(12, 8))


class Glu(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


@on_ranks(2)
def test_plain_shards_of_fused_projections_are_known():
    plan = {"0": FusedColwiseParallel(sections=2), "2": RowwiseParallel()}
    assert of_numbers(fused, plan).ok
    report = of_numbers(fused, plan | {"2": RowwiseParallel(output_layouts=Partial())})
    assert (
        report.first_module == "2"
    )  # and not "0", of whose output this rank has two pieces
    assert (
        of_numbers(fused, {"0": ColwiseParallel(), "2": RowwiseParallel()}).first_module
        == "1"
    )


def dropping():
    return nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.5), nn.Linear(12, 8))


@on_ranks(2)
def test_other_random_numbers_are_told():
    report = of_numbers(dropping, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert report.first_module == "1"
    assert "draws random numbers" in report.notes[0]
    whole = {"0": ColwiseParallel(**WHOLE), "2": RowwiseParallel(**WHOLE)}
    assert of_numbers(dropping, whole).ok
    before = torch.get_rng_state()
    of_numbers(dropping, whole)
    assert torch.equal(torch.get_rng_state(), before)


def of_loss():
    return nn.Linear(8, 2)


def wrong_on_a_mesh(model, x):
    y = model(x)
    return y.to_local().sum() if isinstance(y, DTensor) else y.sum()


@on_ranks(2)
def test_a_loss_function_that_is_wrong_is_named():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = ColwiseParallel(**WHOLE)
    report = verify(of_loss, plan, mesh, numbers, loss=wrong_on_a_mesh)
    assert report.first.place == "loss"
    assert "the loss function: all modules agree" in str(report)


# --- what a comparison must not mistake


@dataclass
class Result:
    loss: torch.Tensor
    logits: torch.Tensor


class OwnLoss(nn.Module):
    """Gives its own loss, in eval mode, with a parameter that gets no gradient and one that is not used."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(8, 6),
            nn.BatchNorm1d(6),
            nn.Linear(6, 2),
        )
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.inner = Inner()
        self.eval()

    def forward(self, x):
        y = (
            self.last(F.relu_(self.norm(self.first(x)))) * self.frozen
        )  # in place: what was seen before must stay
        return self.inner(y).loss


class Inner(nn.Module):
    def forward(self, y):
        return Result(y.pow(2).mean(), y)


@on_ranks(4)
def test_outputs_modes_and_gradients_of_all_kinds_agree():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {
        "first": ColwiseParallel(**WHOLE),
        "last": RowwiseParallel(**WHOLE),
        "": Replicated(),
    }
    report = verify(OwnLoss, plan, mesh, numbers).check()
    names = {one.name for one in report.differences if one.kind == "gradient"}
    assert {"first.weight", "norm.bias"} <= names
    assert not {"frozen", "unused"} & names
    report = verify(OwnLoss, None, mesh["dp"], numbers).check()  # data parallel alone
    assert report.ledger.counts(backward=True) == {"all_reduce": 1}


@on_ranks(2)
def test_sequence_parallel_agrees_in_float64():
    plan = {
        "embed": RowwiseParallel(output_layouts=Shard(1), **WHOLE),
        "norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(**WHOLE),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1), **WHOLE),
        "head": ColwiseParallel(**WHOLE),
        "": Replicated(),
    }
    report = found(plan, make_model=lambda: make().double())
    assert report.ok
    assert max(one.largest for one in report.differences) < 1e-14


# --- bad input


def test_bad_input_is_told():
    with pytest.raises(
        ValueError,
        match="at module level in a file, so that the ranks can import it; or call verify",
    ):
        verify(lambda: None, PLAN, TP, batch)
    with pytest.raises(ValueError, match="Typed must stand at module level in a file"):
        verify(type("Typed", (Model,), {"__module__": "typed_in"}), PLAN, TP, batch)
    for wrong in ("tp", "tp=x", "tp=0", "tp=2,tp=2", {}):
        with pytest.raises(ValueError, match="expected a mesh like 'dp=2,tp=2'"):
            verify(make, PLAN, wrong, batch)


@on_ranks(2)
def test_bad_input_in_a_job_is_told():
    with pytest.raises(
        ValueError, match="the mesh has 4 ranks, but the job that runs has 2"
    ):
        verify(make, PLAN, BOTH, batch)
    with pytest.raises(
        ValueError,
        match=r"a batch of 3 .* cannot be shared evenly by the 2 ranks of axis 'dp'",
    ):
        verify(without_norm, None, {"dp": 2}, (torch.ones(3, 8),), loss=squares)
    with pytest.raises(
        RuntimeError, match=r"the plain model, on one process, raised .* in '0'"
    ):
        verify(without_norm, None, TP, (torch.ones(3, 5),), loss=squares)
    with pytest.raises(
        RuntimeError, match=r"expected a loss of one number, got shape \(4, 3\)"
    ):
        verify(without_norm, None, TP, numbers)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match="styles put a model on one axis"):
        verify(without_norm, {"0": ColwiseParallel()}, mesh, numbers, loss=squares)


def test_a_report_is_a_value():
    report = Report("mesh tp=2", 1.0, 1.0, ())
    assert report.ok
    assert report.check() is report
    assert report.first_module is None


# --- the page


def test_the_page_shows_what_its_code_prints(tmp_path, capsys, monkeypatch):
    """Up to rounding: what is worst of what is right is not the same everywhere."""
    text = (Path(__file__).parents[2] / "docs/verify.md").read_text()
    code, shown = re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL)[:2]
    file = tmp_path / "page_on_verify.py"
    file.write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("page_on_verify").main()

    def steady(text):
        return re.sub(
            r"[a-z.]+ differs by .*", "", re.sub(r"\d\.\d+", "number", text)
        ).split()

    assert steady(capsys.readouterr().out) == steady(shown)


# --- the command

RECIPE = Path(__file__).parents[2] / "examples/recipes/demo.yaml"
SMALL = [
    "model.arguments={dim: 16, layers: 2, heads: 2, kv_heads: 2, hidden: 20, context: 8}",
    "data.batch=4",
    "data.length=8",
]


def command(*arguments):
    return CliRunner().invoke(application, ["verify", *map(str, arguments)])


def test_the_command_compares_a_recipe():
    result = command(RECIPE, *SMALL, "--mesh", "tp=2", "--table")
    assert result.exit_code == 0, result.output
    assert "one step on mesh dp=1, tp=2 is that of one process" in result.stdout
    assert "blocks.1.mlp.down.weight" in result.stdout
    sums = [
        line.split()
        for line in result.stdout.splitlines()
        if line.startswith("all_reduce")
    ]
    # Attention and MLP of two blocks, with the embedding in forward and with the head in backward.
    assert [row[3] for row in sums if row[1] == "tp"] == ["forward"] * 5 + [
        "backward"
    ] * 5


def test_the_command_names_the_module_that_parts(tmp_path):
    """A plan that changes what a layer gives, by little."""
    (tmp_path / "plan.py").write_text(f"""
import sys

sys.path.append({str(RECIPE.parents[1] / "llama")!r})
from hyper_parallel import get_platform
from plan_of_the_example import put_on_mesh


def broken(model, mesh):
    put_on_mesh(model, mesh)
    down = model.blocks[1].mlp.down
    get_platform().register_forward_hook(down, lambda module, args, output: output * 1.001)
""")
    (tmp_path / "plan_of_the_example.py").write_text(
        (RECIPE.parents[1] / "llama/plan.py").read_text()
    )
    plan = [
        f"plan.file={tmp_path / 'plan.py'}",
        "plan.function=broken",
        "plan.arguments={}",
    ]
    result = command(RECIPE, *SMALL, *plan, "--mesh", "tp=2")
    assert result.exit_code == 1, result.output
    assert "is NOT that of one process" in result.stdout
    assert "first       module 'blocks.1.mlp.down': its output" in result.stdout


def test_the_command_exits_with_2_where_it_cannot_do_it():
    for arguments, problem in (
        ((RECIPE,), "the mesh has one rank; say how many"),
        (
            (RECIPE, "--mesh", "xp=2"),
            "expected axes pp, dp, dp_replicate, dp_shard, ep, cp, tp",
        ),
        (
            (RECIPE, "--mesh", "tp"),
            "expected axes pp, dp, dp_replicate, dp_shard, ep, cp, tp",
        ),
        ((RECIPE, "optimizr.lr=1", "--mesh", "tp=2"), "did you mean optimizer"),
        (("nothing.yaml", "--mesh", "tp=2"), "there is no such file"),
    ):
        result = command(*arguments)
        assert (result.exit_code, problem in result.stderr) == (2, True), result.output
        assert "Traceback" not in result.stderr
