# SPDX-License-Identifier: Apache-2.0
"""Recipes as text: what is wrong with one is told before anything starts, all of it, with its place and a way out."""

import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

import hyper_parallel.cli.train  # noqa: F401 - it adds its command
from hyper_parallel.cli.checkpoints import application
from hyper_parallel.planning import roles
from hyper_parallel.recipe import Recipe, RecipeError, read_recipe
from hyper_parallel.recipe.data import Corpus, as_bytes, python_text, texts
from hyper_parallel.recipe.schema import keys

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "recipes"

GOOD = """\
steps: 10
model:
  file: model.py
  class: Net
  arguments: {width: 8}
data:
  corpus: python
  batch: 4
plan:
  styles:
    up: colwise
"""
MODEL = """\
from dataclasses import dataclass

@dataclass
class Config:
    width: int = 4
    depth: int = 2

class Net:
    def __init__(self, config: Config): ...

class Plain:
    def __init__(self, width, depth=2): ...
"""
PLAN = "def put(model, mesh, sequence=False): ...\ndef styles(config, fast=True): ...\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "plan.py").write_text(PLAN)
    (tmp_path / "recipe.yaml").write_text(GOOD)
    return tmp_path


def problems_of(folder, *overrides, nproc=None, text=None):
    """Place, key and message of all that is wrong."""
    if text is not None:
        (folder / "recipe.yaml").write_text(text)
    with pytest.raises(RecipeError) as found:
        read_recipe(folder / "recipe.yaml", overrides, nproc)
    return [str(problem) for problem in found.value.problems]


def test_a_good_recipe_has_its_values_and_the_defaults(folder):
    recipe = read_recipe(folder / "recipe.yaml")
    assert (recipe.steps, recipe.model.class_, recipe.model.arguments) == (
        10,
        "Net",
        {"width": 8},
    )
    assert (recipe.optimizer.lr, recipe.mesh_shape, recipe.ranks) == (1e-3, (1, 1), 1)
    assert recipe.plan.styles["up"].style == "colwise"
    assert recipe.input_path(recipe.model.file) == folder / "model.py"
    assert Recipe.model_validate(recipe.values()).values() == json.loads(
        json.dumps(recipe.values())
    )


def test_overrides_have_the_types_of_the_schema(folder):
    changes = [
        "optimizer.lr=1e-4",
        "mesh.tp=2",
        "checkpoints.keep=null",
        "optimizer.betas=[0.8, 0.9]",
        "steps=7",
    ]
    recipe = read_recipe(
        folder / "recipe.yaml",
        [*changes, "model.arguments.depth=3", "logging.every=2"],
        nproc=4,
    )
    assert (recipe.optimizer.lr, recipe.optimizer.betas) == (1e-4, (0.8, 0.9))
    assert (recipe.checkpoints.keep, recipe.steps, recipe.logging.every) == (None, 7, 2)
    assert recipe.model.arguments == {"width": 8, "depth": 3}
    assert (
        read_recipe(folder / "recipe.yaml", ["data.files=*.md"]).data.files == "*.md"
    )  # which is no YAML


def test_the_mesh_takes_what_ranks_there_are(folder):
    assert read_recipe(folder / "recipe.yaml", ["mesh.tp=2"], nproc=4).mesh_shape == (
        2,
        2,
    )
    assert read_recipe(folder / "recipe.yaml", ["mesh.tp=2"]).mesh_shape == (1, 2)
    assert (
        read_recipe(folder / "recipe.yaml", ["mesh.dp=2"], nproc=2).path
        == folder / "recipe.yaml"
    )


def test_the_order_of_the_axes_is_that_of_the_roles(folder):
    """Ranks next to each other share layers, in whatever order a recipe or its overrides name the axes."""
    for overrides in (["mesh={tp: 4, dp: 2}"], ["mesh.tp=4", "mesh.dp=2"]):
        recipe = read_recipe(folder / "recipe.yaml", overrides)
        assert list(recipe.axes.items()) == [("dp", 2), ("tp", 4)]
        sizes = {"dp": 2, "tp": 4}
        assert recipe.values()["mesh"] == dict.fromkeys(roles.ROLES, 1) | sizes


def test_the_rows_of_a_rank_are_counted_over_all_axes_that_divide_them(monkeypatch):
    monkeypatch.setitem(roles.ROLES, "more", roles.ROLES["dp"])
    found = []
    for dp, tp, more in itertools.product(range(2), range(2), range(3)):
        coordinate = {"dp": dp, "tp": tp, "more": more}
        mesh = SimpleNamespace(
            mesh_dim_names=("dp", "tp", "more"),
            mesh_shape=(2, 2, 3),
            get_local_rank=coordinate.get,
        )
        found.append(roles.find_rows(mesh))
    # Ranks that differ in tp alone have the same rows.
    assert found == [(part, 6) for part in (0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5)]


ANOTHER_ROLE = """
import importlib, sys
from hyper_parallel.planning import roles
from hyper_parallel.recipe import checks, errors, reading, schema

rows = dict(roles.ROLES)
own = roles.Role("ranks that share rows too", 1, 0, False, roles._replicate)
roles.ROLES.clear()
roles.ROLES.update({"dp": rows["dp"], "extra": own, "tp": rows["tp"]})
for module in (schema, checks, reading):
    importlib.reload(module)
read, path = reading.read_recipe, sys.argv[1]

print(read(path, ["mesh.extra=2", "mesh.tp=2"], nproc=8).axes)
print([key for key in schema.keys() if key[0] == "mesh.extra"])
for overrides in (["mesh.extra=3", "mesh.dp=1"], ["mesh.pp=1", "data.batch=6"]):
    try:
        read(path, overrides, nproc=6)
    except errors.RecipeError as error:
        print(*(problem.message for problem in error.problems), sep="\\n")
"""


def test_a_role_is_a_row_of_the_table(folder):
    """A third one, in a process of its own, has a key, a size, a place in the mesh and checks."""
    made = subprocess.run(
        [sys.executable, "-c", ANOTHER_ROLE, folder / "recipe.yaml"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert made.stdout.splitlines() == [
        "{'dp': 2, 'extra': 2, 'tp': 2}",
        "[('mesh.extra', '1', 'ranks that share rows too')]",
        "a batch of 4 sequences cannot be shared evenly by the 3 ranks of mesh.dp and mesh.extra; say 6",
        "dp=1 x extra=3 x tp=1 needs 3 ranks, but there are 6; say --nproc 3 or mesh.dp=2",
        "a mesh has no axis pp; the roles of its axes are dp, extra, tp",
    ]


def test_everything_is_told_at_once_with_its_line(folder):
    text = GOOD.replace("steps: 10", "stepz: 10\nlr: 3").replace(
        "batch: 4", "batch: four\n  held_out: 2"
    )
    assert problems_of(folder, "optimizer.lrr=1", "mesh.tp=3", text=text, nproc=4) == [
        "line 1: stepz: there is no such key; did you mean steps?",
        "line 2: lr: there is no such key; did you mean optimizer.lr?",
        "line 9: data.batch: expected a valid integer, got 'four'",
        "line 10: data.held_out: expected less than 1, got 2",
        "override 'mesh.tp=3': mesh: tp=3 needs 3 ranks, but there are 4; say --nproc 3 or mesh.dp=4 mesh.tp=1",
        "override 'optimizer.lrr=1': optimizer.lrr: there is no such key; did you mean optimizer.lr?",
        "steps: this key is needed",
    ]


@pytest.mark.parametrize(
    ("overrides", "nproc", "told"),
    [
        (["mesh={dp: 2, tp: 2}"], 2, "mesh: dp=2 x tp=2 needs 4 ranks, but there are 2; say --nproc 4 or mesh.dp=1"),
        (["mesh.dp=3"], 3, "data.batch: a batch of 4 sequences cannot be shared evenly by the 3 ranks .* say 6"),
        (["mesh.tp=2", "plan=null"], None, "plan: expected keys of its own"),
        (["mesh.tp=2", "plan={}"], None, "plan: mesh.tp is 2, but nothing says how the layers are shared"),
        (["mesh.xp=2"], None, "mesh.xp: a mesh has no axis xp; the roles of its axes are pp, dp, dp_replicate"),
        (["mesh={tpp: 2}"], None, "mesh.tpp: a mesh has no axis tpp; the roles of its axes are pp, dp, dp_replicate"),
        (["mesh.tp=0"], None, "mesh.tp: expected greater than or equal to 1, got 0"),
        (["mesh.tp=null"], None, "mesh.tp: expected a valid integer, got None"),
        (["model.class=Nett"], None, "model.class: .*model.py has no class Nett of its own; did you mean Net?"),
        (["model.file=modle.py"], None, "model.file: there is no file .*modle.py; did you mean model.py?"),
        (["model.class=null"], None, "model: it has a file but no class; model.py has Config, Net, Plain"),
        (["model.arguments.widht=3"], None, "model.arguments.widht: Net takes no argument widht; did you mean width?"),
        (["model={file: model.py, class: Plain, arguments: {dpth: 1}}"], None, "Plain takes no .* did you mean depth?"),
        (["model.huggingface=."], None, "model: expected either file: and class:, or huggingface:, but both are"),
        (["model={huggingface: .}"], None, r"model.huggingface: .* has no config.json"),
        (["model.start=."], None, "model.start: .* is no checkpoint"),
        (["data.corpus=null"], None, "data: expected either corpus: python or text: FOLDER, but neither is there"),
        (["data.corpus=pyton"], None, "data.corpus: expected 'python', got 'pyton'; did you mean python?"),
        (["data={text: .}"], None, r"data.files: .* has no file \*\*/\*.txt; there are \*\*/\*.py, \*\*/\*.yaml"),
        (["data={text: there}"], None, "data.text: there is no file or folder .*there"),
        (["data.tokens=model"], None, "data.tokens: only a huggingface model has a tokenizer"),
        (["plan={file: plan.py, function: putt}"], None, "plan.function: .* has no function putt; did you mean put?"),
        (["plan={file: plan.py, function: put, arguments: {sequense: 1}}"], None, "did you mean sequence?"),
        (["plan={file: plan.py, function: styles, arguments: {fats: 1}}"], None, "did you mean fast?"),
        (["plan.file=plan.py", "plan.function=put"], None, "plan: expected either file: and function:, or styles:"),
        (["plan.styles={up: colwize}"], None, "expected 'colwise', .* got 'colwize'; did you mean colwise?"),
        (["plan.styles={up: {style: rowwise, heads: 2}}"], None, "rowwise takes input, output, not heads"),
        (["plan.styles={up: fused_colwise}"], None, "fused_colwise needs sections"),
        (["plan.styles={up: {style: rowwise, output: Shard}}"], None, "plan.styles.up.output: expected .* got 'Shard'"),
        (["checkpoints.every=5"], None, "checkpoints.every: there is no place for it; add folder: at the top"),
        (["logging.tensorboard=true"], None, "logging.tensorboard: there is no place for it"),
        (["evaluation.every=5", "data.held_out=0"], None, "evaluation.every: .* data.held_out is 0"),
        (["schedule.warmup=10"], None, "schedule.warmup: 10 steps of warm-up leave nothing of 10 steps to decay in"),
        (["optimizer.momentum=0.9"], None, "optimizer.momentum: adamw has none"),
        (["optimizer.kind=SGD"], None, "optimizer.kind: expected 'adamw', 'adam' or 'sgd', got 'SGD'"),
        (["precision=fp16"], None, "precision.parameters: expected 'float32', 'float64' or 'bfloat16', got 'fp16'"),
        (["precision={compute: bfloat16}"], None, "precision: compute, reduce and output dtypes are those of units"),
        (["sharding.units=[a]"], None, "sharding.units: there are no units without mesh.dp_shard"),
        (["mesh={dp_replicate: 2}"], 2, "mesh.dp_replicate: there is nothing to replicate without mesh.dp_shard"),
        (["mesh={dp: 2, dp_shard: 2}"], 4, "mesh.dp: copies beside mesh.dp_shard are those of mesh.dp_replicate"),
        (
            ["mesh={dp_shard: 4}", "sharding.reshard_after_forward=3"],
            4,
            "sharding.reshard_after_forward: 3 does not divide the 4 ranks of mesh.dp_shard",
        ),
        (["optimizer.lr"], None, "override 'optimizer.lr': an override is key=value"),
        (["optimizer.lr=[1"], None, "optimizer.lr: expected a valid number, got '\\[1'"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_is_named_with_a_way_out(folder, overrides, nproc, told):
    found = problems_of(folder, *overrides, nproc=nproc)
    assert len(found) == 1, found
    assert re.search(told, found[0]), found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("steps: [1", "line 1: invalid YAML: .*"),
        ("- steps", "line 1: expected keys such as model: and data:, found a list"),
        (GOOD + "steps: 3\n", "line 12: steps: it is there twice, first in line 1"),
        ("", "data: this key is needed"),
    ],
)
def test_files_that_are_no_recipes(folder, text, told):
    assert re.fullmatch(told, problems_of(folder, text=text)[0])


def test_a_recipe_that_is_not_there_may_have_another_name(folder):
    with pytest.raises(
        RecipeError, match=r"there is no such file; did you mean .*recipe\.yaml\?"
    ):
        read_recipe(folder / "recipes.yaml")


@pytest.mark.parametrize("name", ["demo", "text", "mindspore"])
def test_the_examples_are_good(name, monkeypatch):
    from hyper_parallel.recipe import checks

    monkeypatch.setattr(
        checks, "find_spec", lambda _: object()
    )  # whatever is installed here
    assert read_recipe(RECIPES / f"{name}.yaml", ["mesh.tp=2"], nproc=4).mesh_shape == (
        2,
        2,
    )


# --- the command, without training


def test_the_command_tells_problems_without_a_traceback(folder):
    result = CliRunner().invoke(
        application, ["train", str(folder / "recipe.yaml"), "stepz=3"]
    )
    assert result.exit_code == 2
    told = "override 'stepz=3': stepz: there is no such key; did you mean steps?"
    code = "[hyper-parallel explain HP701]"
    assert (
        result.stderr
        == f"error: {folder / 'recipe.yaml'}: one problem {code}\n  {told}\n"
    )
    result = CliRunner().invoke(
        application, ["train", str(folder / "recipe.yaml"), "stepz=3", "--debug"]
    )
    assert result.exit_code == 2
    assert "Traceback" in result.stderr


def test_a_recipe_is_checked_without_importing_a_framework(folder):
    code = (
        "import sys\nfrom hyper_parallel.recipe import read_recipe\n"
        "import hyper_parallel.cli.train, hyper_parallel.recipe.launch\n"
        f"read_recipe({str(folder / 'recipe.yaml')!r})\n"
        "print([name for name in ('torch', 'mindspore', 'transformers', 'tensorboard') if name in sys.modules])"
    )
    made = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert made.stdout == "[]\n"


def test_the_page_has_every_key_with_its_default():
    page = (ROOT / "docs" / "train.md").read_text()
    rows = [f"| `{key}` | {default} | {told} |" for key, default, told in keys()]
    assert [row for row in rows if row not in page] == []
    table = [
        line
        for line in page.splitlines()
        if line.startswith("| `") and line.count("|") == 4 and "." in line
    ]
    assert [line for line in table if line not in rows] == []


# --- the data


def test_ranks_share_the_rows_of_one_batch():
    tokens = np.arange(500, dtype=np.int32)
    whole, parts = (
        Corpus(tokens, 6, 10, 3),
        [Corpus(tokens, 6, 10, 3, part=part, parts=3) for part in range(3)],
    )
    for draw in ("training", "held_out"):
        ids, targets = getattr(whole, draw)(7)
        np.testing.assert_array_equal(
            np.concatenate([getattr(part, draw)(7)[0] for part in parts]), ids
        )
        np.testing.assert_array_equal(
            getattr(parts[1], draw)(7, whole=True)[1], targets
        )
        np.testing.assert_array_equal(ids + 1, targets)  # each is followed by the next
    assert whole.training(3)[0].max() < 475 <= whole.held_out(3)[0].min()
    assert not np.array_equal(whole.training(7)[0], whole.training(8)[0])
    with pytest.raises(
        ValueError, match="a batch of 6 sequences cannot be shared evenly by 4"
    ):
        Corpus(tokens, 6, 10, 3, parts=4)
    with pytest.raises(
        ValueError,
        match="a sequence has 30 tokens, but the held-out part of the text has 25",
    ):
        Corpus(tokens, 6, 30, 3)


def test_texts_are_files_in_the_order_of_their_names(tmp_path):
    for name, text in (("b.txt", "bb"), ("a.txt", "aa"), ("c.md", "cc")):
        (tmp_path / name).write_text(text)
    assert bytes(as_bytes(texts(tmp_path, "**/*.txt"))) == b"aa\n\nbb"
    assert bytes(as_bytes(texts(tmp_path / "c.md", "**/*.txt"))) == b"cc"
    assert len(python_text()) == 2_000_000


def test_the_rate_goes_up_and_down():
    from hyper_parallel.recipe.training import learning_rate

    base = {"steps": 10, "model": {}, "data": {}, "optimizer": {"lr": 2.0}}
    cosine = Recipe.model_validate({**base, "schedule": {"warmup": 4, "floor": 0.1}})
    assert [learning_rate(cosine, step) for step in (0, 1, 3, 4)] == pytest.approx(
        [0.5, 1.0, 2.0, 2.0]
    )
    assert learning_rate(cosine, 7) == pytest.approx(
        2 * (0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi / 2)))
    )
    assert [learning_rate(cosine, step) for step in (10, 99)] == pytest.approx(
        [0.2, 0.2]
    )
    linear = Recipe.model_validate(
        {**base, "schedule": {"kind": "linear", "floor": 0, "decay_steps": 20}}
    )
    assert [learning_rate(linear, step) for step in (0, 5, 20)] == pytest.approx(
        [2.0, 1.5, 0.0]
    )
    constant = Recipe.model_validate(
        {**base, "schedule": {"kind": "constant", "warmup": 2}}
    )
    assert [learning_rate(constant, step) for step in (0, 1, 50)] == pytest.approx(
        [1.0, 2.0, 2.0]
    )
