# SPDX-License-Identifier: Apache-2.0
"""Every error of ours has a code, every code a place in docs/errors.md, and both say the same."""

import ast
import functools
import pickle
import re
from collections import defaultdict

import pytest
import torch
from guards.sources import PACKAGE, modules
from typer.testing import CliRunner

from hyper_parallel import (
    ColwiseParallel,
    DeviceMesh,
    DTensor,
    Layout,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    get_platform,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.cli.checkpoints import application
from hyper_parallel.cli.explain import explain
from hyper_parallel.cli.explanations import explanations, families
from hyper_parallel.cli.verify import _mesh_keys
from hyper_parallel.core.distributed_checkpoint import FileSystemReader, load, save
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.modules import attach
from hyper_parallel.core.shard.notation import parse
from hyper_parallel.platform import axes
from hyper_parallel.platform.error_codes import code_of, coded, hint, without_hint
from hyper_parallel.platform.errors import CommunicationError, unfinished
from hyper_parallel.platform.order import first_compared, parted
from hyper_parallel.platform.platform import _choose
from hyper_parallel.ranks.failures import Failure
from hyper_parallel.recipe.errors import Problem, RecipeError, ResumeError
from hyper_parallel.recipe.launch import JobError
from hyper_parallel.testing import RankError, run_ranks
from hyper_parallel.verification.report import Report
from tools import errors_page

OURS = {
    "CheckpointError",
    "CommunicationError",
    "NotCompilable",
    "OperatorError",
    "PipelineError",
    "RankError",
    "TrainingError",
}
BUILTIN = {
    "ValueError",
    "TypeError",
    "RuntimeError",
    "KeyError",
    "ImportError",
    "NotImplementedError",
}

# Where the codes of a family may be raised: its own layer, and the platform for what only a framework can see.
LAYERS = {
    "1": ("platform",),
    "2": ("core.dtensor", "platform"),
    "3": (
        "core.shard",
        "core.dtensor.copied_views",
        "platform",
    ),  # a view is an operator of its base
    "4": (
        "core.activation_checkpoint",
        "core.data_parallel",
        "core.expert_parallel",
        "core.fully_shard",
        "core.modules",
        "core.tensor_parallel",
        "core.pipeline_parallel",
        "core.shard.sharding_plan",
        "platform.checks",
    ),
    "5": ("core.distributed_checkpoint", "cli.checkpoints"),
    "6": ("ranks", "testing"),
    "7": ("recipe", "verification", "cli"),
    "8": ("core.context_parallel",),
    "9": ("planning", "platform"),
}

# Public interfaces: every error that is raised there has a code, but for the modules named below.
PUBLIC = (
    "platform.agreement", "platform.checks", "platform.contract", "platform.errors", "platform.micro_batch",
    "platform.order", "platform.platform", "platform.shared_files", "platform.shared_memory",
    "platform.torch.collectives", "platform.torch.groups", "platform.mindspore.collectives",
    "platform.mindspore.groups", "core.dtensor",
    "core.shard.custom_shard", "core.shard.dfunction", "core.shard.sharding_plan", "core.data_parallel",
    "core.activation_checkpoint", "core.context_parallel", "core.expert_parallel",
    "core.fully_shard", "core.modules", "core.tensor_parallel",
    "core.distributed_checkpoint", "ranks", "testing", "recipe", "verification",
)  # fmt: skip
INTERNAL = {
    "core.distributed_checkpoint.strict_json": "becomes part of a CheckpointError",
    "core.distributed_checkpoint.data_file": "a caller of ours that asks for a box outside of the chunk",
}


def within(name, packages):
    return any(
        name == package or name.startswith(f"{package}.") for package in packages
    )


def called(node):
    return (
        node.func.id
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        else ""
    )


def node_has_message(node):
    return isinstance(node, ast.Call) and bool(node.args)


def raised(trees):
    """(module, line, type, code or None, message node) of every error that is made with a message."""
    for name, tree in trees.items():
        for node in ast.walk(tree):
            kind, code = called(node), None
            if kind == "coded":
                kind = getattr(node.args[0], "id", "")
                _, code, message, *_ = node.args
            elif node_has_message(node):
                message = node.args[0]
            if kind in OURS | BUILTIN | {"AssertionError"} and node_has_message(node):
                module = name.removeprefix("hyper_parallel.")
                yield module, node.lineno, kind, code, message


def pattern(node):
    """The messages that an f-string can make, as a regular expression; None for what is not written there."""
    if isinstance(node, ast.Constant):
        return re.escape(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            ".*" if isinstance(part, ast.FormattedValue) else re.escape(part.value)
            for part in node.values
        )
    return None


@functools.cache
def trees():
    """Module -> its syntax tree; read by the tests, since every worker imports this file."""
    return {
        name: tree
        for name, tree in modules(PACKAGE).items()
        if "cli.explanations" not in name
    }


@functools.cache
def sites():
    return list(raised(trees()))


def used_codes():
    found = defaultdict(set)
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(r"HP\d{3}", node.value)
            ):
                found[node.value].add(name.removeprefix("hyper_parallel."))
    return found


def test_codes_are_registered_and_used_in_their_layer():
    used = used_codes()
    assert set(used) == set(explanations())
    assert list(explanations()) == sorted(explanations())
    for family in families():
        for one in family.explanations:
            assert one.code[2] == family.digit
            assert [
                name
                for name in used[one.code]
                if not within(name, LAYERS[family.digit])
            ] == [], one.code


def uncoded(sites):
    return [
        f"{name}:{line} {kind}"
        for name, line, kind, code, _ in sites
        if code is None
        and (kind in OURS or (kind in BUILTIN and within(name, PUBLIC)))
        and name not in INTERNAL
    ]


def test_every_error_of_ours_has_a_code():
    assert uncoded(sites()) == []
    assert len(sites()) > 400


def test_control_an_error_without_a_code_is_found():
    text = "raise ValueError('a')\nraise CheckpointError(f'{b}')\nraise coded(ValueError, 'HP201', 'c')"
    found = list(raised({"hyper_parallel.core.dtensor.made_up": ast.parse(text)}))
    assert [line.split()[1] for line in uncoded(found)] == [
        "ValueError",
        "CheckpointError",
    ]


def test_one_message_has_one_code():
    codes = defaultdict(set)
    for *_, code, message in sites():
        if isinstance(code, ast.Constant) and (text := pattern(message)):
            codes[text].add(code.value)
    assert {text: found for text, found in codes.items() if len(found) > 1} == {}


# Of these the text is put together elsewhere; the examples are compared with real errors below.
MADE_ELSEWHERE = {
    "HP111", "HP112", "HP113", "HP114", "HP301", "HP302", "HP309", "HP601", "HP701", "HP702", "HP706", "HP720",
}  # fmt: skip


@pytest.mark.parametrize("code", sorted(set(explanations()) - MADE_ELSEWHERE))
def test_the_example_is_what_this_code_and_no_other_says(code):
    kind, _, text = explanations()[code].example.partition(": ")
    found = defaultdict(set)
    for _, _, site_kind, site_code, message in sites():
        place = r"(?:[\w./-]+: ){0,2}" if site_kind == "CheckpointError" else ""
        written = (pattern(message) or "").split("\\\n")[
            0
        ]  # the first line is the example
        if (
            isinstance(site_code, ast.Constant)
            and written
            and re.fullmatch(place + written, text)
        ):
            found[site_code.value].add(site_kind)
    assert kind in found[code], found
    assert [other for other in found if other != code and kind in found[other]] == []


def test_the_page_is_current():
    assert errors_page.PAGE.read_text() == errors_page.page(), "run make docs"


def test_the_page_has_name_example_cause_and_remedy():
    page = errors_page.PAGE.read_text()
    assert re.findall(r"^### (\S+)$", page, re.MULTILINE) == list(explanations())
    for one in explanations().values():
        section = page.split(f"\n### {one.code}\n")[1].split("\n#")[0]
        assert all(
            part in section
            for part in (
                one.name,
                one.example,
                one.cause,
                f"**What to do.** {one.remedy}",
            )
        )
        assert min(len(one.name), len(one.cause), len(one.remedy)) > 10


def failure(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return error
    raise AssertionError(f"{call} did not fail")


def alone():
    """(code, type, call) of errors that need no other rank."""
    layout = Layout((2, 2), ("dp", "tp"))
    mesh = DeviceMesh("cpu", [0])
    x = DTensor.from_local(torch.ones(4), mesh, [Replicate()])
    wide, linear, meta = (
        DeviceMesh("cpu", [[0]]),
        torch.nn.Linear(2, 2),
        torch.ones(1, device="meta"),
    )
    return [
        ("HP103", RuntimeError, lambda: get_platform().barrier()),
        ("HP116", ValueError, lambda: first_compared("yes")),
        ("HP130", ValueError, lambda: get_platform().micro_batch(0)),
        ("HP138", ValueError, lambda: get_platform().tensor_type_cast(torch.ones(1), "float33")),
        ("HP201", ValueError, lambda: DeviceMesh("cpu", [0, 0])),
        ("HP202", ValueError, lambda: DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("tp", "tp"))),
        ("HP203", KeyError, lambda: DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("dp", "tp"))["pp"]),
        ("HP210", ValueError, lambda: Partial("mean")),
        ("HP211", ValueError, lambda: layout([Shard(0)])),
        ("HP212", ValueError, lambda: layout("x", "None")),
        ("HP213", ValueError, lambda: layout([Partial("sum"), Partial("max")])),
        ("HP222", ValueError, lambda: distribute_tensor(x, mesh, [Replicate()])),
        ("HP224", ValueError, lambda: x.redistribute(DeviceMesh("cpu", [1]), [Replicate()])),
        ("HP301", ValueError, lambda: parse("a b, -> ->")),
        ("HP302", ValueError, lambda: x + DTensor.from_local(torch.ones(3), mesh, [Replicate()])),
        ("HP304", RuntimeError, lambda: x + torch.ones(4)),
        ("HP305", RuntimeError, lambda: x + DTensor.from_local(torch.ones(4), wide, [Replicate()] * 2)),
        ("HP311", RuntimeError, lambda: x.as_strided((2,), (1,))),
        ("HP401", ValueError, lambda: parallelize_module(linear, wide, ColwiseParallel())),
        ("HP402", TypeError, lambda: parallelize_module(linear, mesh, {"": "colwise"})),
        ("HP403", TypeError, lambda: parallelize_module(torch.nn.ReLU(), mesh, ColwiseParallel())),
        ("HP415", ValueError, lambda: attach(linear, "before")),
        ("HP501", CheckpointError, lambda: load({}, storage_reader=FileSystemReader("/no/such/folder"), no_dist=True)),
        ("HP510", CheckpointError, lambda: save({"a": meta}, checkpoint_id="unused", no_dist=True)),
        ("HP513", ValueError, lambda: save({}, no_dist=True)),
        ("HP602", ValueError, lambda: run_ranks(lambda: 1, 2)),
    ]  # fmt: skip


def test_errors_have_their_codes_at_run_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code, kind, call in alone():
        error = failure(call)
        assert (code_of(error), isinstance(error, kind)) == (code, True), (
            f"{code}: {error!r}"
        )
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "jax")
    assert code_of(failure(_choose)) == "HP102"


def codes_among_ranks(folder):
    platform = get_platform()
    rank = platform.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.ones(3, 2)
    calls = {
        "HP104": lambda: platform.all_reduce(x, 3),
        "HP105": lambda: platform.create_group([0, 9]),
        "HP117": lambda: platform.all_reduce(torch.ones(2 + rank), None),
        "HP120": lambda: platform.all_reduce([1.0], None),
        "HP121": lambda: platform.all_reduce(x, None, op="mean"),
        "HP122": lambda: platform.broadcast(x, 9, None),
        "HP123": lambda: platform.reduce_scatter_tensor(x, None),
        "HP124": lambda: platform.all_gather_object([None], 1),
        "HP220": lambda: DTensor.from_local(x, mesh, [Shard(0)], shape=(9, 2)),
        "HP221": lambda: DTensor.from_local(
            x + rank, mesh, [Replicate()], run_check=True
        ),
        "HP404": lambda: parallelize_module(
            torch.nn.Linear(2, 6), mesh, ColwiseParallel(heads=3)
        ),
        "HP509": lambda: save(
            {"w": torch.ones(2) if rank else 1}, checkpoint_id=folder
        ),
    }
    with platform.checked_collectives():
        return {code: code_of(failure(call)) for code, call in calls.items()}


def test_errors_have_their_codes_among_ranks(tmp_path):
    for found in run_ranks(codes_among_ranks, 2, str(tmp_path)):
        assert found == {code: code for code in found}
        assert len(found) == 12
    with pytest.raises(RankError) as failed:
        run_ranks(fail_on_one, 2)
    assert code_of(failed.value) == "HP601"


def fail_on_one():
    assert get_platform().get_rank() == 0, "wrong"


def test_examples_of_communication_are_what_is_raised(monkeypatch):
    monkeypatch.setattr(axes, "_NAMES", {frozenset([0, 1]): ["tp"]})
    waited = {
        "HP111": unfinished(
            0, "all_reduce", "ranks_0_1_1.0", [0, 1], (1,), {}, number=3, axis="tp"
        ),
        "HP112": unfinished(1, "barrier", None, [0, 1], None, {}),
        "HP113": unfinished(0, "all_reduce", None, [0, 1], (), {1: "barrier"}),
        "HP114": unfinished(0, "all_reduce", None, [0, 1], (), {1: "all_reduce"}),
    }
    for code, error in waited.items():
        example = explanations()[code].example.removeprefix("CommunicationError: ")
        assert (str(error), error.code) == (example + hint(code), code)
    error = parted(
        0,
        3,
        [0, 1],
        {
            0: "all_reduce(sum, float32, (4,)) at train.py:31",
            1: "barrier() at train.py:35",
        },
    )
    assert without_hint(error) == explanations()["HP115"].example.removeprefix(
        "CommunicationError: "
    )
    again = pickle.loads(pickle.dumps(waited["HP111"]))
    assert (again.number, again.axis, again.missing, code_of(again)) == (
        3,
        "tp",
        (1,),
        "HP111",
    )
    assert isinstance(again, CommunicationError)
    lost = explanations()["HP309"].example.removeprefix("OperatorError: ")
    assert any(
        isinstance(n, ast.Constant) and n.value == lost
        for n in ast.walk(trees()["hyper_parallel.core.shard.arguments"])
    )


def test_examples_of_recipes_and_the_command_are_what_is_told(tmp_path):
    problem, failed = (
        Problem("steps", "this key is needed"),
        Failure(1, 0.0, "wrong", log=tmp_path / "a.log"),
    )
    made = {
        "HP701": RecipeError("demo.yaml", [problem] * 3),
        "HP702": ResumeError("demo.yaml", [problem]),
        "HP706": JobError([failed]),
        "HP713": failure(Report("mesh tp=2", 1.0, 1.0, (), error="wrong").check),
        "HP720": failure(_mesh_keys, "x"),
    }
    for code, error in made.items():
        kind, _, text = explanations()[code].example.partition(": ")
        assert (type(error).__name__, code_of(error)) == (kind, code)
        assert str(error).replace(hint(code), "").splitlines()[0] == text
    again = pickle.loads(pickle.dumps(made["HP702"]))
    assert (type(again), str(again)) == (ResumeError, str(made["HP702"]))


def test_explain_prints_an_entry():
    assert explain  # its import adds the command
    run = CliRunner().invoke(application, ["explain", "hp203"])
    one = explanations()["HP203"]
    assert run.exit_code == 0
    assert all(
        part in run.stdout
        for part in ("HP203", one.name, one.example, one.cause, one.remedy)
    )
    assert CliRunner().invoke(application, ["explain", "203"]).stdout == run.stdout
    listed = CliRunner().invoke(application, ["explain"]).stdout
    assert all(
        f"{code}  {entry.name}" in listed for code, entry in explanations().items()
    )
    wrong = CliRunner().invoke(application, ["explain", "HP299"])
    assert wrong.exit_code == 2
    assert "there is no code 'HP299'; near are HP301, HP302, HP303" in wrong.stderr


def test_errors_of_others_have_no_code():
    assert code_of(ValueError("it is [HP203]")) is None
    assert code_of(coded(ValueError, "HP203", "a")) == "HP203"
    assert without_hint(coded(ValueError, "HP203", "a b")) == "a b"
