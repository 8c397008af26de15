# SPDX-License-Identifier: Apache-2.0
"""Makes what a recipe names: the model, on its mesh by its plan, its batches and its loss.

job = build(recipe, mesh)                     mesh None: one process, without any plan
loss = job.loss(job.model, *job.batch(0))     the mean over the tokens of the whole batch
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
import typing
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from hyper_parallel.core.distributed_checkpoint import ModelState, load
from hyper_parallel.core.distributed_checkpoint.hugging_face import (
    HuggingFaceReader,
)
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.modules.absent import is_absent
from hyper_parallel.core.modules.style import ParallelStyle
from hyper_parallel.core.shard.sharding_plan import matching, no_match
from hyper_parallel.planning import ParallelPlan, auto_plan
from hyper_parallel.planning.roles import (
    Placing,
    find_rows,
    put_on_mesh,
    put_rest_on_mesh,
)
from hyper_parallel.planning.trace import find_experts
from hyper_parallel.planning.words import to_style
from hyper_parallel.platform import get_platform
from hyper_parallel.ranks.import_file import import_file
from hyper_parallel.recipe import huggingface
from hyper_parallel.recipe.activations import apply_to_activations, choose_modules
from hyper_parallel.recipe.data import Corpus, as_bytes, python_text, texts
from hyper_parallel.recipe.errors import Problem, RecipeError
from hyper_parallel.recipe.job import Job
from hyper_parallel.recipe.schema import Recipe, Style

platform = get_platform()


def build(recipe: Recipe, mesh: DeviceMesh | None) -> Job:
    """The model, drawn from the recipe's seed, on a mesh with the recipe's axes, or as one process, and its data."""
    platform.manual_seed(recipe.seed)  # the same numbers on every rank
    if mesh is not None and "pp" in (mesh.mesh_dim_names or ()):
        from hyper_parallel.recipe.pipeline import build_pipeline

        return build_pipeline(recipe, mesh)
    model, reader = _make_for_mesh(recipe) if mesh is not None else (None, None)
    if reader is None:
        model = make_model(recipe)
    prepare_model(recipe, model, mesh, reader=reader)
    return Job(model, mesh, read_corpus(recipe, mesh))


def prepare_model(
    recipe: Recipe,
    model: Any,
    mesh: DeviceMesh | None,
    styles: Mapping[str, ParallelStyle] | None = None,
    reader: HuggingFaceReader | None = None,
) -> None:
    """Puts a model on a mesh, reads the weights that it starts with, and wraps what recomputes.

    ``styles``: those that were found for the whole model, if it is a part of one. ``reader``: of the folder with the
    weights, if the model was made without memory.
    """
    if mesh is not None and styles is not None:
        put_on_mesh(model, mesh, _placing(recipe, model, mesh, styles))
    elif mesh is not None:
        _put_on_mesh(recipe, model, mesh)
    if reader is not None:
        platform.init_parameters(model, 0)
        load(model.state_dict(), storage_reader=reader, strict=False)
    if recipe.model.start is not None:
        load(
            {"model": ModelState(model)},
            checkpoint_id=recipe.input_path(recipe.model.start),
        )
    apply_to_activations(recipe, model)


# --- the model


def make_model(recipe: Recipe) -> Any:
    """The model as one device has it."""
    return platform.prepare_module(_make(recipe), recipe.precision.parameters)


def _make_for_mesh(recipe: Recipe) -> tuple[Any, HuggingFaceReader | None]:
    """A model without memory, and the reader of its weights, from which each rank reads its part.

    None where the files have other names than the model, or the model has experts, whose shards cannot be made without
    memory: `transformers` then reads and converts them, as a whole on every rank.
    """
    wanted = recipe.model
    is_read = wanted.huggingface is not None and wanted.weights
    if not is_read or recipe.precision.parameters != "float32":
        return None, None
    assert wanted.huggingface is not None
    folder = recipe.input_path(wanted.huggingface)
    with platform.init_on_device(platform.meta_device):
        model = huggingface.model_of(folder, "float32", weights=False)
    if find_experts(model):
        return None, None
    return model, huggingface.find_reader(folder, _find_stored(model))


def _find_stored(model: Any) -> set[str]:
    """The names of what a folder must have: state, with one name for what is tied."""
    parameters = platform.parameters_dict(model)
    ids = {id(parameter) for parameter in parameters.values()}
    tied = {
        f"{path}.{own}" if path else own
        for path, module in platform.get_cells_and_names(model)
        for own, tensor in platform.own_tensors(module)
        if id(tensor) in ids
    }
    return set(parameters) | (set(model.state_dict()) - tied)


def _make(recipe: Recipe) -> Any:
    wanted = recipe.model
    if wanted.huggingface is not None:
        folder = recipe.input_path(wanted.huggingface)
        dtype = recipe.precision.parameters
        return huggingface.model_of(folder, dtype, weights=wanted.weights)
    assert wanted.file is not None
    assert wanted.class_ is not None
    kind = _found(recipe, "model", "class", wanted.file, wanted.class_)
    try:
        return _called(kind, wanted.arguments)
    except (TypeError, ValueError) as error:
        problem = Problem("model.arguments", f"{wanted.class_} refused them: {error}")
        raise RecipeError(recipe.path, [problem]) from error


def _called(kind: Any, arguments: Mapping[str, Any]) -> Any:
    """An instance; where a class takes one dataclass, the arguments are those of the dataclass."""
    taken = list(inspect.signature(kind).parameters)
    config = None
    if len(taken) == 1:
        with suppress(NameError):  # a type that is imported for type checkers alone
            config = typing.get_type_hints(kind.__init__).get(taken[0])
    if dataclasses.is_dataclass(config):
        return kind(config(**arguments))  # type: ignore[operator]
    return kind(**arguments)


def _found(recipe: Recipe, part: str, key: str, file: Path, name: str) -> Any:
    """A class or function of a user's file."""
    module = _imported(recipe.input_path(file))
    if not hasattr(module, name):
        raise RecipeError(
            recipe.path,
            [Problem(f"{part}.{key}", f"{module.__file__} has no {key} {name}")],
        )
    return getattr(module, name)


def _imported(path: Path) -> ModuleType:
    """A user's file as a module; it may import its neighbours, as a script may."""
    path = path.resolve()
    name = f"hyper_parallel_recipe_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path):
        return known
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return import_file(path, name)


# --- the plan


def _put_on_mesh(recipe: Recipe, model: Any, mesh: DeviceMesh) -> None:
    plan = recipe.plan
    if recipe.finds_plan:
        styles = find_plan(recipe, model, mesh).styles
        put_on_mesh(model, mesh, _placing(recipe, model, mesh, styles))
    elif plan.file is not None:
        assert plan.function is not None
        function = _found(recipe, "plan", "function", plan.file, plan.function)
        if next(iter(inspect.signature(function).parameters), "") == "model":
            function(model, mesh, **plan.arguments)
            put_rest_on_mesh(model, mesh, _placing(recipe, model, mesh, {}))
            return
        _apply(recipe, model, mesh, function(model.config, **plan.arguments))
    else:
        _apply(
            recipe,
            model,
            mesh,
            {pattern: _style(style) for pattern, style in plan.styles.items()},
        )


def find_plan(recipe: Recipe, model: Any, mesh: DeviceMesh) -> ParallelPlan:
    """The plan that is found for a whole model; every rank finds the same."""
    try:
        found = auto_plan(model, mesh, sequence_parallel=recipe.plan.sequence_parallel)
    except ValueError as error:
        raise RecipeError(recipe.path, [Problem("plan", str(error))]) from error
    if platform.get_rank() == 0 and recipe.folder is not None:
        recipe.folder.mkdir(parents=True, exist_ok=True)
        found.save(recipe.folder / "plan.yaml")
    return found


def _apply(
    recipe: Recipe, model: Any, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle]
) -> None:
    """Puts the model onto every axis of the mesh; what no style names is the same on all ranks."""
    names = [name for name, _ in platform.get_cells_and_names(model)]
    lost = [pattern for pattern in styles if not matching(pattern, names)]
    if lost:
        where = "plan.styles" if recipe.plan.file is None else "plan.function"
        raise RecipeError(
            recipe.path,
            [Problem(where, no_match("module", pattern, names)) for pattern in lost],
        )
    put_on_mesh(model, mesh, _placing(recipe, model, mesh, styles))


def _placing(
    recipe: Recipe, model: Any, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle]
) -> Placing:
    context = recipe.context.model_dump()
    if "dp_shard" not in (mesh.mesh_dim_names or ()):
        return Placing(styles, context=context)
    chosen = choose_modules(recipe, model, "sharding.units", recipe.sharding.units)
    modules = dict(platform.get_cells_and_names(model))
    options: dict[str, Any] = {"mp_policy": _policy(recipe)}
    options["reshard_after_forward"] = recipe.sharding.reshard_after_forward
    in_order = [
        module
        for name, module in modules.items()
        if name in chosen and not is_absent(module)
    ]
    return Placing(styles, in_order, options, context)


def _policy(recipe: Recipe) -> Any:
    from hyper_parallel.core.fully_shard import MixedPrecisionPolicy

    wanted = recipe.precision
    names = {
        "param_dtype": wanted.compute,
        "reduce_dtype": wanted.reduce,
        "output_dtype": wanted.output,
    }
    dtypes: dict[str, Any] = {
        key: platform.str_to_dtype(name) for key, name in names.items() if name
    }
    return MixedPrecisionPolicy(**dtypes)


def _style(wanted: Style) -> ParallelStyle:
    """Tensors keep their shapes, so that the model's code stays as it is."""
    return to_style(wanted.model_dump(exclude_unset=True), use_local_output=False)


# --- the data


def read_corpus(recipe: Recipe, mesh: DeviceMesh | None) -> Corpus:
    """The text, of whose batches this rank has its rows."""
    part, parts = (0, 1) if mesh is None else find_rows(mesh)
    data = recipe.data
    contents: Iterable[bytes] = [python_text()]
    if data.text is not None:
        contents = texts(recipe.input_path(data.text), data.files)
    if data.tokens == "model":
        assert recipe.model.huggingface is not None
        tokens: Any = huggingface.tokens_of(
            recipe.input_path(recipe.model.huggingface), contents
        )
    else:
        tokens = as_bytes(contents)
    try:
        sizes = (data.batch, data.length, recipe.seed)
        return Corpus(tokens, *sizes, held_out=data.held_out, part=part, parts=parts)
    except ValueError as error:
        raise RecipeError(recipe.path, [Problem("data", str(error))]) from error
