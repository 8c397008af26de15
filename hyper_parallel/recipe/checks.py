# SPDX-License-Identifier: Apache-2.0
"""What does not go together in a recipe, and what is not there: all that can be known before anything starts."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from hyper_parallel.planning.roles import (
    ROLES,
    find_elastic,
    format_axes,
    select_row_axes,
)
from hyper_parallel.recipe.errors import Problem
from hyper_parallel.recipe.folders import check_folder, check_tokenizer
from hyper_parallel.recipe.pipeline_order import check_order
from hyper_parallel.recipe.schema import Recipe, Style
from hyper_parallel.recipe.sources import Source

_PLACED = frozenset({"input", "output"})
_STYLE_KEYS = {
    "colwise": _PLACED | {"heads"},
    "fused_colwise": _PLACED | {"heads", "sections"},
    "rowwise": _PLACED,
    "sequence": frozenset({"sequence_dim"}),
    "replicate": frozenset(),
    "experts": frozenset(),
    "parts_of_experts": frozenset(),
}


def combinations(recipe: Recipe, nproc: int | None) -> tuple[Recipe, list[Problem]]:
    """The recipe with its mesh for so many ranks, and its problems."""
    problems = [
        *_framework(recipe),
        *_model(recipe),
        *_data(recipe),
        *_plan(recipe),
        *_numbers(recipe),
    ]
    if nproc is not None:
        path, mesh = recipe.path, recipe.mesh.take(nproc)
        recipe = recipe.model_copy(update={"mesh": mesh})
        recipe._path = path
    return recipe, [*problems, *_mesh(recipe, nproc)]


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """What may have been meant, as the end of a message."""
    near = difflib.get_close_matches(given, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _framework(recipe: Recipe) -> Iterator[Problem]:
    name = recipe.framework
    if find_spec(name) is None:
        yield Problem(
            "framework",
            f"{name} is not installed: pip install 'hyper_parallel[{name}]'",
        )
    if name == "mindspore" and recipe.model.huggingface is not None:
        yield Problem(
            "model.huggingface",
            "models of transformers are those of PyTorch; say framework: torch",
        )
    precision = recipe.precision
    if name == "mindspore" and precision.parameters != "float32":
        yield Problem(
            "precision", f"on MindSpore it is float32, got {precision.parameters}"
        )


# --- files


def _model(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    if (model.file is None) == (model.huggingface is None):
        both = "both are there" if model.file is not None else "neither is there"
        yield Problem(
            "model", f"expected either file: and class:, or huggingface:, but {both}"
        )
    elif model.huggingface is not None:
        yield from _hugging_face(recipe, model.huggingface)
        if model.arguments:
            told = "a huggingface model takes its sizes from its config.json; remove the arguments"
            yield Problem("model.arguments", told)
    elif model.file is not None:
        yield from _named(recipe, "model", "class", model.file, model.class_)
        source = _source(recipe, model.file)
        if source is not None and model.class_ in source.classes:
            known = source.arguments_of_class(model.class_)
            yield from _arguments("model", model.class_, model.arguments, known)
    if (
        model.start is not None
        and not (recipe.input_path(model.start) / "checkpoint.json").is_file()
    ):
        yield Problem(
            "model.start", f"{recipe.input_path(model.start)} is no checkpoint"
        )


def _hugging_face(recipe: Recipe, path: Path) -> Iterator[Problem]:
    folder = recipe.input_path(path)
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is no folder"
        yield Problem(
            "model.huggingface",
            f"{folder} {what}; expected one that save_pretrained() or a download has made",
        )
    elif recipe.model.weights and not any(folder.glob("*.safetensors")):
        told = "has no *.safetensors, and other files are not read; with model.weights: false it is drawn anew"
        yield Problem("model.huggingface", f"{folder} {told}")
    if find_spec("transformers") is None:
        yield Problem(
            "model.huggingface",
            "transformers is not installed: pip install 'transformers>=5'",
        )


def _named(
    recipe: Recipe, part: str, kind: str, file: Path, name: str | None
) -> Iterator[Problem]:
    """Whether a file has what the recipe wants of it."""
    path = recipe.input_path(file)
    if not path.is_file():
        near = did_you_mean(
            path.name, (other.name for other in path.parent.glob("*.py"))
        )
        yield Problem(f"{part}.file", f"there is no file {path}{near}")
        return
    source = _source(recipe, file)
    if source is None:
        yield Problem(f"{part}.file", f"{path} is not valid Python")
        return
    names = source.classes if kind == "class" else source.functions
    if name is None:
        yield Problem(
            part,
            f"it has a file but no {kind}; {path.name} has {', '.join(names) or 'none'}",
        )
    elif name not in names and not source.imports:
        yield Problem(
            f"{part}.{kind}", f"{path} has no {kind} {name}{did_you_mean(name, names)}"
        )
    elif name not in names and (near := did_you_mean(name, names)):
        yield Problem(f"{part}.{kind}", f"{path} has no {kind} {name} of its own{near}")


def _source(recipe: Recipe, file: Path) -> Source | None:
    try:
        return Source(recipe.input_path(file))
    except (OSError, SyntaxError, ValueError):
        return None


def _arguments(
    part: str, name: str, given: Iterable[str], known: list[str] | None
) -> Iterator[Problem]:
    for argument in given if known is not None else ():
        if argument not in (known or ()):
            near = (
                did_you_mean(argument, known or ())
                or f"; it takes {', '.join(known or ()) or 'none'}"
            )
            yield Problem(
                f"{part}.arguments.{argument}",
                f"{name} takes no argument {argument}{near}",
            )


def _data(recipe: Recipe) -> Iterator[Problem]:
    data = recipe.data
    if (data.corpus is None) == (data.text is None):
        both = "both are there" if data.corpus is not None else "neither is there"
        yield Problem(
            "data", f"expected either corpus: python or text: FOLDER, but {both}"
        )
    if data.text is not None:
        yield from _text(recipe.input_path(data.text), data.files)
    if data.tokens == "model":
        yield from check_tokenizer(recipe)
    if data.tokens == "model" and recipe.model.huggingface is None:
        yield Problem(
            "data.tokens",
            "only a huggingface model has a tokenizer of its own; say tokens: bytes",
        )


def _text(path: Path, files: str) -> Iterator[Problem]:
    """Whether there is text to train on."""
    if not path.exists():
        near = did_you_mean(path.name, (one.name for one in path.parent.glob("*")))
        yield Problem("data.text", f"there is no file or folder {path}{near}")
        return
    if path.is_file() or any(one.is_file() for one in path.glob(files)):
        return
    suffixes = {one.suffix for one in path.rglob("*") if one.is_file()}
    kinds = [f"**/*{suffix}" for suffix in sorted(suffixes - {""})[:5]]
    there = f"; there are {', '.join(kinds)}" if kinds else ""
    yield Problem("data.files", f"{path} has no file {files}{there}")


def _plan(recipe: Recipe) -> Iterator[Problem]:
    plan = recipe.plan
    yield from _plan_that_is_found(recipe)
    if plan.file is not None and plan.styles:
        yield Problem(
            "plan",
            "expected either file: and function:, or styles:, but both are there",
        )
    if plan.file is None and plan.function is not None:
        yield Problem("plan.function", "a function needs the file: that it is in")
    if plan.file is not None:
        yield from _plan_function(recipe, plan.file)
    for pattern, style in plan.styles.items():
        yield from _style(f"plan.styles.{pattern}", style)


def _plan_that_is_found(recipe: Recipe) -> Iterator[Problem]:
    plan = recipe.plan
    if plan.auto and (plan.file is not None or plan.styles):
        yield Problem("plan", "a plan that is found has no file: and no styles:")
    if plan.sequence_parallel and not recipe.finds_plan:
        told = "it is of plans that are found; add auto: true"
        yield Problem("plan.sequence_parallel", told)
    if plan.auto and recipe.framework == "mindspore":
        told = "plans are found on PyTorch; save one there, and take its styles: here"
        yield Problem("plan", told)


def _plan_function(recipe: Recipe, file: Path) -> Iterator[Problem]:
    name, arguments = recipe.plan.function, recipe.plan.arguments
    yield from _named(recipe, "plan", "function", file, name)
    source = _source(recipe, file)
    if source is None or name not in source.functions:
        return
    known = source.arguments_of_function(name)
    if known:
        own = 2 if known[0] == "model" else 1  # (model, mesh) or (config)
        known = known[own:]
    yield from _arguments("plan", name, arguments, known)


def _style(key: str, style: Style) -> Iterator[Problem]:
    allowed = _STYLE_KEYS[style.style]
    for name in sorted(style.model_fields_set - {"style"} - allowed):
        keys = ", ".join(sorted(allowed)) or "no keys"
        yield Problem(f"{key}.{name}", f"{style.style} takes {keys}, not {name}")
    if style.style == "fused_colwise" and style.sections is None:
        yield Problem(
            key, "fused_colwise needs sections: how many, or the size of each"
        )


# --- numbers


def _mesh(recipe: Recipe, nproc: int | None) -> Iterator[Problem]:
    if nproc is not None and recipe.ranks != nproc:
        sizes = recipe.mesh.sizes()
        is_given = {name for name, size in sizes.items() if size is not None}
        given = {name: size for name, size in recipe.axes.items() if name in is_given}
        needs = f"{format_axes(given)} needs {recipe.ranks} ranks"
        remedy = f"say --nproc {recipe.ranks} or {_fit(recipe.axes, nproc)}"
        yield Problem("mesh", f"{needs}, but there are {nproc}; {remedy}")
    yield from _rows(recipe)
    yield from _sharded_axes(recipe)
    yield from check_order(recipe)
    yield from _context(recipe)
    if recipe.finds_plan:
        yield from check_folder(recipe)
    if recipe.finds_plan or recipe.plan.file is not None or recipe.plan.styles:
        return
    for name, size in recipe.axes.items():
        if size > 1 and ROLES[name].needs_plan:
            told = f"mesh.{name} is {size}, but nothing says how the layers are shared"
            yield Problem(
                "plan",
                f"{told}; say plan: auto, or add styles:, or a file: with a function:",
            )


def _sharded_axes(recipe: Recipe) -> Iterator[Problem]:
    """Whether the axes and keys of sharded data parallel go together."""
    axes = recipe.axes
    if "dp_shard" not in axes:
        if "dp_replicate" in axes:
            told = "there is nothing to replicate without mesh.dp_shard"
            yield Problem("mesh.dp_replicate", f"{told}; say mesh.dp instead")
        if recipe.precision.is_mixed:
            told = "compute, reduce and output dtypes are those of units, which need mesh.dp_shard"
            yield Problem("precision", told)
        for key in sorted(recipe.sharding.model_fields_set):
            yield Problem(f"sharding.{key}", "there are no units without mesh.dp_shard")
        return
    if axes.get("dp", 1) > 1:
        told = "copies beside mesh.dp_shard are those of mesh.dp_replicate"
        yield Problem("mesh.dp", f"{told}; say mesh.dp_replicate={axes['dp']}")
    setting = recipe.sharding.reshard_after_forward
    if isinstance(setting, int) and axes["dp_shard"] % setting:
        told = (
            f"{setting} does not divide the {axes['dp_shard']} ranks of mesh.dp_shard"
        )
        yield Problem("sharding.reshard_after_forward", told)


def _context(recipe: Recipe) -> Iterator[Problem]:
    """Whether sequences are long enough for the ranks that share them, and what is said of such is of use."""
    ranks, context = recipe.axes.get("cp"), recipe.context
    if ranks is None:
        for key in sorted(context.model_fields_set):
            yield Problem(
                f"context.{key}", "no sequence is shared by ranks without mesh.cp"
            )
        return
    if recipe.data.length < ranks:
        told = f"{recipe.data.length} tokens cannot be shared by the {ranks} ranks of mesh.cp"
        yield Problem("data.length", told)
    degree = context.ulysses_degree
    if degree is not None and ranks % degree:
        told = f"{degree} does not divide the {ranks} ranks of mesh.cp"
        yield Problem("context.ulysses_degree", told)


def _rows(recipe: Recipe) -> Iterator[Problem]:
    """Whether ranks that divide the rows of a batch get equally many."""
    axes, batch = select_row_axes(recipe.axes), recipe.data.batch
    parts = recipe.data_ranks
    if batch % parts == 0:
        return
    ranks = f"the {parts} ranks of {' and '.join(f'mesh.{name}' for name in axes)}"
    told = f"a batch of {batch} sequences cannot be shared evenly by {ranks}"
    more = batch + parts - batch % parts
    yield Problem("data.batch", f"{told}; say {more}")


def _fit(axes: dict[str, int], nproc: int) -> str:
    """Overrides with which a mesh has so many ranks."""
    elastic = find_elastic()
    others = {name: size for name, size in axes.items() if name != elastic}
    count = math.prod(others.values())
    if nproc % count == 0:
        return f"mesh.{elastic}={nproc // count}"
    changes = {elastic: nproc}
    changes |= {name: 1 for name, size in others.items() if size > 1}
    return " ".join(f"mesh.{name}={size}" for name, size in changes.items())


def _numbers(recipe: Recipe) -> Iterator[Problem]:
    optimizer, schedule = recipe.optimizer, recipe.schedule
    others = {"sgd": ("betas", "eps")}.get(optimizer.kind, ("momentum",))
    for key in others:
        if key in optimizer.model_fields_set:
            yield Problem(
                f"optimizer.{key}",
                f"{optimizer.kind} has none; remove it or take another kind",
            )
    length = schedule.decay_steps or recipe.steps
    if schedule.kind != "constant" and schedule.warmup >= length:
        told = f"{schedule.warmup} steps of warm-up leave nothing of {length} steps to decay in"
        yield Problem(
            "schedule.warmup", f"{told}; make it smaller, or say kind: constant"
        )
    if schedule.kind == "constant" and schedule.decay_steps is not None:
        yield Problem(
            "schedule.decay_steps",
            "a constant rate does not decay; say kind: cosine or linear",
        )
    if recipe.evaluation.every and not recipe.data.held_out:
        told = "there is nothing to evaluate on: data.held_out is 0; say 0.05"
        yield Problem("evaluation.every", told)
    yield from _outputs(recipe)


def _outputs(recipe: Recipe) -> Iterator[Problem]:
    wanted = {
        "checkpoints.every": recipe.checkpoints.every,
        "logging.tensorboard": recipe.logging.tensorboard,
        "logging.collectives": recipe.logging.collectives,
    }
    for key, value in wanted.items():
        if value and recipe.folder is None:
            yield Problem(
                key,
                "there is no place for it; add folder: at the top, such as folder: runs/first",
            )
    if recipe.logging.tensorboard and find_spec("tensorboard") is None:
        yield Problem(
            "logging.tensorboard",
            "tensorboard is not installed: pip install 'hyper_parallel[cli]'",
        )
    if (
        recipe.folder is not None
        and recipe.folder.exists()
        and not recipe.folder.is_dir()
    ):
        yield Problem("folder", f"{recipe.folder} is a file")
