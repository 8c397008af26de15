# SPDX-License-Identifier: Apache-2.0
"""Makes what a recipe names: the model, on its mesh by its plan, its batches and its loss.

job = build(recipe, mesh)                     mesh None: one process, without any plan
loss = job.loss(job.model, *job.batch(0))     the mean over the tokens of the whole batch
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from hyper_parallel.core.distributed_checkpoint import ModelState, load
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.placement_types import Replicate, Shard
from hyper_parallel.core.shard.sharding_plan import matching, no_match
from hyper_parallel.core.tensor_parallel.loss import loss_parallel
from hyper_parallel.core.tensor_parallel.style import (
    ColwiseParallel,
    FusedColwiseParallel,
    ParallelStyle,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
)
from hyper_parallel.platform import PlatformType, get_platform
from hyper_parallel.platform.error_codes import coded
from hyper_parallel.ranks.import_file import import_file
from hyper_parallel.recipe import huggingface
from hyper_parallel.recipe.activations import apply_to_activations, choose_modules
from hyper_parallel.recipe.data import Corpus, as_bytes, python_text, texts
from hyper_parallel.recipe.errors import Problem, RecipeError
from hyper_parallel.recipe.roles import (
    ROLES,
    Placing,
    find_rows,
    put_on_mesh,
    shard_state,
)
from hyper_parallel.recipe.schema import Recipe, Style

platform = get_platform()
_STYLES: dict[str, Callable[..., ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "fused_colwise": FusedColwiseParallel,
    "sequence": SequenceParallel,
    "replicate": Replicated,
}


@dataclasses.dataclass(frozen=True)
class Job:
    """What is trained, and on what."""

    model: Any
    mesh: DeviceMesh | None
    corpus: Corpus

    def batch(self, step: int, *, whole: bool = False) -> tuple[Any, Any]:
        """Tokens and those that follow them, for a step: this rank's rows, or all of them."""
        return _as_tensors(self.corpus.training(step, whole=whole))

    def held_out(self, number: int) -> tuple[Any, Any]:
        """This rank's rows of a batch of text that is never trained on."""
        return _as_tensors(self.corpus.held_out(number))

    def loss(self, model: Any, ids: Any, targets: Any) -> Any:
        """The mean loss over the tokens of the whole batch, of which this rank has these rows."""
        output = model(self._placed(ids))
        logits = getattr(output, "logits", output)
        if self.mesh is not None and not isinstance(logits, DTensor):
            raise coded(
                TypeError,
                "HP704",
                f"the model's output on {self.mesh} is a plain {type(logits).__name__}, of which nobody knows how "
                "it lies; say use_local_output=False for the styles of the plan, and end it with '': Replicated()",
            )
        if platform.get_element_size(logits) < 4:
            logits = platform.tensor_type_cast(logits, "float32")
        with loss_parallel():
            loss = platform.operator("cross_entropy")(
                logits.reshape(-1, logits.shape[-1]), self._placed(targets).reshape(-1)
            )
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    def _placed(self, rows: Any) -> Any:
        """This rank's rows as a part of the batch of all."""
        if self.mesh is None or isinstance(rows, DTensor):
            return rows
        dims = [ROLES[name].batch_dim for name in self.mesh.mesh_dim_names or ()]
        placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
        return DTensor.from_local(rows, self.mesh, placements)


def build(recipe: Recipe, mesh: DeviceMesh | None) -> Job:
    """The model, drawn from the recipe's seed, on a mesh with the recipe's axes, or as one process, and its data."""
    platform.manual_seed(recipe.seed)  # the same numbers on every rank
    model = platform.prepare_module(_model(recipe), recipe.precision.parameters)
    place = (0, 1)
    if mesh is not None:
        _put_on_mesh(recipe, model, mesh)
        place = find_rows(mesh)
    if recipe.model.start is not None:
        load(
            {"model": ModelState(model)},
            checkpoint_id=recipe.input_path(recipe.model.start),
        )
    apply_to_activations(recipe, model)
    return Job(model, mesh, _corpus(recipe, *place))


def _as_tensors(rows: tuple[Any, ...]) -> tuple[Any, Any]:
    """Tokens on this process's device; those of MindSpore are int32."""
    kind = "int32" if platform.platform_type is PlatformType.MINDSPORE else "int64"
    arrays = [array.astype(kind) for array in rows]
    ids, targets = (
        platform.tensor_from_bytes(array.view("uint8").reshape(-1), kind, array.shape)
        for array in arrays
    )
    if platform.device_type() == "cpu":
        return ids, targets
    return ids.to(platform.device()), targets.to(platform.device())


# --- the model


def _model(recipe: Recipe) -> Any:
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
    if plan.file is not None:
        assert plan.function is not None
        function = _found(recipe, "plan", "function", plan.file, plan.function)
        if next(iter(inspect.signature(function).parameters), "") == "model":
            function(model, mesh, **plan.arguments)
            shard_state(model, mesh, _placing(recipe, model, mesh, {}))
            return
        _apply(recipe, model, mesh, function(model.config, **plan.arguments))
    else:
        _apply(
            recipe,
            model,
            mesh,
            {pattern: _style(style) for pattern, style in plan.styles.items()},
        )


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
    if "dp_shard" not in (mesh.mesh_dim_names or ()):
        return Placing(styles)
    chosen = choose_modules(recipe, model, "sharding.units", recipe.sharding.units)
    modules = dict(platform.get_cells_and_names(model))
    options: dict[str, Any] = {"mp_policy": _policy(recipe)}
    options["reshard_after_forward"] = recipe.sharding.reshard_after_forward
    in_order = [module for name, module in modules.items() if name in chosen]
    return Placing(styles, in_order, options)


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
    given = wanted.model_dump(exclude_unset=True, exclude={"style"})
    options: dict[str, Any] = {
        {"input": "input_layouts", "output": "output_layouts"}.get(name, name): value
        for name, value in given.items()
    }
    for name in ("input_layouts", "output_layouts"):
        if name in options:
            found = re.search(r"-?\d+", options[name])
            options[name] = Shard(int(found[0])) if found else Replicate()
    return _STYLES[wanted.style](use_local_output=False, **options)


# --- the data


def _corpus(recipe: Recipe, part: int, parts: int) -> Corpus:
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
